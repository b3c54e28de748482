"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MAX_LISTED = 12
"""Up to this many known names are all listed; of more, only the nearest. Chosen to fit two lines."""

_NUM_NEAREST = 3
_MAX_COMPARED_CHARACTERS = 80  # difflib is quadratic in the length


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence part that helps who wrote an unknown name.

    Args:
        name: The unknown name.
        known: All names that would have been right.

    Returns:
        A closest match, if there is one, then all known names when few, else the nearest three.

    >>> nearest("gpt3-1.3B", ["gpt3-1.3b", "gpt3-2.6b"])
    "did you mean 'gpt3-1.3b'? known: gpt3-1.3b, gpt3-2.6b"
    >>> nearest("resnet", ["gpt3-1.3b", "gpt3-2.6b"])
    'known: gpt3-1.3b, gpt3-2.6b'
    >>> nearest("nics", ["links", "nics_per_node"])
    "did you mean 'nics_per_node'? known: links, nics_per_node"
    """
    names = list(dict.fromkeys(known))
    if not names:
        return "none are known here"
    whole = [each for each in names if name.casefold() in re.split(r"[^a-z0-9]+", each.casefold())]
    close = whole if len(whole) == 1 else _ranked(name, names, cutoff=0.6)
    parts = [f"did you mean {close[0]!r}?"] if close else []
    if len(names) <= MAX_LISTED:
        parts.append(f"known: {', '.join(names)}")
    else:
        few = _ranked(name, names, cutoff=0.0)
        parts.append(f"nearest: {', '.join(few)} ({len(names)} are known)")
    return " ".join(parts)


def _ranked(name: str, names: list[str], *, cutoff: float) -> list[str]:
    spelling: dict[str, str] = {}
    for candidate in names:
        spelling.setdefault(candidate[:_MAX_COMPARED_CHARACTERS].casefold(), candidate)
    wanted = name[:_MAX_COMPARED_CHARACTERS].casefold()
    matches = difflib.get_close_matches(wanted, list(spelling), n=_NUM_NEAREST, cutoff=cutoff)
    return [spelling[match] for match in matches]
