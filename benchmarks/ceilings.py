"""What a device can do at best, before anything of ours is measured against it.

    python -m benchmarks.ceilings --out ceilings.json

The bandwidth of reading and of copying; the rate of large products; and the time of an empty launch inside a graph.
The floor of a plain step is its bytes over that bandwidth.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.common import BadInputError
from outrider.common.machine import best_device, device_name
from outrider.common.runtime import versions
from outrider.costs.machine_speed import read_bandwidth
from outrider.costs.timing import captured, least

from .report import command, options, publish, table

LAUNCHES = 1000


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


REPEATS = 10


def bandwidth(device: torch.device | str, num_bytes: int | None = None, repeats: int = REPEATS) -> Bandwidth:
    """Measure how fast the memory of `device` is, the best of `repeats`.

    A copy counts the bytes read and those written. A processor that fetches a line before it overwrites it moves half
    as much again; that is not counted.

    Args:
        num_bytes: how many are copied, and read; None for more than any cache holds.
    """
    size = num_bytes or (2**30 if torch.device(device).type == "cuda" else 2**29)
    if size < 4096:
        raise BadInputError(f"a bandwidth needs at least 4096 bytes to be measured with, got {size}.")
    source = torch.rand(size // 4, device=device)
    destination = torch.empty_like(source)
    copy = 2 * source.nbytes / least(lambda: destination.copy_(source), source.device, repeats)
    return Bandwidth(copy, read_bandwidth(source, repeats), size)


def product_rate(device: torch.device, size: int) -> float:
    """Return the operations per second of a product of two matrices in bfloat16: what MFU is a share of."""
    one, other = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / least(lambda: one @ other, device, REPEATS)


def product_size(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 512


def launch_seconds(device: torch.device) -> float:
    """Return the seconds of one launch that does next to nothing, among many in a graph."""
    number = torch.zeros(1, device=device)

    def work() -> None:
        for _ in range(LAUNCHES):
            number.add_(1)

    return least(captured(work, device), device, REPEATS) / LAUNCHES


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--bytes", type=int, help="that are read and copied")
    parser.add_argument("--size", type=int, help="of the matrices of the large product")
    arguments = parser.parse_args(given)
    device = best_device()
    size = arguments.size or product_size(device)
    measured = bandwidth(device, arguments.bytes)
    result: dict[str, Any] = {
        "device_name": device_name(device),
        "versions": versions(),
        "read_bytes_per_second": measured.read,
        "copy_bytes_per_second": measured.copy,
        "product_size": size,
        "product_flops_per_second": product_rate(device, size),
        "launch_seconds": launch_seconds(device),
    }
    products, launch = result["product_flops_per_second"] / 1e12, 1e6 * result["launch_seconds"]
    figures = [f"{measured.read / 1e9:.1f} GB/s", f"{measured.copy / 1e9:.1f} GB/s", f"{products:.2f} TFLOP/s"]
    head = [result["device_name"], "read", "copy", "products in bfloat16", "a launch in a graph"]
    publish(result, arguments.out, [table(head, [["", *figures, f"{launch:.2f} µs"]])])
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
