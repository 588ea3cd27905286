"""What a device can do at best, before anything of ours is measured against it.

    python -m benchmarks.ceilings --out ceilings.json

The bandwidth of reading and of copying; the rate of large products; and the time of an empty launch inside a graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.common.machine import best_device, device_name
from outrider.common.runtime import versions
from outrider.costs.timing import WARM_UP, captured, timed

from .floor import bandwidth
from .report import command, options, write

LAUNCHES = 1000
REPEATS = 10


def best(work: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of `work`."""
    for _ in range(WARM_UP):
        work()
    return min(timed(work, device) for _ in range(REPEATS))


def product_rate(device: torch.device, size: int) -> float:
    """Return the operations per second of a product of two matrices in bfloat16: what MFU is a share of."""
    one, other = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / best(lambda: one @ other, device)


def launch_seconds(device: torch.device) -> float:
    """Return the seconds of one launch that does next to nothing, among many in a graph."""
    number = torch.zeros(1, device=device)

    def work() -> None:
        for _ in range(LAUNCHES):
            number.add_(1)

    return best(captured(work, device), device) / LAUNCHES


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--bytes", type=int, help="that are read and copied")
    parser.add_argument("--size", type=int, help="of the matrices of the large product")
    arguments = parser.parse_args(given)
    device = best_device()
    size = arguments.size or (8192 if device.type == "cuda" else 512)
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
    write(result, arguments.out)
    print(f"read {measured.read / 1e9:.1f} GB/s, copy {measured.copy / 1e9:.1f} GB/s")
    print(f"products {result['product_flops_per_second'] / 1e12:.2f} TFLOP/s in bfloat16")
    print(f"a launch in a graph {1e6 * result['launch_seconds']:.2f} µs")
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
