"""A target changes in three ways: does the probe say what the decoder would, and what does a refresh bring back?

    python -m outrider.scripts.bench.changed PAIR --work build/changed --out changed.json
    python -m outrider.scripts.bench.changed PAIR --work build/changed --out changed.json --python ENVIRONMENT
    python -m outrider.scripts.bench.changed PAIR --work build/changed --out curves.json --curves --learn 480

The pair's target is fine-tuned through a LoRA, fine-tuned whole, and quantised (int8, where torchao is installed). For
each the probe's verdict and predicted τ stand beside τ of the decoder on prompts that no probe saw, and beside τ of a
vLLM on them, where its environment is given.

With --curves the drafter learns from the target with the LoRA, on the same responses: from scratch, going on from the
pair's weights, and by a change of low rank, both as a refresh does, for 0.4 of the epoch, and for all of it. The file
holds held-out τ by tokens learnt from, and the decoder's τ at the end. What is in the file already is not made again.
Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.costs.timing import threads
from outrider.decode import Decoder, Sampling
from outrider.distill.responses import distill
from outrider.eval.reports.figures import Ratio
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import Suite, load_suites, make_suite
from outrider.heads import Drafter, LowRank, load_drafter
from outrider.pair import Pair, probe
from outrider.pair.refresh import BUDGET, refresh_recipe
from outrider.scripts.quickstart import fine_tune, prose_windows
from outrider.scripts.quickstart_size import QuickstartBudget
from outrider.targets import Target
from outrider.train import train
from outrider.train.stopping import Until

from .acceptance import rounds_of, shown, tau
from .changed_served import ONLY_HERE, Elsewhere
from .conditions import command, conditions, write

TOKENS = 64  # new ones of each prompt


def changed_targets(
    pair: Pair, work: Path, budget: QuickstartBudget, done: Container[str] = ()
) -> Iterator[tuple[str, Target]]:
    """Yield each changed target that is not `done`; what was trained for it in `work` is used again."""
    own = pair.manifest.target.source.path
    made: dict[str, Callable[[], Target]] = {
        "LoRA": lambda: _with_lora(pair, work, budget),
        "whole": lambda: _tuned_whole(pair, work / "whole", budget),
        "int8": lambda: pair.load_target(own, quantize="int8"),
        "int8-dynamic": lambda: pair.load_target(own, quantize="int8-dynamic"),
    }
    yield from ((name, make()) for name, make in made.items() if name not in done)


def _with_lora(pair: Pair, work: Path, budget: QuickstartBudget) -> Target:
    if not (work / "lora").is_dir():
        fine_tune(pair.recipe(), budget, work / "lora", Console())
    return pair.load_target(pair.manifest.target.source.path, adapter=str(work / "lora"))


def _tuned_whole(pair: Pair, folder: Path, budget: QuickstartBudget) -> Target:
    if not (folder / "config.json").is_file():
        _fine_tune_whole(pair.load_target(), folder, budget)
    return pair.load_target(str(folder))


def _fine_tune_whole(target: Target, folder: Path, budget: QuickstartBudget) -> None:
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


# ------------------------------------------------------------ the probe, the decoder and the engine


@dataclass
class Unseen:
    """The decoder's τ on prompts that no probe repeats: the last ones of the pair's suites.

    Attributes:
        suites: of these prompts. own: Σ accepted and Σ rounds of the pair on its own target.
    """

    pair: Pair
    suites: list[Suite]
    own: Ratio

    @classmethod
    def of(cls, pair: Pair, target: Target, num_prompts: int) -> Unseen:
        """Take `num_prompts` of each suite, and decode them with the pair's own `target`."""
        calibrated = {prompt.id for prompt in pair.calibration()}
        suites = load_suites(pair.recipe().eval.suites, target.require_tokenizer())
        found = [(s.name, [p for p in s.prompts if p.id not in calibrated][-num_prompts:]) for s in suites]
        made = cls(pair, [make_suite(name, prompts) for name, prompts in found], Ratio([], []))
        made.own = made.decoded(target, pair.drafter_for(target))
        return made

    def decoded(self, target: Target, drafter: Drafter) -> Ratio:
        """Return Σ accepted and Σ rounds of `drafter` on `target`."""
        prompts = [prompt.tokens for suite in self.suites for prompt in suite.prompts]
        found = rounds_of(Decoder(target, drafter), prompts, TOKENS, Sampling(temperature=0.0), self.pair.plan, 16)
        return tau(found)

    @property
    def bootstrap(self) -> Bootstrap:
        return Bootstrap([len(suite.prompts) for suite in self.suites], seed=0)


