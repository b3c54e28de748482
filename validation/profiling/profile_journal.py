"""What an unfinished profile has measured so far: one file, written whole after every part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from datafiles.writer import dump_json, write_text_atomically
from hardware_models.schema import Text

FORMAT = "windtunnel-partial-profile-1"


class _File(FileModel):
    format: Literal["windtunnel-partial-profile-1"]
    identity: dict[str, str]
    date: Text
    results: dict[str, object]


class Journal:
    """The parts measured so far, by key; a part is kept once it is complete, never a piece of one.

    Args:
        path: The partial file.
        identity: What results depend on (machine, versions, model, options): parts of another are not mixed in.
        date: Of the first part.

    Raises:
        DataFileError: If the file is damaged, or of something else; the message says what differs.
    """

    def __init__(self, path: Path, identity: Mapping[str, str], date: str) -> None:
        self.path, self.identity, self.date = path, dict(identity), date
        self.results: dict[str, Any] = {}
        if not path.exists():
            return
        try:
            file = validated(_File, load_mapping(path), str(path))
        except DataFileError as error:
            raise DataFileError(path, f"the partial profile is damaged ({error.message}); --restart drops it") from None
        for what in {**self.identity, **file.identity}:
            own, theirs = self.identity.get(what, "nothing"), file.identity.get(what, "nothing")
            if own != theirs:
                raise DataFileError(
                    path,
                    f"the partial profile is of another {what} ({theirs}; this is {own}): parts of both would not "
                    "belong together; finish it as it was begun, or give another -o, or drop it with --restart",
                )
        self.date, self.results = file.date, dict(file.results)

    def __contains__(self, key: str) -> bool:
        return key in self.results

    def add(self, parts: Mapping[str, Any]) -> None:
        """Keep parts, all of them or none."""
        self.results |= parts
        mapping = {"format": FORMAT, "identity": self.identity, "date": self.date, "results": self.results}
        write_text_atomically(self.path, dump_json(mapping))

    def remove(self) -> None:
        """Remove the file: the profile is written."""
        self.path.unlink(missing_ok=True)
