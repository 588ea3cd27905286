"""A training step of our block drafters beside the `speculators` package's: speed, and the memory that it takes.

    python -m outrider.scripts.bench.peers_block_training --out peers-blocks-cpu.json   # as `peers_blocks` is run

Both have the same sizes, weights, features and losses (KL divergence to the target; DFlash's fixed decay; P-EAGLE's
shares that go one deeper), one row, AdamW, one thread, float32. Speed: steps in turns. Memory: each in a process of its
own, how far resident memory rises in a step, above what was there once the optimizer had its state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.peagle import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from torch import Tensor, nn

from outrider.common import BadInputError
from outrider.formats import export_drafter
from outrider.heads import DFlash, DFlashConfig, Drafter, PEagle, PEagleConfig, TargetBatch
from outrider.targets import Target, embedded_path

from .conditions import command, conditions, write
from .memory import peak, reset_peak

OURS, THEIRS = "outrider", "speculators"
BLOCK, GAMMA, DEPTHS, RATIO, LEAST, FIRST = 8, 4.0, 8, 0.7, 0.2, 8
SHARED: dict[str, Any] = {"num_layers": 2, "mask_token_id": 1, "draft_vocab_size": 2048}

Step = Callable[[], Tensor]


def load_target() -> Target:
    """Return the embedded target, from a folder that the package reads, too."""
    return Target.load(str(embedded_path()), dtype="float32", device="cpu")


class Material:
    """One row of random text, what the target made of it, and our drafter of a kind."""

    def __init__(self, kind: str, length: int, anchors: int):
        torch.manual_seed(0)
        self.target, self.kind, self.anchors = load_target(), kind, anchors
        self.drafter = self._drafter().train()
        self.tokens = torch.randint(2, self.target.vocab_size, (1, length))
        with torch.no_grad():
            seen = self.target.forward(self.tokens, taps=self.drafter.taps)
        assert seen.hidden is not None
        self.hidden, self.last = seen.hidden, seen.last
        self.learned = torch.arange(length)[None] >= FIRST

    def _drafter(self) -> Drafter:
        counts = torch.arange(self.target.vocab_size)
        if self.kind == "dflash":
            settings: dict[str, Any] = {
                "block_size": BLOCK,
                "num_anchors": self.anchors,
                "gamma": GAMMA,
                "loss": "soft_ce",
            }
            return DFlash.build(DFlashConfig(**SHARED, **settings), self.target, counts)
        shares: dict[str, Any] = {"steps": DEPTHS, "keep_ratio": RATIO, "keep_least": LEAST}
        return PEagle.build(PEagleConfig(**SHARED, **shares, loss="soft_ce"), self.target, counts)

    def ours(self) -> tuple[nn.Module, Step]:
        """Return our module, and what computes its loss."""
        batch = TargetBatch(self.target, self.tokens, self.learned, self.hidden, self.last)
        return self.drafter, lambda: self.drafter.loss(batch).mean

    def theirs(self, attention: str) -> tuple[nn.Module, Step]:
        """Return their module with the same weights, and what computes its loss."""
        kind = DFlashDraftModel if self.kind == "dflash" else PEagleDraftModel
        config_class = DFlashSpeculatorConfig if self.kind == "dflash" else PEagleSpeculatorConfig
        with tempfile.TemporaryDirectory() as folder:
            export_drafter(self.drafter, self.target, "speculators", Path(folder) / "out", DEPTHS - 1)
            config = config_class.from_pretrained(Path(folder) / "out", trust_remote_code=False)
            config.transformer_layer_config._attn_implementation = attention
            model = kind.from_pretrained(Path(folder) / "out", config=config, trust_remote_code=False).train()
        return model, partial(self._their_loss, model)

    def _their_loss(self, model: Any) -> Tensor:
        ahead = self.kind == "peagle"  # its features stand beside the token that follows them
        given = {
            "hidden_states": (self.hidden[:, :-1] if ahead else self.hidden).flatten(2),
            "input_ids": self.tokens[:, 1:] if ahead else self.tokens,
            "loss_mask": (self.learned[:, 1:] if ahead else self.learned).float(),
            "verifier_last_hidden_states": self.last[:, 1:] if ahead else self.last,
        }
        shares = {"num_depths": DEPTHS, "down_sample_ratio": RATIO, "down_sample_ratio_min": LEAST}
        blocks = {"gamma": GAMMA, "max_anchors": self.anchors}
        documents = torch.zeros_like(given["input_ids"])
        options = {"loss_config": resolve_loss_config("kl_div", "eager"), **(shares if ahead else blocks)}
        loss: Tensor = model(**given, document_ids=documents, **options)[1]
        return loss


class Training:
    """A contestant with an optimizer."""

    def __init__(self, module: nn.Module, loss: Step):
        self.loss = loss
        self.optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)

    def step(self) -> float:
        """Take a step, and return its seconds."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        return time.perf_counter() - begin


