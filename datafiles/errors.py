"""The one error a data file can cause."""

from __future__ import annotations


class DataFileError(ValueError):
    """A data file breaks a rule; the text says where, what must hold, what came and what to do.

    Attributes:
        path: File (or other source) as the user knows it.
        line: Line counted from 1, or None where it is not known.
        message: The sentence without path and line.

    >>> print(DataFileError("plan.yaml", "duplicate key 'tp'; keep one of them", line=3))
    plan.yaml:3: duplicate key 'tp'; keep one of them
    """

    def __init__(self, path: object, message: str, *, line: int | None = None) -> None:
        self.path = str(path)
        self.line = line
        self.message = message
        where = self.path if line is None else f"{self.path}:{line}"
        super().__init__(f"{where}: {message}")

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call the class with the joined text only; sweeps send errors between processes.
        return _rebuild, (self.path, self.message, self.line)


def _rebuild(path: str, message: str, line: int | None) -> DataFileError:
    return DataFileError(path, message, line=line)
