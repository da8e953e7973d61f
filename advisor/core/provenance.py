"""Where a number comes from. No number is stored or shown without it."""

from __future__ import annotations

from enum import Enum


class Provenance(str, Enum):
    """How a value was obtained."""

    MEASURED = "measured"  # read from a clock, a counter or the driver
    MODELLED = "modelled"  # computed from shapes, dtypes and measured rates
    UNAVAILABLE = "unavailable"  # not known; the reason stands beside it