def contestant(material: Material, name: str) -> Training:
    """Return one of the contestants: outrider, or speculators with an attention."""
    return Training(*(material.ours() if name == OURS else material.theirs(name.removeprefix(f"{THEIRS}, "))))


def speed(kind: str, length: int, anchors: int, names: list[str], repeats: int) -> dict[str, Any]:
    """Return tokens per second of each, by the median and the fastest of steps in turns."""
    material = Material(kind, length, anchors)
    trainings = {name: contestant(material, name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        for name, training in trainings.items():
            spent = training.step()
            if turn:  # the first warms up
                seconds[name].append(spent)
    rates = {n: {"median": length / statistics.median(s), "fastest": length / min(s)} for n, s in seconds.items()}
    best = {how: max(rates[n][how] for n in names if n != OURS) for how in ("median", "fastest")}
    return {
        "tokens_per_second": rates,
        "seconds": seconds,
        "ours_over_their_fastest": {h: rates[OURS][h] / best[h] for h in best},
    }


def memory(kind: str, length: int, anchors: int, names: list[str]) -> dict[str, Any]:
    """Return what a step takes of each, in bytes, in a process of its own."""
    found = {name: _in_a_process(kind, length, anchors, name) for name in names}
    leanest = {how: min(found[n][how] for n in names if n != OURS) for how in ("step_bytes", "peak_bytes")}
    return {"bytes": found, "ours_over_their_leanest": {how: found[OURS][how] / leanest[how] for how in leanest}}


def _in_a_process(kind: str, length: int, anchors: int, name: str) -> dict[str, int]:
    words = [sys.executable, "-m", "outrider.scripts.bench.peers_block_training", "--one-step", kind, name]
    words += ["--lengths", str(length), "--anchors", str(anchors)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise BadInputError(f"the step of {name} failed: {said}")
    answer: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def one_step(kind: str, length: int, anchors: int, name: str) -> dict[str, int]:
    """Return how far resident memory rises in a step, and its peak."""
    training = contestant(Material(kind, length, anchors), name)
    training.step()  # the optimizer's state is there from now on
    before = reset_peak()
    training.step()
    return {"step_bytes": peak() - before, "peak_bytes": peak()}


def main() -> int:
    asked = _arguments()
    torch.set_num_threads(1)
    if asked.one_step:
        print(json.dumps(one_step(asked.one_step[0], asked.lengths[0], asked.anchors, asked.one_step[1])))
        return 0
    target = load_target()
    settings = {"anchors": asked.anchors, "block_size": BLOCK, "depths": DEPTHS, "repeats": asked.repeats}
    names = [OURS, *(f"{THEIRS}, {attention}" for attention in asked.attention)]
    result: dict[str, Any] = {"conditions": conditions(target, attentions=asked.attention, **settings), "steps": []}
    for kind in asked.kinds:
        for length in asked.lengths:
            row = {"kind": kind, "length": length} | speed(kind, length, asked.anchors, names, asked.repeats)
            row["memory"] = memory(kind, length, asked.anchors, names)
            result["steps"].append(row)
            print(kind, length, row["ours_over_their_fastest"], row["memory"]["ours_over_their_leanest"], flush=True)
            write(result, asked.out)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=["dflash", "peagle"], default=["dflash", "peagle"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--anchors", type=int, default=256, help="of DFlash; P-EAGLE begins everywhere")
    parser.add_argument("--attention", nargs="+", default=["sdpa", "eager"], help="of speculators")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one-step", nargs=2, metavar=("KIND", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(command(main))
