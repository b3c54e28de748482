"""Bounded number types that the data files of this package are checked against (see datafiles.schema)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Positive = Annotated[float, Field(gt=0, le=1e24)]
"""A physical quantity above zero; 1e24 is far above any rate or size on Earth."""

Seconds = Annotated[float, Field(ge=0, le=1)]
"""What one launch, step, message or wait takes. Nothing of the kind takes a second: more is another unit."""

BytesPerS = Annotated[float, Field(ge=1e5, le=1e18)]
"""A rate. A tenth of the slowest Ethernet's is the least: below are gigabytes or gigabits per second."""

BytesPerParameter = Annotated[float, Field(ge=0, le=1024)]
"""What is kept or moved per parameter; Adam in double precision keeps 32."""

SomeBytesPerParameter = Annotated[float, Field(gt=0, le=1024)]
"""The same, of what every runtime has."""

Factor = Annotated[float, Field(ge=1e-3, le=1e3)]
"""What something measured takes over what was said."""

Fraction = Annotated[float, Field(ge=1e-6, le=1)]
"""A share of a peak, above zero: a millionth is far below any."""

Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole: none of it, or all."""

Ratio = Annotated[float, Field(ge=0, le=1e3)]
"""One figure over another, which may be nothing."""

Slowdown = Annotated[float, Field(ge=1, le=10)]
"""A factor by which something takes longer."""

HalfWaves = Annotated[float, Field(ge=0, le=1000)]
"""Waves of tiles at which half of a rate is reached; fits end at 5 (convolutions count in other tiles)."""

HalfLength = Annotated[float, Field(ge=0, le=100_000)]
"""Length of a sum, or keys of an attention, at which half of a rate is reached; fits end at 2,000."""

RampBytes = Annotated[float, Field(ge=0, le=1e9)]
"""What could have moved while a kernel starts and drains, or a tree fills: milliseconds' worth; fits end at 1e8."""

Load = Annotated[float, Field(ge=0, le=1)]
"""What something adds to a load, as a share of it."""

Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""A number of things, at least one."""

Cards = Annotated[int, Field(ge=1, le=1024)]
"""Network cards of a node."""

Bytes = Annotated[int, Field(ge=0, le=2**50)]
"""A size in memory; 2**50 is a petabyte."""

Text = Annotated[str, Field(min_length=1, max_length=2000)]
"""A name or a source: never empty."""
