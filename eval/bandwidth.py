"""How fast this machine's memory could feed a plain step at best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..common import BadInputError
from ..targets import Target
from .timing import WARM_UP, timed


@dataclass(frozen=True)
class Bandwidth:
    """How fast this device's memory is, in bytes per second, by the best of several tries: a ceiling.

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


def bandwidth(device: torch.device | str, num_bytes: int | None = None) -> Bandwidth:
    """Return both bandwidths of `device`, see `copy_bandwidth` and `read_bandwidth`."""
    size = _buffer_bytes(device, num_bytes)
    return Bandwidth(copy_bandwidth(device, size), read_bandwidth(device, size), size)


def copy_bandwidth(device: torch.device | str, num_bytes: int | None = None, repeats: int = 10) -> float:
    """Return the bytes per second of a copy, the best of `repeats`: those read plus those written.

    A processor that fetches a line before it overwrites it moves half as much again; that is not counted.

    Args:
        num_bytes: how many are copied; None for more than any cache holds.
    """
    source = _buffer(device, num_bytes)
    destination = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: destination.copy_(source), source.device, repeats)


def read_bandwidth(device: torch.device | str, num_bytes: int | None = None, repeats: int = 10) -> float:
    """Return the bytes per second of reading, the best of `repeats`.

    Read by a sum and by a matrix times a vector; the faster one counts.

    Args:
        num_bytes: how many are read; None for more than any cache holds.
    """
    source = _buffer(device, num_bytes)
    matrix = source[: len(source) // 1024 * 1024].view(-1, 1024)
    vector = torch.ones(1024, device=source.device)
    return max(
        source.nbytes / _best(lambda: source.sum(), source.device, repeats),
        matrix.nbytes / _best(lambda: matrix @ vector, source.device, repeats),
    )


def _buffer(device: torch.device | str, num_bytes: int | None) -> Tensor:
    size = _buffer_bytes(device, num_bytes)
    if size < 4096:
        raise BadInputError(f"a bandwidth needs at least 4096 bytes to be measured with, got {size}.")
    return torch.rand(size // 4, device=device)


def _buffer_bytes(device: torch.device | str, num_bytes: int | None) -> int:
    return num_bytes or (2**30 if torch.device(device).type == "cuda" else 2**29)


def _best(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    for _ in range(WARM_UP):
        work()
    return min(timed(work, device) for _ in range(repeats))


def weight_bytes(target: Target) -> int:
    """Return how many bytes of weights a plain step has to read.

    All of a dense model's; the input embedding only where it is the output's too.
    """
    table, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    read = {id(p): p for module in (target.body, head) for p in module.parameters()}
    if table.weight is not head.weight:
        read.pop(id(table.weight), None)
    return sum(p.numel() * p.element_size() for p in read.values())
