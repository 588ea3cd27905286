"""The least time of a plain step: its bytes over the bandwidth of this machine's memory, as measured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from outrider.common import BadInputError
from outrider.costs.timing import WARM_UP, timed


@dataclass(frozen=True)
class Bandwidth:
    """How fast a device's memory is, in bytes per second, by the best of several tries: a ceiling.

    Attributes:
        copy: of a copy, bytes read plus bytes written.
        read: of reading alone, which is what a plain step does with the weights.
        num_bytes: what was copied and read.
    """

    copy: float
    read: float
    num_bytes: int

    def to_dict(self) -> dict[str, float]:
        """Return the figures as JSON holds them."""
        return asdict(self)


@dataclass(frozen=True)
class Floor:
    """The least time of a plain step: its bytes over the memory's bandwidth.

    A model that fits in the processor's cache can be faster than this.

    Attributes:
        weights: bytes of the weights that a step reads.
        cache: bytes of keys and values that it reads beside them.
    """

    weights: int
    cache: int
    bandwidth: Bandwidth

    @property
    def at_copy(self) -> float:
        """Seconds for the weights at the bandwidth of a copy."""
        return self.weights / self.bandwidth.copy

    @property
    def at_read(self) -> float:
        """Seconds for the weights at the bandwidth of reading."""
        return self.weights / self.bandwidth.read

    @property
    def with_cache(self) -> float:
        """Seconds for weights, keys and values at the bandwidth of reading."""
        return (self.weights + self.cache) / self.bandwidth.read

    def to_dict(self) -> dict[str, float]:
        """Return the figures as JSON holds them."""
        return {
            "weight_bytes": self.weights,
            "cache_bytes": self.cache,
            "copy_bytes_per_second": self.bandwidth.copy,
            "read_bytes_per_second": self.bandwidth.read,
            "seconds_of_weights_at_copy": self.at_copy,
            "seconds_of_weights_at_read": self.at_read,
            "seconds_of_weights_and_cache_at_read": self.with_cache,
        }


def bandwidth(device: torch.device | str, num_bytes: int | None = None, repeats: int = 10) -> Bandwidth:
    """Measure how fast the memory of `device` is, the best of `repeats`.

    A copy counts the bytes read and those written. A processor that fetches a line before it overwrites it moves half
    as much again; that is not counted. Bytes are read by a sum and by a matrix times a vector; the faster one counts.

    Args:
        num_bytes: how many are copied, and read; None for more than any cache holds.
    """
    size = num_bytes or (2**30 if torch.device(device).type == "cuda" else 2**29)
    if size < 4096:
        raise BadInputError(f"a bandwidth needs at least 4096 bytes to be measured with, got {size}.")
    source = torch.rand(size // 4, device=device)

    def per_second(count: int, work: Callable[[], object]) -> float:
        for _ in range(WARM_UP):
            work()
        return count / min(timed(work, source.device) for _ in range(repeats))

    destination = torch.empty_like(source)
    copy = per_second(2 * source.nbytes, lambda: destination.copy_(source))
    matrix = source[: len(source) // 1024 * 1024].view(-1, 1024)
    vector = torch.ones(1024, device=source.device)
    read = max(per_second(source.nbytes, source.sum), per_second(matrix.nbytes, lambda: matrix @ vector))
    return Bandwidth(copy, read, size)
