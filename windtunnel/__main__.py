"""``python -m windtunnel`` is the command ``windtunnel``.

Run: ``python -m windtunnel --help``
"""

from experiments.entry import main

if __name__ == "__main__":
    main()