def compare(
    pair: Pair, work: Path, unseen: Unseen, done: dict[str, Any], engine: Elsewhere | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield by changed target what the probe says, what the decoder shows, and the engine if there is one."""
    for name, target in changed_targets(pair, work, QuickstartBudget(), done):
        found = probed(pair, target, unseen)
        if engine is not None and name not in ONLY_HERE:
            found["served"] = engine.served(pair, target, unseen.suites, TOKENS)
        yield name, found


def probed(pair: Pair, target: Target, unseen: Unseen) -> dict[str, Any]:
    """Return what the probe says of a changed target, and what the decoder shows."""
    found, bootstrap = probe(pair, target), unseen.bootstrap
    there, before = unseen.decoded(target, pair.drafter_for(target)), bootstrap.ratio(unseen.own)
    predicted = {k: before.value * getattr(found.ratio, k) for k in ("value", "low", "high")}
    return {
        "verdict": found.verdict,
        "certain": found.certain,
        "ratio": shown(found.ratio),
        "tau_before": shown(before),
        "tau_predicted": {k: round(v, 4) for k, v in predicted.items()},
        "tau_decoded": shown(bootstrap.ratio(there)),
        "ratio_decoded": shown(bootstrap.quotient(there, unseen.own)),
    }


# ------------------------------------------------------------ curves


def curves(
    pair: Pair, work: Path, unseen: Unseen, done: dict[str, Any], given: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the curve τ(tokens) of each way to learn from the target with the LoRA, and τ of the decoder at its end."""
    target = _with_lora(pair, work, QuickstartBudget())
    shared = [f"data.limit={given.learn}", "data.holdout=0.05", "training.num_train_epochs=1"]
    data = distill(refresh_recipe(pair, target, work / "responses", shared), target)
    shared.append(f"data.responses={data}")
    full = None
    for name, changes in _ways(pair, given.rank).items():
        out = work / name.replace(" ", "-").replace(",", "")
        if name not in done:
            recipe = refresh_recipe(pair, target, out, [*shared, *changes])
            drafter = LowRank.over(pair.drafter_folder, target, given.rank) if "rank" in name else None
            train(recipe, target, drafter, resume=False, until=Until(every=4))
        there = unseen.decoded(target, load_drafter(out / "drafter", target))
        full = full or there
        training = json.loads((out / "provenance.json").read_text())["training"]
        yield (
            name,
            training
            | {
                "tau_decoded": shown(unseen.bootstrap.ratio(there)),
                "ratio_to_scratch": shown(unseen.bootstrap.quotient(there, full)),
            },
        )


def _ways(pair: Pair, rank: int) -> dict[str, list[str]]:
    """Return the changes of the recipe for each way to learn, the full retraining first."""
    anew = json.dumps({k: v for k, v in pair.recipe().drafter.items() if k != "init"})
    short = [f"training.num_train_epochs={BUDGET}"]
    return {
        "scratch": [f"drafter={anew}"],
        f"warm, {BUDGET:.0%} of the steps": short,
        f"rank {rank}, {BUDGET:.0%} of the steps": short,
        "warm": [],
        f"rank {rank}": [],
    }


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    kind = "curves" if given.curves else "changed"
    done = json.loads(given.out.read_text()) if given.out is not None and given.out.is_file() else {}
    pair = Pair.load(given.pair)
    given.work.mkdir(parents=True, exist_ok=True)
    with threads(1):
        target = pair.load_target()
        settings = {"prompts": given.prompts, "max_new_tokens": TOKENS, "depth": pair.plan.depth}
        settings |= {"learnt_from": given.learn} if given.curves else {}
        done.setdefault("conditions", conditions(target, **settings, drafter=pair.digest))
        found = done.setdefault(kind, {})
        unseen = Unseen.of(pair, target, given.prompts)
        made = (
            curves(pair, given.work, unseen, found, given)
            if given.curves
            else compare(pair, given.work, unseen, found, _engine(given))
        )
        for name, figures in made:
            found[name] = figures
            print(name, json.dumps(figures), flush=True)
            write(done, given.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--work", type=Path, default=Path("build/changed"), help="what was trained there is kept")
    parser.add_argument("--prompts", type=int, default=20, help="of each suite, that τ is counted on")
    parser.add_argument("--learn", type=int, default=480, help="prompts to learn from, with --curves")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--python", type=Path, help="the environment of a vLLM that serves the changed targets, too")
    parser.add_argument("--out", type=Path)
    return parser


def _engine(given: argparse.Namespace) -> Elsewhere | None:
    return None if given.python is None else Elsewhere(given.python)


if __name__ == "__main__":
    sys.exit(command(main))
