"""Heads of Outrider beside heads of the `speculators` package, each trained by its own trainer for the same seconds.

    python -m benchmarks.archive.peers_trained.peers_trained --seconds 180 --out peers-trained-180s-cpu.json \\
        --ours "EAGLE-1" runs/eagle1-seed-0/drafter runs/eagle1-seed-1/drafter --theirs "EAGLE-3" runs/peers/eagle3-180

A name, and then the folder of each seed; `peers_training` makes theirs, `benchmarks.ablation --seconds` ours. Outrider
decodes with all of them: the same prompts, chains and trees. What has been counted in --work is not decoded again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider.common.safe_load import read_json
from outrider.costs.timing import threads
from outrider.decode import Decoder, Plan, Sampling
from outrider.eval.reports.figures import Ratio
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import Suite, load_suites
from outrider.formats import import_drafter
from outrider.heads import Drafter, load_drafter
from outrider.targets import Target
from outrider.train.provenance import PROVENANCE

from ...acceptance import rounds_of
from ...report import command, conditions, interval, number, options, publish, shown, table

SHAPES = {
    "T = 0": (0.0, Plan(4)),
    "T = 1": (1.0, Plan(4)),
    "T = 0, tree of 16": (0.0, Plan(7, 4, 16)),  # seven deep and four wide, as benchmarks.ablation
}
FACTS = "facts.json"
Counts = list[tuple[int, int]]  # of each prompt: tokens, rounds


def head_of(folder: Path, target: Target) -> Drafter:
    """Return the drafter in `folder`, ours or theirs."""
    return import_drafter(folder, target) if (folder / FACTS).is_file() else load_drafter(folder, target)


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the training of the drafter in `folder`: its steps, and what else is known."""
    if (folder / FACTS).is_file():
        return read_json(folder / FACTS)
    training = read_json(folder.parent / PROVENANCE)["training"]
    return {name: training[name] for name in ("steps", "spent", "rows")}


def counts_of(folder: Path, seed: int, shape: str, suites: Sequence[Suite], asked: argparse.Namespace) -> Counts:
    """Return tokens and rounds of every prompt, decoded with the drafter in `folder` unless they are in --work."""
    temperature, plan = SHAPES[shape]
    prompts = [list(p.tokens) for s in suites for p in s.prompts]
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    key = json.dumps([weights, seed, shape, prompts, asked.max_new_tokens])
    file = asked.work / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if not file.is_file():
        decoder, sampling = Decoder(asked.target, head_of(folder, asked.target)), Sampling(temperature, seed=seed)
        rounds = rounds_of(decoder, prompts, asked.max_new_tokens, sampling, plan, asked.batch)
        file.write_text(json.dumps([(sum(r.emitted for r in each), len(each)) for each in rounds]))
    return [(emitted, rounds) for emitted, rounds in json.loads(file.read_text())]


def pooled(seeds: Sequence[Counts], prompts: range) -> Ratio:
    """Return τ over some prompts and all seeds, prompt by prompt."""
    within = [[prompt if i in prompts else (0, 0) for i, prompt in enumerate(seed)] for seed in seeds]
    sums = [[sum(part) for part in zip(*of, strict=True)] for of in zip(*within, strict=True)]
    return Ratio([tokens for tokens, _ in sums], [rounds for _, rounds in sums])


def compared(runs: dict[str, list[Counts]], num_ours: int, suites: Sequence[Suite]) -> dict[str, Any]:
    """Return τ of each head, all suites and each of them, and the quotient of each of ours to each of theirs."""
    bootstrap = Bootstrap([len(s.prompts) for s in suites])
    parts, begin = {"tau": range(len(next(iter(runs.values()))[0]))}, 0
    for suite in suites:
        parts[f"tau {suite.name}"] = range(begin, begin := begin + len(suite.prompts))
    found: dict[str, Any] = {"tau": {}, "ours_over_theirs": {}}
    for name, seeds in runs.items():
        by_seed = [number(bootstrap.ratio(pooled([one], parts["tau"])).value) for one in seeds]
        found["tau"][name] = {key: shown(bootstrap.ratio(pooled(seeds, part))) for key, part in parts.items()}
        found["tau"][name]["by_seed"] = by_seed
    names = list(runs)
    for theirs in names[num_ours:]:
        for ours in names[:num_ours]:
            found["ours_over_theirs"][f"{ours} over {theirs}"] = {
                key: shown(bootstrap.quotient(pooled(runs[ours], part), pooled(runs[theirs], part)))
                for key, part in parts.items()
            }
    return found


def tables(result: dict[str, Any]) -> list[str]:
    """Return τ and the quotients at each shape."""
    texts = []
    for shape in (shape for shape in SHAPES if shape in result):
        for title, digits in (("tau", 2), ("ours_over_theirs", 3)):
            rows = {n: {k: v for k, v in row.items() if k != "by_seed"} for n, row in result[shape][title].items()}
            word = "τ" if title == "tau" else "quotient of τ"
            words = [key.replace("tau", word) for key in next(iter(rows.values()))]
            body = [[n, *(interval(v, digits) for v in row.values())] for n, row in rows.items()]
            texts.append(table([f"`{shape}`", *words], body))
    return texts


def main(given: Sequence[str] | None = None) -> int:
    parser = options(__doc__, "suites", "batch", "threads", limit=40, max_new_tokens=64)
    head: dict[str, Any] = {"nargs": "+", "action": "append", "default": [], "metavar": ("NAME", "FOLDER")}
    parser.add_argument("--ours", **head, help="a head of Outrider, and its folders, one for each seed")
    parser.add_argument("--theirs", **head, help="a head of the package")
    parser.add_argument("--seconds", type=float, required=True, help="of processor time of each training")
    parser.add_argument("--work", type=Path, default=Path("runs/peers/counts"))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    asked = parser.parse_args(given)
    asked.work.mkdir(parents=True, exist_ok=True)
    with threads(asked.threads):
        asked.target = Target.load("embedded", dtype="float32", device="cpu")
        suites = load_suites(asked.suites, asked.target.require_tokenizer(), asked.limit)
        groups = (("outrider", asked.ours), ("speculators", asked.theirs))
        heads = {f"{whose} {name}": list(map(Path, given)) for whose, of in groups for name, *given in of}
        told = conditions(
            asked.target,
            processor_seconds=asked.seconds,
            suites=asked.suites,
            prompts=sum(len(s.prompts) for s in suites),
            max_new_tokens=asked.max_new_tokens,
            batch=asked.batch,
            seeds={name: len(folders) for name, folders in heads.items()},
            speculators=version("speculators"),
            intervals="95%, bootstrap over prompts within suites, rounds of all seeds; quotients on the same prompts",
        )
        trainings = {name: [facts_of(folder) for folder in folders] for name, folders in heads.items()}
        result: dict[str, Any] = {"conditions": told, "trainings": trainings}
        for shape in asked.shapes:
            runs = {
                name: [counts_of(folder, seed, shape, suites, asked) for seed, folder in enumerate(folders)]
                for name, folders in heads.items()
            }
            result[shape] = compared(runs, len(asked.ours), suites)
        publish(result, asked.out, tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(command(main))
