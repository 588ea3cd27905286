"""What is attacked: every verb that writes, on a target of a few thousand weights."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from world import make_llama, make_tokenizer

import outrider.recipes
import outrider.targets.loading
from outrider.common import BadInputError
from outrider.common.atomic import replacing_folder
from outrider.common.terminal import VisibleConsole
from outrider.distill import distill
from outrider.distill.prompt_table import Prompt
from outrider.eval import Report, tuner
from outrider.eval.measure import contestants, measure
from outrider.eval.reports.render import write_report
from outrider.eval.suites import make_suite
from outrider.eval.tuning_record import BatchTuning, Candidate, CostRecord, Tuning
from outrider.pair import Pair, PairFiles, export_pair, new_pair
from outrider.pair.refresh import refresh
from outrider.pair.registry import FolderStore, PairReference, Registry
from outrider.recipes import Recipe
from outrider.scripts import quickstart
from outrider.targets import Target
from outrider.train import train
from outrider.train.compare import compare

STORY = quickstart.QuickstartBudget(
    prompts=8,
    least_prompts=8,
    refresh_share=0.75,
    new_tokens=8,
    train_seconds=1.0,
    refresh_seconds=1.0,
    suite_prompts=2,
    suite_tokens=6,
    gate_prompts=14,
    tune_tokens=6,
    lora_steps=2,
    lora_rows=2,
    lora_length=16,
)
TEXTS = [
    "def add(first, second):",
    "for name in sorted(names):\n",
    "The target verifies",
    "class Stack:\n    def",
    "print(len(name))",
    "return first + second",
    "while queue:\n    item",
    "The text stays the same",
]


def tiny_target(noise: float = 0.0) -> Target:
    """Return a random Llama with a tokenizer of 320 entries, the same each time."""
    tokenizer = make_tokenizer(TEXTS, 320, ["<|pad|>", "<|end|>"])
    model = make_llama(tokenizer, 0, num_hidden_layers=4, max_position_embeddings=4096).eval().requires_grad_(False)
    for weight in model.parameters():
        weight += noise * torch.randn(weight.shape)
    return Target(model, tokenizer)


@dataclass
class Workshop:
    """The folder that is attacked (always the same path, since recipes name it), and what all verbs share."""

    root: Path

    def __post_init__(self) -> None:
        self.work = self.root / "work"
        self.out, self.pair = self.work / "out", self.work / "pair"

    @cached_property
    def target(self) -> Target:
        return tiny_target()

    @cached_property
    def changed(self) -> Target:
        return tiny_target(noise=0.01)

    @cached_property
    def prompts(self) -> list[Prompt]:
        tokenizer = self.target.require_tokenizer()
        return [Prompt(f"a/{i}", "a", tuple(tokenizer(t)["input_ids"]), t) for i, t in enumerate(TEXTS[:4])]

    def recipe(self, name: str = "tiny", **training: Any) -> Recipe:
        file = self.root / "prompts.txt"
        if not file.exists():
            file.write_text("\n\n".join(TEXTS))
        values: dict[str, Any] = {
            "name": name,
            "output": str(self.out),
            "target": {"path": "in-memory"},
            "drafter": {"type": "medusa", "num_heads": 2},
            "data": {
                "prompts": [str(file)],
                "max_new_tokens": 12,
                "batch_size": 2,
                "holdout": 0.0,
                "features": "cached",
            },
            "training": {
                "max_steps": 6,
                "save_steps": 2,
                "save_total_limit": 2,
                "per_device_train_batch_size": 4,
                "disable_tqdm": True,
                "learning_rate": 1e-3,
                "use_cpu": True,
            }
            | training,
            "eval": {"depth": 2, "max_new_tokens": 8, "repeats": 1, "temperatures": [0.0], "baselines": []},
        }
        return Recipe.from_dict(values)

    def distill(self) -> None:
        distill(self.recipe(), self.target)

    def train(self) -> None:
        train(self.recipe(), self.target)

    def make_pair(self, name: str = "tiny") -> None:
        new_pair(self.pair, self.target, self.out / "drafter", self.recipe(name), calibration=self.prompts)

    def replace_pair(self) -> None:
        self.make_pair("again")

    def store(self) -> None:
        Pair.load(self.pair).store_tuning(tuning(1))

    def report(self) -> None:
        write_report(Report.load(self.root / "report"), self.work / "report")

    def measure(self) -> None:
        """Write the report that `report` copies; times are never the same twice."""
        from outrider.heads import load_drafter

        suites = [make_suite("a", self.prompts)]
        settings = self.recipe().eval
        drafter = load_drafter(self.out / "drafter", self.target)
        report = measure(self.target, contestants(self.target, drafter, settings), suites, settings)
        write_report(report, self.root / "report")
        write_report(report.model_copy(update={"created": "before"}), self.work / "report")

    def refresh(self) -> None:
        refresh(Pair.load(self.pair), self.changed, self.work / "refreshed", ["eval.suites=[code]", "eval.limit=1"])

    def push(self) -> None:
        Registry(FolderStore(self.work / "registry")).push(PairFiles.load(self.pair))

    def pull(self) -> None:
        Registry(FolderStore(self.work / "registry")).pull(PairReference.parse("tiny"), self.work / "pulled")

    def export(self) -> None:
        """Export; that it was done before is no failure."""
        target = Target(self.target.model, self.target.tokenizer, {"path": str(self.root / "target")})
        is_done = (self.work / "exported").exists()
        try:
            export_pair(Pair.load(self.pair), "vllm", self.work / "exported", 2, target)
        except BadInputError:
            if not is_done:
                raise

    def quickstart(self) -> None:
        """Tell a story of two steps, on a tiny target, prompts and recipe where the package has its own."""
        here = self.root / "recipes"
        if not here.exists():
            with replacing_folder(here) as building:
                _write_recipes(building, self.target)
        outrider.recipes._HERE = here
        tuner.WIDTHS, tuner.TREE_SIZES = (0, 1, 2, 4, 8), (4,)  # type: ignore[misc]
        for module in (outrider.targets, outrider.targets.loading, quickstart):
            module.embedded_path = lambda: here / "embedded" / "target"  # type: ignore[attr-defined]
        quickstart.LAST_STAGES = []
        quickstart.tell(self.work / "story", VisibleConsole(), STORY)

    def compare(self) -> None:
        recipes = [self.recipe(name, disable_tqdm=True) for name in ("one", "two")]
        for recipe in recipes:
            recipe.eval.suites, recipe.eval.limit = ["code"], 1
        compare(recipes, 0.3, self.work / "compared", self.target)


def _write_recipes(folder: Path, target: Target) -> None:
    inside = folder / "embedded"
    target.model.save_pretrained(inside / "target")
    target.require_tokenizer().save_pretrained(inside / "target")
    for kind in ("suites", "prompts", "texts"):
        (inside / kind).mkdir()
        for suite in ("code", "docs", "prose"):
            texts = (f"for {suite}_{i} in {kind}:\n    print({i})\n" for i in range(6))
            rows = [json.dumps({"id": f"{kind}/{suite}/{i}", "text": text}) for i, text in enumerate(texts)]
            (inside / kind / f"{suite}.jsonl").write_text("\n".join(rows) + "\n")
    recipe = yaml.safe_load(outrider.recipes.packaged_recipes()[quickstart.QuickstartBudget.recipe].read_text())
    recipe["training"] |= {"disable_tqdm": True, "use_cpu": True}
    (folder / f"{quickstart.QuickstartBudget.recipe}.yaml").write_text(yaml.safe_dump(recipe))


def tuning(depth: int) -> Tuning:
    """Return a tuning as the tuner writes it."""
    costs = CostRecord(widths=[0, 8], verify=[0.01, 0.02], draft=[0.0, 0.001], host=0.0005)
    times = {"predicted_tau": 2.0, "round_seconds": 0.01, "predicted": 99.5, "speedup": 1.5}
    best = Candidate(plan={"depth": depth}, weight=16.0, **times)
    chosen = {"candidates": [best], "chosen": best, "reason": "The best."}
    batch = BatchTuning(batch_size=1, context=64, rates=[0.5], ranks=[], costs=costs, **chosen)
    values = {"created": "2031-01-01", "device": "cpu", "device_name": "a machine", "dtype": "float32", "threads": 1}
    values |= {"versions": {"torch": "2"}, "drafter": "medusa", "temperature": 0.0, "max_new_tokens": 16}
    values |= {"repeats": 2, "seed": 0, "suites": {"a": "d"}, "num_prompts": 3, "batches": [batch]}
    return Tuning.model_validate(values)


T = TypeVar("T")


@dataclass(frozen=True)
class Verb:
    """A verb that writes: what it does, where it starts from, and how many kills it gets.

    Attributes:
        after: verbs that were run before, in a folder that is kept for all attempts.
        varies: tells of a path whether its content differs from run to run (times, dates).
        wanders: tells of a path whether it is there in one run and not in another: checkpoints by the clock.
        intact: whether a pair was there, which must be whole at any moment.
    """

    name: str
    act: Callable[[Workshop], None]
    after: tuple[str, ...]
    kills: int
    varies: Callable[[str], bool] = lambda name: False
    intact: bool = False
    wanders: Callable[[str], bool] = lambda name: False


def timed(name: str) -> bool:
    """Tell whether a file of a training holds times."""
    last = name.rsplit("/", 1)[-1]
    in_checkpoint = "/checkpoints/" in name and last in ("trainer_state.json", "SHA256SUMS", "training_args.bin")
    return in_checkpoint or (last == "provenance.json" and "/data/" not in name)


def measured(name: str) -> bool:
    """Tell whether a file of a refresh or a comparison holds measured times, or follows from them."""
    return timed(name) or name.endswith("pair.json") or any(p in name for p in ("/reports/", "/report/", "/seconds-"))


def told(name: str) -> bool:
    """Tell whether a file of a story holds measured times, or follows from them: its plans are this machine's."""
    return ("/data/" not in name and "/features/" not in name) or "/seconds-" in name


