"""The command ``windtunnel``.

Commands live in one file each and import what they need when they run, so ``--help`` stays fast.
"""

from __future__ import annotations

import os
import select
import sys
from inspect import cleandoc, getdoc
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from experiments.commands import (
    calibrate,
    compare,
    diff,
    import_plan,
    listing,
    plan,
    predict,
    profile,
    reproduce,
    search,
    simulate,
    sweep,
    validate,
)
from experiments.commands.accuracy import register as register_accuracy
from experiments.console import fail, messages
from experiments.interrupts import INTERRUPTED, one_interrupt, raise_interrupts

UNREAD = 141
"""Exit code where the reader of the output went before its end, as of shells (128 and the number of SIGPIPE)."""


class Commands(TyperGroup):
    """The commands; what an option refuses is told with what came, and an interrupt is told."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            raise_interrupts()
            with one_interrupt():
                try:
                    found = super().invoke(ctx)
                except typer.Exit:
                    _flush()
                    raise
                _flush()
                return found
        except BrokenPipeError:
            if not _is_unread():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes as it ends
            raise typer.Exit(UNREAD) from None
        except KeyboardInterrupt:  # a command that keeps something says so itself
            messages().print("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except typer.BadParameter as error:
            from pydantic import ValidationError

            if isinstance(error.__cause__, ValidationError):
                error.message += f", got {error.__cause__.errors()[0]['input']!r}"
            raise


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _is_unread() -> bool:
    """Return whether standard output is a pipe or socket whose reader has gone."""
    if sys.stdout is None:
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # Errors are told of, whatever is asked for.
    return any(event & select.POLLERR for _, event in poll.poll(0))


class Command(TyperCommand):
    """A command that refuses an option given twice: of two values the first would be dropped without a word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command's name."""
        given: list[Any] = list(self.make_parser(ctx).parse_args(args=list(args))[2])
        for option in given:
            times = sum(other is option for other in given)
            if times > 1 and not (getattr(option, "is_flag", False) or getattr(option, "multiple", False)):
                lists = "comma-separated" in (getattr(option, "help", None) or "").lower()
                remedy = "separate its values by commas" if lists else "leave out all but one"
                raise typer.BadParameter(f"must be given once, got it {times} times; {remedy}", ctx=ctx, param=option)
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="windtunnel",
    cls=Commands,
    help="""Find, simulate and compare parallel training plans.

    [bold]A tour[/bold]

    What there is:      windtunnel list models

    The main job:       windtunnel compare -m gpt3-1.3b -c v100-32g-dgx1:1x4 -b 1024 -o out

    One plan closely:   windtunnel simulate out/plans/megatron-grid.yaml --timeline t.png

    Why one is faster:  windtunnel diff out/plans/ddp.yaml out/plans/megatron-grid.yaml

    Your hardware:      windtunnel calibrate nccl-tests logs/*.txt -c a100-80g-dgx -o measured.json

    Runs you measured:  windtunnel predict runs.csv -c a100-80g-dgx -r megatron-lm-2021

    Is it so, here:     windtunnel validate plan.yaml --limit 20%

    A paper's table:    windtunnel reproduce mpe-counts

    Exit codes: 0 done, 1 a limit was not met, 2 wrong input (one message says what and how to mend it),
    130 interrupted, 141 nobody reads the command's output.
    """,
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(listing.list_names)
app.command("plan")(plan.plan)
app.command("search")(search.search)
app.command("simulate")(simulate.simulate_file)
app.command("predict")(predict.predict)
app.command("diff")(diff.diff)
app.command("compare")(compare.compare_searchers)
app.command("import-plan")(import_plan.import_plan)
app.command("sweep")(sweep.sweep_spec)
app.add_typer(calibrate.app, name="calibrate")
app.command("profile")(profile.profile_machine_file)
app.command("reproduce")(reproduce.reproduce)
app.command("validate")(validate.validate_file)
register_accuracy(app)


def _unwrapped(text: str) -> str:
    """Return a text with one line to a paragraph: terminals are narrower than sources, and break lines themselves."""
    return "\n\n".join(" ".join(map(str.strip, part.splitlines())) for part in text.split("\n\n"))


for group in (app, calibrate.app):
    group.info.help = _unwrapped(cleandoc(group.info.help or ""))
    for command in group.registered_commands:
        command.help = _unwrapped(getdoc(command.callback) or "")
        command.cls = Command


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from importlib.metadata import version as installed_version

        print(installed_version("windtunnel"))
        raise typer.Exit


def main() -> None:
    """Run the command line; a wrong input ends with one message and exit code 2, never a traceback."""
    try:
        app()
    except (ValueError, OSError) as error:
        sys.exit(fail(error))
