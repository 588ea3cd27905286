"""A training step of our heads beside one of the `speculators` package's EAGLE-3: tokens per second, and memory.

    python -m benchmarks.archive.peers.training_step --out training-step-cpu.json

The environment is that of `archive/peers_trained`. As in `peers.py`: features computed before, one AdamW step, three
unrolled steps of EAGLE-3 with a pruned output embedding of 2,048 tokens; and EAGLE-1 as its recipe has it, which is
what one would train here. Contestants take turns; memory is how far a step raises the resident memory, each in a
process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.costs.timing import threads
from outrider.heads import TargetBatch
from outrider.heads.registry import drafter_config
from outrider.recipes import load_recipe
from outrider.targets import Target, embedded_path

from ...report import command, conditions, options, publish, table

STEPS, VOCABULARY, DECAY = 3, 2048, 0.8
EAGLE3 = {"type": "eagle3", "steps": STEPS, "draft_vocab_size": VOCABULARY, "decay": DECAY}
EAGLE3 |= {"norm_taps": True, "norm_output": True}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
Step = Callable[[], None]


def features(target: Target, length: int, taps: Sequence[int]) -> dict[str, Tensor]:
    """Return a row of random tokens, and what both sides read of it."""
    seen: list[Tensor] = []
    norm: Any = target.body.norm
    handle = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = target.forward(tokens, taps=taps, logits=False)
    handle.remove()
    assert out.hidden is not None
    return {"tokens": tokens, "hidden": out.hidden, "last": out.last, "unnormed": seen[0]}


def ours(target: Target, values: dict[str, Any], length: int, dtype: torch.dtype | None) -> Step:
    """Return a training step of our drafter."""
    kind, config = drafter_config(values)
    counts = torch.arange(target.vocab_size, 0, -1)
    head: Any = kind.build(config, target, counts).train()
    row = features(target, length, head.taps)
    learned = torch.arange(length)[None] >= 2
    batch = TargetBatch(target, row["tokens"], learned, row["hidden"], row["last"])
    return stepping(head, lambda: head.loss(batch).mean, dtype)


def theirs(target: Target, attention: str, length: int, dtype: torch.dtype | None) -> Step:
    """Return a training step of their EAGLE-3, by their own collator and forward pass."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn
    from transformers import AutoConfig

    ours_too = drafter_config(EAGLE3)
    taps = ours_too[0].build(ours_too[1], target, torch.arange(target.vocab_size, 0, -1)).taps
    layer = AutoConfig.from_pretrained(str(embedded_path()))
    layer.num_hidden_layers, layer.dtype = 1, torch.float32
    head: Any = Eagle3DraftModel.from_training_args(
        layer,
        t2d=torch.arange(target.vocab_size) < VOCABULARY,
        d2t=torch.zeros(VOCABULARY, dtype=torch.long),
        target_layer_ids=list(taps),
        draft_attn_impl=attention,
        draft_vocab_size=VOCABULARY,
        ttt_steps=STEPS,
        verifier_name_or_path=str(embedded_path()),
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=True,
        norm_output=True,
    ).train()
    row = features(target, length, taps)
    sample = {
        "input_ids": row["tokens"][0],
        "hidden_states": row["hidden"][0].flatten(1),
        "verifier_last_hidden_states": row["unnormed"][0],
        "loss_mask": nn.functional.pad(torch.arange(length)[1:] >= 2, (0, 1)),
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length),
    }
    collate = CollateFn(length - 1, target.hidden_size, len(taps), row["hidden"].dtype, shift_batch)
    batch = {name: value for name, value in collate([sample]).items() if isinstance(value, Tensor)}
    told = {"ttt_steps": STEPS, "ttt_step_loss_decay": DECAY, "loss_config": resolve_loss_config("kl_div", "eager")}
    return stepping(head, lambda: head(**batch, **told)[1], dtype)


def stepping(head: nn.Module, loss: Callable[[], Tensor], dtype: torch.dtype | None) -> Step:
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0)

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            value = loss()
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()

    return step


CONTESTANTS: dict[str, Callable[[Target, int, torch.dtype | None], Step]] = {
    "outrider EAGLE-3": lambda target, *rest: ours(target, EAGLE3, *rest),
    "outrider EAGLE-1": lambda target, *rest: ours(target, load_recipe("embedded-eagle1").drafter, *rest),
    "speculators EAGLE-3, sdpa": lambda target, *rest: theirs(target, "sdpa", *rest),
    "speculators EAGLE-3, eager": lambda target, *rest: theirs(target, "eager", *rest),
}


def speed(target: Target, length: int, precision: str, repeats: int) -> dict[str, float]:
    """Return tokens per second of processor time of each contestant: medians of steps in turns."""
    steps = {name: make(target, length, PRECISIONS[precision]) for name, make in CONTESTANTS.items()}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if turn:  # first calls are slow
                spent[name].append(time.process_time() - began)
    return {name: round(length / statistics.median(times), 1) for name, times in spent.items()}


def memory(target: Target, name: str, length: int, precision: str) -> int:
    """Return by how many bytes a step raises the resident memory of this process."""
    make, dtype = CONTESTANTS[name], PRECISIONS[precision]
    make(target, 64, dtype)()  # what is allocated once
    step = make(target, length, dtype)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def in_a_process(name: str, length: int, precision: str) -> int:
    given = [sys.executable, "-m", "benchmarks.archive.peers.training_step", "--one", name, str(length), precision]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def tables(result: dict[str, Any]) -> list[str]:
    """Return tokens per second and bytes of each contestant, and its share of the best of theirs."""
    texts = []
    for key, cell in result["speed"].items():
        best = max(value for name, value in cell.items() if name.startswith("speculators"))
        rows = [[name, f"{value:,.0f}", f"{value / best:.2f}"] for name, value in cell.items()]
        texts.append(table([f"rows of {key}", "tokens/s", "over the faster of speculators"], rows))
    for key, cell in result["memory"].items():
        least = min(value for name, value in cell.items() if name.startswith("speculators"))
        rows = [[name, f"{value / 1e6:,.0f}", f"{value / least:.2f}"] for name, value in cell.items()]
        texts.append(table([f"memory at {key}", "MB of a step", "over the leaner of speculators"], rows))
    return texts


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "threads")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--memory-length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args(given)
    warnings.simplefilter("ignore")
    with threads(asked.threads):
        target = Target.load("embedded", dtype="float32", device="cpu")
        if asked.one:
            print(memory(target, asked.one[0], int(asked.one[1]), asked.one[2]))
            return 0
        told = conditions(
            target, repeats=asked.repeats, unrolled=STEPS, draft_vocab=VOCABULARY, speculators=version("speculators")
        )
        sizes = [(length, p) for length in asked.lengths for p in PRECISIONS]
        result: dict[str, Any] = {"conditions": told}
        result["speed"] = {f"{n} tokens, {p}": speed(target, n, p, asked.repeats) for n, p in sizes}
        most = asked.memory_length
        result["memory"] = {
            f"{most} tokens, {p}": {name: in_a_process(name, most, p) for name in CONTESTANTS} for p in PRECISIONS
        }
        publish(result, asked.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