def _by_the_clock(name: str) -> bool:
    """Tell whether a path holds a digest of what is measured, or the steps that fitted a time."""
    return any(part in name for part in ("/features/", "/reports/", "/checkpoint-"))


VERBS = [
    Verb("distill", Workshop.distill, (), 30),
    Verb("train", Workshop.train, ("distill",), 50, timed),
    Verb("pair new", Workshop.make_pair, ("distill", "train"), 25),
    Verb("pair new, in place of one", Workshop.replace_pair, ("distill", "train", "pair new", "tune"), 45, intact=True),
    Verb("tune", Workshop.store, ("distill", "train", "pair new"), 30, intact=True),
    Verb("measure", Workshop.measure, ("distill", "train"), 0, lambda name: True),
    Verb("eval", Workshop.report, ("distill", "train", "measure"), 25),
    Verb("refresh", Workshop.refresh, ("distill", "train", "pair new"), 12, measured, intact=True),
    Verb("pair push", Workshop.push, ("distill", "train", "pair new"), 30, intact=True),
    Verb("pair pull", Workshop.pull, ("distill", "train", "pair new", "pair push"), 30, intact=True),
    Verb("export", Workshop.export, ("distill", "train", "pair new"), 30, intact=True),
    Verb("quickstart", Workshop.quickstart, (), 12, told, wanders=_by_the_clock),
    # Its time budget gives other checkpoints, and so other weights, in every run.
    Verb("compare", Workshop.compare, (), 20, lambda n: "/data/" not in n, wanders=lambda n: "/checkpoint-" in n),
]


