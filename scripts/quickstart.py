"""The whole life of a pair on the target that ships with Outrider: `outrider quickstart`.

Nothing here is private to the quickstart: every stage is a few lines around public functions, and reading this file from
top to bottom is one way to learn them. Each stage leaves its result in the working folder, and a second run reuses it.

    data/, drafter/, report/    the target's responses, the trained head, what it achieved
    pair-v1/                    target, drafter and report, bound together
    adapter/                    the target changes: a LoRA fine-tune on another domain
    stale/                      what the old drafter achieves on the changed target
    refreshed/                  the same as above for the changed target; refreshed/pair is version 2
    story.json                  which stages are done, how long each took, and what it found
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ..recipes import Recipe, embedded_file, load_recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ..eval import Report
    from ..eval.reports.gate import GateResult
    from ..heads import Drafter
    from ..pair import Pair
    from ..targets import Target


@dataclass(frozen=True)
class Budget:
    """Everything that decides how long the quickstart takes; the values fit six minutes on two CPU cores.

    Attributes:
        prompts, refresh_prompts, new_tokens: how many responses the target writes, the first time and for the refresh, and how
            long they are at most. Each is learned once.
        suites, suite_prompts, suite_tokens, repeats: what is measured, each time.
        probe_prompts: what pair v1 remembers for probes to repeat.
        tune_steps, tune_rows, tune_length, tune_rate, tune_rank: the LoRA fine-tune that changes the target.
        tolerance, confidence: of the gate.
    """

    prompts: int = 1080
    refresh_prompts: int = 320
    new_tokens: int = 80
    suites: tuple[str, ...] = ("code", "docs")
    suite_prompts: int = 12
    suite_tokens: int = 64
    repeats: int = 1
    depth: int = 4
    baselines: tuple[str, ...] = ("ngram",)
    probe_prompts: int = 16
    tune_steps: int = 100
    tune_rows: int = 4
    tune_length: int = 128
    tune_rate: float = 4e-3
    tune_rank: int = 32
    tolerance: float = 0.03
    confidence: float = 0.95

    def changes(self, output: Path) -> list[str]:
        """The overrides that fit the packaged recipe to this budget."""
        from ..ground.machine import cpu_multiplies_bfloat16

        values: dict[str, Any] = {
            "output": str(output),
            "data.limit": self.prompts,
            "data.max_new_tokens": self.new_tokens,
            "training.bf16": cpu_multiplies_bfloat16(),
            "training.logging_steps": 0.25,
            "training.eval_steps": 0.5,
            "eval.suites": list(self.suites),
            "eval.limit": self.suite_prompts,
            "eval.max_new_tokens": self.suite_tokens,
            "eval.repeats": self.repeats,
            "eval.depth": self.depth,
            "eval.temperatures": [0.0],
            "eval.baselines": list(self.baselines),
        }
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def tell(out: Path, console: Console, budget: Budget | None = None) -> bool:
    """Run every stage that is not done yet, then print what came of it; returns whether the gate passed.

    Raises:
        BadInputError: `out` holds a story that was told with another budget, target or version.
    """
    story = Story(out, console, budget or Budget())
    for number, (title, work) in enumerate(story.stages(), 1):
        story.run(number, title, work)
    story.conclude()
    return story.verdict.passed


class Story:
    """One working folder: its stages, and what each of them needs, loaded when it is first used."""

    def __init__(self, out: Path, console: Console, budget: Budget):
        self.out, self.console, self.budget = out, console, budget
        self.recipe: Recipe = load_recipe("embedded-eagle3", budget.changes(out))
        self.file = out / "story.json"
        self.done: dict[str, dict[str, Any]] = self._open()
        self.reused = len(self.done)

    def stages(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("the target writes responses", self.distil),
            ("an EAGLE-3 head learns from them", self.train),
            ("measured beside the plain target", self.measure),
            ("pair v1", self.bind),
            ("the target changes: LoRA on prose", self.fine_tune),
            ("probe: does v1 still fit?", self.probe),
            ("v1 on the changed target", self.measure_stale),
            ("refresh: learn from the new target", self.refresh),
            ("gate: v2 against v1", self.gate),
            ("pair v2", self.verify),
        ]

    # ------------------------------------------------------------ what the stages share

    @cached_property
    def target(self) -> Target:
        from ..targets import Target

        return Target.load(**self.recipe.target.model_dump())

    @cached_property
    def changed(self) -> Target:
        """The target after its fine-tune: the adapter is merged, as it would be served."""
        from ..targets import Target

        return Target.load(**self.recipe.target.model_dump() | {"adapter": str(self.out / "adapter")})

    @cached_property
    def pair(self) -> Pair:
        from ..pair import Pair

        return Pair.load(self.out / "pair-v1")

    @cached_property
    def refreshed(self) -> Pair:
        from ..pair import Pair

        return Pair.load(self.out / "refreshed" / "pair")

    @cached_property
    def verdict(self) -> GateResult:
        from ..eval import Report
        from ..eval.reports.gate import gate

        return gate(
            newest_report(self.refreshed),
            Report.load(self.out / "report"),
            tolerance=self.budget.tolerance,
            confidence=self.budget.confidence,
        )

    # ------------------------------------------------------------ the stages

    def distil(self) -> str:
        from ..distill import distill, provenance

        counts = provenance(distill(self.recipe, self.target, self.console))["counts"]
        return f"{counts['sequences']} responses, {counts['response_tokens']:,} tokens"

    def train(self) -> str:
        from ..train import train

        result = train(self.recipe, self.target, console=self.console)
        return f"{result.steps} steps"

    def measure(self) -> str:
        from ..eval.reports.render import write_report
        from ..heads import load_drafter

        head = load_drafter(self.out / "drafter", self.target)
        report = self._measure(self.target, head, baselines=True)
        write_report(report, self.out / "report")
        return report.sentence()

    def bind(self) -> str:
        from ..eval.suites import load_suites
        from ..pair import new_pair

        each = -(-self.budget.probe_prompts // len(self.budget.suites))
        asked = [p for s in load_suites(self.budget.suites, self.target.require_tokenizer(), each) for p in s.prompts]
        pair = new_pair(
            self.out / "pair-v1",
            self.target,
            self.out / "drafter",
            self.recipe,
            self.out / "report",
            calibration=asked,
            console=self.console,
        )
        return f"{pair.digest[:12]}… in {pair.folder}"

    def fine_tune(self) -> str:
        first, last = fine_tune(self.recipe, self.budget, self.out / "adapter", self.console)
        return f"{self.budget.tune_steps} steps, loss on prose {first:.2f} → {last:.2f} nats per token"

    def probe(self) -> str:
        from ..pair import probe

        result = probe(self.pair, self.changed, console=self.console)
        return f"{result.verdict}: τ on its own prompts {result.tau_baseline.text()} → {result.tau.text()}"

    def measure_stale(self) -> str:
        from ..eval.reports.render import write_report

        head = self.pair.drafter_for(self.changed)
        report = self._measure(self.changed, head, baselines=False)
        write_report(report, self.out / "stale")
        return report.sentence()

    def refresh(self) -> str:
        from ..pair.refresh import refresh

        changes = [f"data.limit={self.budget.refresh_prompts}", "training.num_train_epochs=1", "eval.baselines=[]"]
        refresh(self.pair, self.changed, self.out / "refreshed", changes, self.console)
        return newest_report(self.refreshed).sentence()

    def gate(self) -> str:
        """Version 2 on the changed target against version 1 on its own: is serving as fast as before the fine-tune?

        Both are measured on the same prompts. The two targets are not the same, though: what the fine-tune made easier or
        harder to predict is in the ratio too. That is what a user of the pair feels, and what a gate in CI should see. How
        much of it the refresh brought back is the other comparison, with the stale figure; the closing table shows both.
        """
        return self.verdict.lines[1]

    def verify(self) -> str:
        from ..pair import verify

        differences = [line for pair in (self.pair, self.refreshed) for line in verify(pair.folder)]
        parent = self.refreshed.manifest.lineage.parent
        child = f"{self.refreshed.digest[:12]}… in {self.refreshed.folder}, parent {parent.digest[:12] if parent else 'none'}…"
        return child if not differences else f"{child}; differs: {'; '.join(differences)}"

    def _measure(self, target: Target, head: Drafter, baselines: bool) -> Report:
        """Beside the plain target; with `baselines` beside drafters without weights and `transformers.generate` too."""
        from ..eval.measure import contestants, measure
        from ..eval.suites import load_suites

        settings = self.recipe.eval if baselines else self.recipe.eval.model_copy(update={"baselines": []})
        suites = load_suites(settings.suites, target.require_tokenizer(), settings.limit)
        return measure(
            target,
            contestants(target, head, settings),
            suites,
            settings,
            generate_baseline=baselines,
            console=self.console,
        )

    # ------------------------------------------------------------ telling

    def run(self, number: int, title: str, work: Callable[[], str]) -> None:
        """Do a stage unless it is done; say what it found and how long it took."""
        if title not in self.done:
            self.console.print(f"[dim]{number:2} {title} …[/dim]", highlight=False)
            began = time.perf_counter()
            found = work()
            self.done[title] = {"seconds": round(time.perf_counter() - began, 1), "found": found}
            self._save()
        line = Table.grid(
            Column(width=2, justify="right"),
            Column(width=34),
            Column(ratio=1),
            Column(width=6, justify="right"),
            padding=(0, 1),
            expand=True,
        )
        stage = self.done[title]
        line.add_row(
            str(number), f"[bold]{title}[/bold]", escape(stage["found"]), f"[dim]{stage['seconds']:.0f} s[/dim]"
        )
        self.console.print(line)

    def conclude(self) -> None:
        from ..eval import Report

        rows = [
            ("v1 on its own target", Report.load(self.out / "report")),
            ("v1 on the changed target", Report.load(self.out / "stale")),
            ("v2 on the changed target", newest_report(self.refreshed)),
        ]
        table = Table(header_style="bold", caption=self._conditions(), caption_justify="left")
        for heading in ("", "τ (tokens per round)", "speedup over the plain target"):
            table.add_column(heading, justify="left" if not heading else "right")
        for name, report in rows:
            figures = report.headline()
            table.add_row(name, figures.tau.text() if figures.tau else "–", figures.speedup.text(unit="×"))
        self.console.print(table)
        self.console.print(self._times(), highlight=False, style="dim")
        self.console.print(
            f'report: {self.out / "report" / "report.html"}   next: outrider generate {self.out / "refreshed" / "pair"} "def "',
            highlight=False,
        )

    def _conditions(self) -> str:
        count = len(self.budget.suites) * self.budget.suite_prompts
        return f"{count} prompts of {' and '.join(self.budget.suites)}, greedy, depth {self.budget.depth}, batch 1, [95% interval over prompts]".replace(
            "[", r"\["
        )

    def _times(self) -> str:
        reused = f", of which {self.reused} stages were reused" if self.reused else ""
        return f"{sum(stage['seconds'] for stage in self.done.values()):.0f} seconds in {len(self.done)} stages{reused}"

    def _open(self) -> dict[str, dict[str, Any]]:
        if not self.file.is_file():
            return {}
        saved = json.loads(self.file.read_text())
        if saved["identity"] != self._identity:
            from ..ground import BadInputError

            raise BadInputError(
                f"{self.out} holds a quickstart that was run with another target, budget or version; delete it, or choose another --out."
            )
        return dict(saved["stages"])

    def _save(self) -> None:
        from ..ground.files import write_atomically

        self.out.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, json.dumps({"identity": self._identity, "stages": self.done}, indent=2) + "\n")

    @cached_property
    def _identity(self) -> dict[str, Any]:
        from importlib.metadata import version

        from ..targets import embedded_path
        from ..targets.fingerprint import digest_file

        budget = json.loads(json.dumps(asdict(self.budget)))
        return {
            "outrider": version("outrider"),
            "target": digest_file(embedded_path() / "model.safetensors"),
            "budget": budget,
        }


def newest_report(pair: Pair) -> Report:
    from ..eval import Report

    return Report.load(sorted((pair.folder / "reports").iterdir())[-1])


# ------------------------------------------------------------ the fine-tune


def fine_tune(recipe: Recipe, budget: Budget, folder: Path, console: Console) -> tuple[float, float]:
    """Train a LoRA adapter for the recipe's target on the packaged prose, into `folder`; returns the loss of the first and last steps."""
    import torch
    from peft import LoraConfig, get_peft_model

    from ..targets import Target

    target = Target.load(**recipe.target.model_dump() | {"dtype": "float32"})
    torch.manual_seed(recipe.data.sampling.seed)
    model = get_peft_model(
        target.model, LoraConfig(r=budget.tune_rank, lora_alpha=2 * budget.tune_rank, target_modules="all-linear")
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=budget.tune_rate)
    losses = []
    for tokens in _track(prose_windows(target, budget), budget.tune_steps, console):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    part = folder.with_name(folder.name + ".part")
    model.save_pretrained(str(part))
    shutil.rmtree(
        folder, ignore_errors=True
    )  # there if an earlier run ended between this line and its note in story.json
    part.rename(folder)
    few = max(1, len(losses) // 10)
    return sum(losses[:few]) / few, sum(losses[-few:]) / few


def prose_windows(target: Target, budget: Budget) -> Iterator[Tensor]:
    """Batches `[tune_rows, tune_length]` from random places of the packaged prose."""
    import torch

    tokenizer = target.require_tokenizer()
    texts = [
        json.loads(line)["text"] for line in embedded_file("texts/prose.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    tokens = torch.tensor([t for text in texts for t in [*tokenizer(text)["input_ids"], *target.eos_ids[:1]]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(budget.tune_steps):
        starts = torch.randint(len(tokens) - budget.tune_length, (budget.tune_rows,), generator=generator)
        yield torch.stack([tokens[s : s + budget.tune_length] for s in starts.tolist()]).to(target.device)


def _track(batches: Iterator[Tensor], total: int, console: Console) -> Iterator[Tensor]:
    from rich.progress import track

    return iter(track(batches, "fine-tuning", total, console=console, transient=True, disable=not console.is_terminal))
