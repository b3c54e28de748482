"""Where the command ``windtunnel`` begins: Ctrl-C while it loads is answered as it is later, not with a traceback."""

from experiments.interrupts import end_at_interrupt


def main() -> None:
    """Run the command line."""
    end_at_interrupt()
    from experiments.cli import main as run

    run()