def verb(name: str) -> Verb:
    return next(v for v in VERBS if v.name == name)


def attack_each(
    workshop: Workshop,
    counts: dict[Verb, int],
    seed: int,
    only: list[str] | None,
    attack: Callable[[Workshop, Verb, random.Random, int], T],
) -> list[T]:
    """Attack verbs, each so many times and with chances of its own; of `only` some, if it names any."""
    _ = workshop.target, workshop.changed, workshop.prompts
    chosen = [(v, count) for v, count in counts.items() if not only or v.name in only]
    return [attack(workshop, v, random.Random(f"{seed} {v.name}"), count) for v, count in chosen]


def template(workshop: Workshop, wanted: Verb, run: Callable[[Callable[[], object]], None]) -> Path:
    """Return a folder with what `wanted` starts from, made once; `run` does each step in a process of its own."""
    kept = workshop.root / "templates" / "+".join(wanted.after or ("nothing",))
    if kept.exists():
        return kept
    shutil.rmtree(workshop.work, ignore_errors=True)
    if wanted.after:
        before = verb(wanted.after[-1])
        shutil.copytree(template(workshop, before, run), workshop.work, symlinks=True)
        run(lambda: before.act(workshop))
    else:
        workshop.work.mkdir()
    kept.parent.mkdir(exist_ok=True)
    os.rename(workshop.work, kept)
    return kept
