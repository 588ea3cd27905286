"""A target changes in three ways: does the probe say what the decoder would, and what does a refresh bring back?

    python -m outrider.scripts.bench.changed PAIR --work build/changed --out changed.json
    python -m outrider.scripts.bench.changed PAIR --work build/changed --out curves.json --curves --prompts 160

The pair's target is fine-tuned through a LoRA, fine-tuned whole, and quantised (int8, where torchao is installed). For
each the probe's verdict and predicted τ stand beside τ of the decoder on prompts that no probe saw. With --curves the
drafter learns from the target with the LoRA in three ways, on the same responses, and the file holds held-out τ by
tokens learnt from: going on from the pair's weights, by a change of low rank, and from scratch. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.decode import Decoder, Sampling
from outrider.distill.responses import distill
from outrider.eval.race import threads
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import load_suites
from outrider.heads import LowRank
from outrider.pair import Pair, probe
from outrider.pair.refresh import refresh_recipe
from outrider.scripts.quickstart import fine_tune, prose_windows
from outrider.scripts.sizing import Budget
from outrider.targets import Target
from outrider.train import train
from outrider.train.stopping import Until

from .acceptance import rounds_of, shown, tau
from .conditions import command, conditions, write


def changed_targets(pair: Pair, work: Path, budget: Budget) -> Iterator[tuple[str, Target]]:
    """Yield each changed target, with its name; what was trained for it in `work` is used again."""
    own = pair.manifest.target.source.path
    yield "LoRA", _with_lora(pair, work, budget)
    if not (work / "whole" / "config.json").is_file():
        _fine_tune_whole(pair.load_target(), work / "whole", budget)
    yield "whole", pair.load_target(str(work / "whole"))
    for kind in ("int8", "int8-dynamic"):
        yield kind, pair.load_target(own, quantize=kind)


def _with_lora(pair: Pair, work: Path, budget: Budget) -> Target:
    if not (work / "lora").is_dir():
        fine_tune(pair.recipe(), budget, work / "lora", Console())
    return pair.load_target(pair.manifest.target.source.path, adapter=str(work / "lora"))


def _fine_tune_whole(target: Target, folder: Path, budget: Budget) -> None:
    """Train all weights on prose, gently: a tenth of the LoRA's rate."""
    torch.manual_seed(0)
    weights = [p.requires_grad_(True) for p in target.model.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=0.1 * budget.lora_rate, weight_decay=0.0)
    for tokens in prose_windows(target, budget):
        target.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    target.model.save_pretrained(folder)
    target.require_tokenizer().save_pretrained(folder)


# ------------------------------------------------------------ the probe and the decoder


def unseen(pair: Pair, target: Target, num_prompts: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the last prompts of the pair's suites, which no probe repeats, and how many each suite has."""
    calibrated = {prompt.id for prompt in pair.calibration()}
    suites = load_suites(pair.recipe().eval.suites, target.require_tokenizer())
    found = [[p.tokens for p in suite.prompts if p.id not in calibrated][-num_prompts:] for suite in suites]
    return [len(prompts) for prompts in found], [tokens for prompts in found for tokens in prompts]


def decoded(pair: Pair, target: Target, num_prompts: int) -> tuple[Any, list[int]]:
    """Return Σ accepted and Σ rounds of the pair's drafter on `target`, and how many prompts each suite has."""
    strata, prompts = unseen(pair, target, num_prompts)
    decoder = Decoder(target, pair.drafter_for(target))
    return tau(rounds_of(decoder, prompts, 64, Sampling(temperature=0.0), pair.plan, 16)), strata


def compare(pair: Pair, work: Path, num_prompts: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield by changed target what the probe says and what the decoder shows."""
    own, strata = decoded(pair, pair.load_target(), num_prompts)
    bootstrap = Bootstrap(strata, seed=0)
    before = bootstrap.ratio(own)
    for name, target in changed_targets(pair, work, Budget()):
        found = probe(pair, target)
        there, _ = decoded(pair, target, num_prompts)
        predicted = {k: before.value * getattr(found.ratio, k) for k in ("value", "low", "high")}
        yield (
            name,
            {
                "verdict": found.verdict,
                "certain": found.certain,
                "ratio": shown(found.ratio),
                "tau_before": shown(before),
                "tau_predicted": {k: round(v, 4) for k, v in predicted.items()},
                "tau_decoded": shown(bootstrap.ratio(there)),
                "ratio_decoded": shown(bootstrap.quotient(there, own)),
            },
        )


# ------------------------------------------------------------ curves


def curves(pair: Pair, work: Path, num_prompts: int, rank: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the curve τ(tokens) of each way to learn from the target with the LoRA."""
    target = _with_lora(pair, work, Budget())
    shared = [f"data.limit={num_prompts}", "data.holdout=0.15", "training.num_train_epochs=1"]
    first = refresh_recipe(pair, target, work / "responses", shared)
    data = distill(first, target)
    ways: dict[str, list[str]] = {
        "warm": [],
        f"rank {rank}": [],
        "scratch": [f"drafter={json.dumps({k: v for k, v in pair.recipe().drafter.items() if k != 'init'})}"],
    }
    for name, changes in ways.items():
        out = work / name.replace(" ", "-")
        recipe = refresh_recipe(pair, target, out, [*shared, f"data.responses={data}", *changes])
        drafter = LowRank.over(pair.drafter_folder, target, rank) if name.startswith("rank") else None
        train(recipe, target, drafter, resume=False, until=Until(every=4))
        yield name, json.loads((out / "provenance.json").read_text())["training"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--work", type=Path, default=Path("build/changed"), help="what was trained there is kept")
    parser.add_argument("--prompts", type=int, default=20, help="of each suite; with --curves, to learn from")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    pair = Pair.load(given.pair)
    given.work.mkdir(parents=True, exist_ok=True)
    with threads(1):
        settings = {"prompts": given.prompts, "max_new_tokens": 64, "depth": pair.plan.depth, "drafter": pair.digest}
        result: dict[str, Any] = {"conditions": conditions(pair.load_target(), **settings)}
        kind = "curves" if given.curves else "changed"
        result[kind] = {}
        found = (
            curves(pair, given.work, given.prompts, given.rank)
            if given.curves
            else compare(pair, given.work, given.prompts)
        )
        for name, figures in found:
            result[kind][name] = figures
            print(name, json.dumps(figures), flush=True)
            write(result, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
