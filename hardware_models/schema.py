"""Bounded number types that the data files of this package are checked against (see datafiles.schema)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Positive = Annotated[float, Field(gt=0, le=1e24)]
"""A physical quantity above zero; 1e24 is far above any rate or size on Earth."""

NonNegative = Annotated[float, Field(ge=0, le=1e24)]
"""A physical quantity that may be zero."""

Fraction = Annotated[float, Field(gt=0, le=1)]
"""A share of a peak, in (0, 1]."""

Slowdown = Annotated[float, Field(ge=1, le=10)]
"""A factor by which something takes longer."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""A number of things, at least one."""

Bytes = Annotated[int, Field(ge=0, le=2**50)]
"""A size in memory; 2**50 is a petabyte."""

Text = Annotated[str, Field(min_length=1, max_length=2000)]
"""A name or a source: never empty."""
