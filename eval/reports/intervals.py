"""A figure with its confidence interval, and the ratio of two sums that such a figure is made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from numpy.typing import ArrayLike
from pydantic import BeforeValidator, WithJsonSchema

RESAMPLES, CONFIDENCE = 2000, 0.95  # of every interval, unless it says otherwise

# JSON has no nan: a number that does not exist is written as null.
Number = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "null"}]}),
]


@dataclass(frozen=True)
class Interval:
    """A figure and its confidence interval; nan where the data do not give one."""

    value: Number
    low: Number
    high: Number

    def text(self, decimals: int = 2, unit: str = "") -> str:
        """Return `1.42× [1.38, 1.46]`; only the value where there is no interval, `–` where there is no value."""
        return f"{self.main(decimals, unit)} {self.bounds(decimals)}".strip()

    def main(self, decimals: int = 2, unit: str = "") -> str:
        """Return the value alone, as text."""
        return "–" if math.isnan(self.value) else f"{self.value:.{decimals}f}{unit}"

    def bounds(self, decimals: int = 2) -> str:
        """Return `[1.38, 1.46]`, or nothing where there is no interval."""
        return f"[{self.low:.{decimals}f}, {self.high:.{decimals}f}]" if self.known else ""

    @property
    def known(self) -> bool:
        """Whether there is an interval around the value."""
        return not (math.isnan(self.value) or math.isnan(self.low) or math.isnan(self.high))

    @property
    def lowest(self) -> float:
        """The lower end of the interval; the value where there is no interval."""
        return self.low if self.known else self.value

    @property
    def highest(self) -> float:
        """The upper end of the interval; the value where there is no interval."""
        return self.high if self.known else self.value

    def excludes(self, value: float) -> bool:
        """Tell whether the interval is known and lies beside `value`."""
        return self.known and not self.low <= value <= self.high


@dataclass(frozen=True)
class Ratio:
    """Two lists of numbers `[N]`, one per prompt: Σ numerators / Σ denominators, plus a constant."""

    numerators: ArrayLike
    denominators: ArrayLike
    offset: float = 0.0
