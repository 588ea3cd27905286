"""Which taps of a target an EAGLE-3 head listens to, of all: what `drafter.taps` may then be.

    python -m benchmarks.archive.frontier.gates runs/all-taps/drafter

A tap is as loud as its part of the first projection, each column times the weight of the tap's norm (`norm_taps`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from outrider.heads import load_drafter
from outrider.heads.eagle import Eagle3
from outrider.targets import Target


def loudness(head: Eagle3) -> dict[int, float]:
    """Return the root mean square of each tap's part of what the first layer reads, if all taps are of one scale."""
    parts = head.fc.weight.detach().chunk(len(head.taps), 1)
    scaled = [part * norm.weight for part, norm in zip(parts, head.tap_norms, strict=True)]
    return {tap: float(part.square().sum(1).mean().sqrt()) for tap, part in zip(head.taps, scaled, strict=True)}


if __name__ == "__main__":
    with torch.no_grad():
        found = load_drafter(Path(sys.argv[1]), Target.load("embedded", dtype="float32"))
        assert isinstance(found, Eagle3)
        for tap, loud in loudness(found).items():
            print(tap, f"{loud:.3f}")
