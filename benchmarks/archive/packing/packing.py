"""How much faster a head learns from packed rows than from padded ones, and how full each are.

    python -m outrider.scripts.bench.packing --out scripts/bench/results/packing-cpu.json
    python -m outrider.scripts.bench.packing --texts 24 --median 20 --repeats 1

An EAGLE-3 head on the target that ships with Outrider learns random texts once, whose lengths are spread as those of
answers are (log-normal): in rows of one text, so many to a batch, and in packs of as many tokens as such a batch has on
average. Passes of the target, losses and backward passes are timed, the two ways in turn. Rates count tokens of texts,
not padding.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from outrider.heads import Eagle3, Eagle3Config
from outrider.targets import Target
from outrider.train.data import Batches, OnlineBatches, Rows, collate, split
from outrider.train.packing import PackedBatches, Packs

from .conditions import command, conditions, write


def texts(count: int, middle: int, longest: int, vocab_size: int) -> Rows:
    """Return random texts, a third of each a prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths = (middle * torch.randn(count, generator=generator).mul(0.8).exp()).long().clamp(8, longest).tolist()
    rows = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(vocab_size, (length,), generator=generator).tolist()
        mask = [0] * (length // 3) + [1] * (length - length // 3)
        rows.append({"id": str(number), "input_ids": tokens, "loss_mask": mask})
    return split(Dataset.from_list(rows), 0.0)[0]


def padded(rows: Rows, at_once: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of rows in a random order, as a training would."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    for begin in range(0, len(order), at_once):
        yield collate([rows[i] for i in order[begin : begin + at_once]])


def packed(packs: Packs) -> Iterator[dict[str, Tensor]]:
    """Yield batches of one pack each."""
    for number in range(len(packs)):
        yield collate([packs[number]])


def epoch(head: Eagle3, batches: Batches, inputs: Sequence[dict[str, Tensor]]) -> float:
    """Return the seconds of learning all inputs once."""
    began = time.perf_counter()
    for one in inputs:
        head.loss(batches.of(one)).mean.backward()
        head.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def described(inputs: Sequence[dict[str, Tensor]], tokens: int, seconds: list[float]) -> dict[str, Any]:
    places = sum(one["input_ids"].numel() for one in inputs)
    return {
        "batches": len(inputs),
        "longest_batch_tokens": max(one["input_ids"].numel() for one in inputs),
        "tokens_of_all_places": tokens / places,
        "seconds": median(seconds),
        "tokens_per_second": tokens / median(seconds),
    }


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--median", type=int, default=150, help="tokens of a text")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=8, help="of a padded batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    target = Target.load("embedded", dtype="float32", device="cpu")
    rows = texts(arguments.texts, arguments.median, arguments.longest, target.vocab_size)
    head = Eagle3.build(Eagle3Config(steps=3), target, torch.arange(target.vocab_size)).float().train()
    online = OnlineBatches(target, head.taps)
    packs = Packs(
        rows,
        max(arguments.longest, arguments.rows * sum(len(rows[i]["input_ids"]) for i in range(len(rows))) // len(rows)),
    )
    ways: dict[str, tuple[Batches, list[dict[str, Tensor]]]] = {
        "padded": (online, list(padded(rows, arguments.rows))),
        "packed": (PackedBatches(online), list(packed(packs))),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        for name, (batches, inputs) in ways.items():
            seconds[name].append(epoch(head, batches, inputs))
            print(f"{name}: {seconds[name][-1]:.1f} s", flush=True)
    found = {name: described(inputs, packs.tokens, seconds[name]) for name, (_, inputs) in ways.items()}
    settings = {"texts": len(rows), "tokens": packs.tokens, "median_length": arguments.median, "rows": arguments.rows}
    result = {
        "conditions": conditions(
            target, unrolled_steps=3, pack_tokens=packs.size, repeats=arguments.repeats, **settings
        ),
        "ways": found,
        "times_padded": found["padded"]["seconds"] / found["packed"]["seconds"],
    }
    print({name: round(value["tokens_per_second"]) for name, value in found.items()}, f"{result['times_padded']:.2f}×")
    write(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
