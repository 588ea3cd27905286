"""The whole life of a pair on the target that ships with Outrider, or on SmolLM2: `outrider quickstart`.

Nothing here is private to the quickstart: every stage is a few lines around public functions, and reading this file
from top to bottom is one way to learn them. Each stage leaves its result in the working folder, and a second run
reuses it.

    answers.jsonl           on SmolLM2: the answers that ship, without those to what is measured
    data/, drafter/         the target's responses, the trained head
    tuning.json             the fastest plans of this machine
    report/                 what the tuned plan, the head alone and n-grams alone achieve
    pair-v1/                target, drafter, plans and report, bound together
    adapter/                the target changes: a LoRA fine-tune on another domain
    refreshed/              the same as above for the changed target; refreshed/pair is version 2
    grown/, grown.json      target and head at real size, with the same text
    story.json              how fast this machine is, which stages are done, how long each took, and what it found
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from ..common import BadInputError, digests
from ..common.atomic import replacing_folder, write_atomically
from ..common.digests import read_sealed, write_json
from ..common.locks import locked
from ..common.plugins import plugin, plugins
from ..common.progress import progress
from ..costs.machine_speed import Pace, measure_pace
from ..decode import Plan
from ..distill import distill, provenance
from ..distill.prompt_table import Prompt
from ..distill.recipe_prompts import recipe_prompts
from ..eval import Report
from ..eval.measure import contestants, measure
from ..eval.reports.figures import Figures
from ..eval.reports.gate import GateResult
from ..eval.reports.render import write_report
from ..eval.suites import Suite, load_suites, make_suite
from ..eval.tuner import STATISTICAL, tune
from ..eval.tuning_record import Tuning
from ..heads import load_drafter
from ..pair import Pair, gate_pairs, new_pair, newest_report, probe, verify
from ..pair.refresh import RefreshOptions, refresh
from ..recipes import Recipe, embedded_file, load_recipe, packaged_file
from ..targets import Target
from ..targets.fingerprint import digest_file
from ..targets.loading import EMBEDDED, target_path
from ..targets.model_folder import SINGLE
from ..train import train
from .eval_setup import tuned_contestant

SMOLLM2 = "smollm2"
ANSWERS = "answers.jsonl"
QUESTIONS = "questions.jsonl"
STORY = "story.json"

BASELINES = ("ngram",)
LORA_RANK = 32  # of the fine-tune that changes the target
CONFIDENCE = 0.95  # of the gate


def tell(out: Path, console: Console, budget: QuickstartBudget | None = None) -> bool:
    """Run every stage that is not done yet, then print what came of it; return whether the gate passed.

    Raises:
        BadInputError: `out` holds a story that was told with another budget, target or version, or is being written.
    """
    place = Workplace(out, console, budget or QuickstartBudget())
    with locked(out):
        out.mkdir(parents=True, exist_ok=True)
        if place.budget.given:
            write_unmeasured(out / ANSWERS)
        story = Story(place)
        last = [(stage.title, stage.run) for stage in place.budget.last_stages]
        for number, (title, work) in enumerate([*STAGES, *last], 1):
            story.run(number, title, work)
        conclude(story)
    return place.verdict.passed


def write_unmeasured(file: Path) -> None:
    """Write the answers that ship for SmolLM2, without those to the questions that are measured."""
    questions = packaged_file(SMOLLM2, QUESTIONS).read_text(encoding="utf-8").splitlines()
    measured = {json.loads(row)["turns"][0] for row in questions}
    rows = packaged_file(SMOLLM2, ANSWERS).read_text(encoding="utf-8").splitlines(keepends=True)
    write_atomically(file, "".join(row for row in rows if json.loads(row)["messages"][0]["content"] not in measured))


class Workplace:
    """One working folder, and what the stages find in it, loaded when it is first used."""

    def __init__(self, out: Path, console: Console, budget: QuickstartBudget):
        self.out = out
        self.console = console
        self.budget = budget
        self.sizes: QuickstartSizes | None = None
        self.asked: Recipe = load_recipe(budget.recipe, budget.changes(out))
        self.model = Path(target_path(self.asked.target.path)) / SINGLE

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe as it fits this machine."""
        return load_recipe(self.budget.recipe, self.budget.changes(self.out, self.measured))

    @property
    def measured(self) -> QuickstartSizes:
        """The sizes, after the first stage."""
        assert self.sizes is not None
        return self.sizes

    @cached_property
    def target(self) -> Target:
        return Target.load(**self.recipe.target.to_load())

    @cached_property
    def changed(self) -> Target:
        """The target after its fine-tune: the adapter is merged, as it would be served."""
        return Target.load(**self.recipe.target.to_load() | {"adapter": str(self.out / "adapter")})

    @cached_property
    def pair(self) -> Pair:
        return Pair.load(self.out / "pair-v1")

    @cached_property
    def refreshed(self) -> Pair:
        return Pair.load(self.out / "refreshed" / "pair")

    @cached_property
    def verdict(self) -> GateResult:
        """The gate's result for version 2 against version 1."""
        return gate_pairs(self.refreshed, self.pair, self.budget.tolerance, CONFIDENCE)

    @cached_property
    def tuning(self) -> Tuning:
        """The tuner's result."""
        advice = f"Delete {self.out / STORY}, and the story is told again."
        return Tuning.model_validate(read_sealed(self.out / "tuning.json", advice)["tuning"])

    @property
    def depth(self) -> int:
        """The depth of the head's chains that the tuner predicts to be the fastest."""
        found = self.tuning.batches[0].candidates
        chains = [
            c for c in found if c.plan.keys() == {"depth"} and c.plan["depth"] and not (c.statistical or c.weight)
        ]
        return int(max(chains, key=lambda c: c.predicted).plan["depth"])

    def suites(self, target: Target, first: int | None = None, last: int | None = None) -> list[Suite]:
        """Return the suites with their `first` prompts, or their `last` ones."""
        found = load_suites(self.budget.suites, target.require_tokenizer(), first)
        return [make_suite(s.name, s.prompts[-last:]) for s in found] if last else found


def look_at_the_machine(place: Workplace) -> str:
    """Measure for a few seconds, and take as much as fits the time."""
    sizes = place.sizes = QuickstartSizes.fitting(place.budget, measure_pace(place.asked))
    precision = "bfloat16" if sizes.bf16 else "float32"
    asked = "" if place.budget.given else f"{sizes.prompts} prompts, and "
    return (
        f"{asked}{sizes.refresh_prompts} for the refresh, should take {sizes.seconds} s in all; "
        f"faster here: training in {precision}, decoding in {sizes.dtype}"
    )


def distil(place: Workplace) -> str:
    counts = provenance(distill(place.recipe, place.target, place.console))["counts"]
    found = f"{counts['sequences']:,} responses, {counts['response_tokens']:,} tokens"
    return f"prepared, as they ship with Outrider: {found}" if place.budget.given else found


def train_head(place: Workplace) -> str:
    """Train a head, or take the one of a pair that a package registers, where the budget names such a pair."""
    name = place.budget.prepared
    prepared = None if name is None else plugin("pairs", name)
    if prepared is not None:
        with replacing_folder(place.out / "drafter") as building:
            shutil.copytree(Pair.load(prepared).drafter_folder, building, dirs_exist_ok=True)
        return f"prepared: the head of {name}, which {place.budget.recipe} trained; nothing was trained here"
    result = train(place.recipe, place.target, console=place.console, seconds=place.budget.train_seconds)
    return f"{result.steps} steps in {place.budget.train_seconds:.0f} seconds"


def tune_plans(place: Workplace) -> str:
    """Find the fastest plan on prompts that are not measured later."""
    head = load_drafter(place.out / "drafter", place.target)
    suites = place.suites(place.target, last=place.budget.tune_prompts)
    settings = place.recipe.eval.model_copy(update={"limit": None, "max_new_tokens": place.budget.tune_tokens})
    found = tune(place.target, head, suites, settings, statistical=STATISTICAL[:1])
    write_json(place.out / "tuning.json", {"tuning": found.model_dump()}, indent=1)
    return str(found.batches[0])


def measure_all(place: Workplace) -> str:
    """Measure the tuned plan, the head alone, the baselines and the plain target, all in one run."""
    head, settings = load_drafter(place.out / "drafter", place.target), place.recipe.eval
    entrants = [
        tuned_contestant(place.tuning.batches[0], head),
        *contestants(place.target, head, settings, Plan(place.depth)),
    ]
    suites = place.suites(place.target, first=place.budget.suite_prompts)
    report = measure(place.target, entrants, suites, settings, generate_baseline=False, console=place.console)
    write_report(report, place.out / "report")
    return report.sentence()


def bind(place: Workplace) -> str:
    folder, drafter, report = (place.out / name for name in ("pair-v1", "drafter", "report"))
    prompts = unseen_prompts(place)
    pair = new_pair(folder, place.target, drafter, place.recipe, report, calibration=prompts, console=place.console)
    pair = pair.store_tuning(place.tuning)
    return f"{pair.digest[:12]}… in {pair.folder}"


def unseen_prompts(place: Workplace) -> list[Prompt]:
    """Return what probes repeat and the gate counts: the suites, and prompts that no training of this story sees."""
    tokenizer, spec = place.target.require_tokenizer(), place.recipe.data
    suites = [replace(p, suite=s.name) for s in place.suites(place.target) for p in s.prompts]
    everything = place.recipe.model_copy(update={"data": spec.model_copy(update={"limit": None})})
    others = recipe_prompts(everything, tokenizer).prompts[place.budget.prompts :]
    found = [*suites, *others[: max(0, place.budget.gate_prompts - len(suites))]][: place.budget.gate_prompts]
    return sorted(found, key=lambda prompt: prompt.suite)  # suite by suite, as they are resampled


def change_the_target(place: Workplace) -> str:
    first, last = fine_tune(place.recipe, place.budget, place.out / "adapter", place.console)
    return f"{place.budget.lora_steps} steps, loss on prose {first:.2f} → {last:.2f} nats per token"


def ask_the_probe(place: Workplace) -> str:
    result = probe(place.pair, place.changed, console=place.console)
    return f"{result.verdict}: τ on its own prompts {result.tau_baseline.text()} → {result.tau.text()}"


def learn_again(place: Workplace) -> str:
    budget = place.budget
    changes = [f"data.limit={place.measured.refresh_prompts}", f"data.max_new_tokens={budget.new_tokens}"]
    changes += ["data.answers=target", f"eval.depth={place.depth}", "eval.baselines=[]"]
    how = RefreshOptions(seconds=budget.refresh_seconds)
    refresh(place.pair, place.changed, place.out / "refreshed", changes, place.console, how, generate_baseline=False)
    return newest_report(place.refreshed).sentence()


def ask_the_gate(place: Workplace) -> str:
    """Compare version 2 on the changed target with version 1 on its own: is serving as fast as before the fine-tune?

    Both ran the same prompts, but the two targets are not the same: what the fine-tune made easier or harder to predict
    is in the ratio too, as users of the pair feel it. The probe shows how much the refresh brought back.
    """
    return place.verdict.lines[1]


def verify_both(place: Workplace) -> str:
    differences = [line for pair in (place.pair, place.refreshed) for line in verify(pair.folder)]
    parent = place.refreshed.manifest.lineage.parent
    named = parent.digest[:12] if parent else "none"
    child = f"{place.refreshed.digest[:12]}… in {place.refreshed.folder}, parent {named}…"
    return child if not differences else f"{child}; differs: {'; '.join(differences)}"


class QuickstartStage(Protocol):
    """A last stage that a package registers under `outrider.quickstart`."""

    title: str
    seconds: float  # that it may take

    def run(self, place: Workplace) -> str:
        """Run the stage, and return what it found in a sentence."""
        ...

    def rows(self, place: Workplace) -> tuple[list[tuple[str, Figures]], str]:
        """Return the rows that it adds to the closing table, and what it adds to the note below."""
        ...


LAST_STAGES: list[QuickstartStage] = list(plugins("quickstart").values())
Stage = Callable[[Workplace], str]
STAGES: list[tuple[str, Stage]] = [
    ("how fast is this machine?", look_at_the_machine),
    ("the target writes responses", distil),
    ("an EAGLE head learns from them", train_head),
    ("the fastest plan is looked for", tune_plans),
    ("measured beside the plain target", measure_all),
    ("pair v1", bind),
    ("the target changes: LoRA on prose", change_the_target),
    ("probe: does v1 still fit?", ask_the_probe),
    ("refresh: learn from the new target", learn_again),
    ("gate: v2 against v1", ask_the_gate),
    ("pair v2", verify_both),
]


class Story:
    """What story.json holds: the stages that are done, and the sizes that the first one found."""

    def __init__(self, place: Workplace):
        self.place, self.file = place, place.out / STORY
        self.done: dict[str, dict[str, Any]] = {}
        if self.file.is_file():
            saved = read_sealed(self.file, "Delete it, and the story is told again.")
            if saved["identity"] != self._identity:
                raise BadInputError(
                    f"{place.out} holds a quickstart that was run with another target, budget or version; delete it, "
                    "or choose another --out."
                )
            self.done = dict(saved["stages"])
            place.sizes = None if saved["sizes"] is None else QuickstartSizes(**saved["sizes"])
        self.reused = len(self.done)

    def run(self, number: int, title: str, work: Stage) -> None:
        """Do a stage unless it is done; say what it found and how long it took."""
        console = self.place.console
        if title not in self.done:
            console.print(f"[dim]{number:2} {title} …[/dim]", highlight=False)
            began = time.perf_counter()
            found = work(self.place)
            self.done[title] = {"seconds": round(time.perf_counter() - began, 1), "found": found}
            sizes = None if self.place.sizes is None else asdict(self.place.sizes)
            write_json(self.file, {"identity": self._identity, "sizes": sizes, "stages": self.done})
        stage = self.done[title]
        columns = Column(width=2, justify="right"), Column(width=34), Column(ratio=1), Column(width=6, justify="right")
        line = Table.grid(*columns, padding=(0, 1), expand=True)
        spent = f"[dim]{stage['seconds']:.0f} s[/dim]"
        line.add_row(str(number), f"[bold]{title}[/bold]", escape(stage["found"]), spent)
        console.print(line)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return {
            "outrider": version("outrider"),
            "target": digest_file(self.place.model),
            "budget": json.loads(json.dumps(asdict(self.place.budget))),
        }


def conclude(story: Story) -> None:
    """Print what came of it: the figures side by side, the gate's verdict, and where to look next."""
    place, console = story.place, story.place.console
    console.print(closing_table(place))
    console.print(Text(place.verdict.lines[0]))
    seconds, count = sum(stage["seconds"] for stage in story.done.values()), len(story.done)
    reused = f", of which {story.reused} stages were reused" if story.reused else ""
    console.print(Text(f"{seconds:.0f} seconds in {count} stages{reused}", style="dim"))
    pair, report = place.out / "refreshed" / "pair", place.out / "report" / "report.html"
    console.print(Text(f"report: {report}   next: outrider generate {pair} {place.budget.prompt}"))
    console.print(Text(f"serve it: outrider export {pair} --to vllm   (or sglang; the target goes along, merged)"))


def closing_table(place: Workplace) -> Table:
    """Return τ and speedup of everything that was measured, the tuned plan first."""
    first, second = Report.load(place.out / "report"), place.refreshed
    rows = [(f"v1: {c.label}", first.headline(c.name)) for c in first.contestants if c.kind == "drafter"]
    rows += [("v2 on the changed target", newest_report(second).headline())]
    suites = first.conditions.suites
    note = f"{sum(s.num_prompts for s in suites)} prompts of {' and '.join(s.name for s in suites)}, greedy"
    note += f", {place.measured.dtype}, batch 1, [95% interval over prompts]"
    for stage in place.budget.last_stages:
        more, conditions_there = stage.rows(place)
        rows += more
        note += conditions_there
    table = Table(header_style="bold", caption=Text(note), caption_justify="left")
    for heading in ("", "τ (tokens per round)", "speedup over the plain target"):
        table.add_column(heading, justify="left" if not heading else "right")
    for i, (name, figures) in enumerate(rows):
        tau = figures.tau.text() if figures.tau else "–"
        table.add_row(Text(name), tau, Text(figures.speedup.text(unit="×")), style="bold" if i == 0 else "")
    return table


def fine_tune(recipe: Recipe, budget: QuickstartBudget, folder: Path, console: Console) -> tuple[float, float]:
    """Train a LoRA adapter on the packaged prose; return the mean losses of the first and last tenth of the steps."""
    target = Target.load(**recipe.target.to_load() | {"dtype": "float32"})
    torch.manual_seed(recipe.data.sampling.seed)
    lora = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear")
    model = get_peft_model(target.model, lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=budget.lora_rate)
    losses, windows = [], prose_windows(target, budget)
    with progress(console, "fine-tuning", budget.lora_steps, transient=True) as advance:
        for tokens in windows:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            advance(1, "")
    with replacing_folder(folder) as building:
        model.save_pretrained(str(building))
        digests.seal(building)
    few = max(1, len(losses) // 10)
    return sum(losses[:few]) / few, sum(losses[-few:]) / few


def prose_windows(target: Target, budget: QuickstartBudget) -> Iterator[Tensor]:
    """Yield batches `[lora_rows, lora_length]` from random places of the packaged prose."""
    tokenizer = target.require_tokenizer()
    rows = embedded_file("texts/prose.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(row)["text"] for row in rows]
    tokens = torch.tensor([t for text in texts for t in [*tokenizer(text)["input_ids"], *target.eos_ids[:1]]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(budget.lora_steps):
        starts = torch.randint(len(tokens) - budget.lora_length, (budget.lora_rows,), generator=generator)
        yield torch.stack([tokens[s : s + budget.lora_length] for s in starts.tolist()]).to(target.device)


@dataclass(frozen=True)
class QuickstartBudget:
    """A target's story, and all that decides how long it takes; how many prompts fit is measured (`QuickstartSizes`).

    Attributes:
        recipe: of the heads that Outrider trains, eagle1 has the highest τ after minutes of training on two CPU cores:
            3.38 after 360 seconds, against 2.98 of eagle3 (benchmarks/results/frontier-360s-cpu.json); others have less
            (compare-cpu-fp32.json).
        given: the recipe's answers ship with Outrider. prepared: a pair whose head is taken if a package has it.
        grown: whether stages of other packages follow.
        tolerance: the smallest that 80 prompts decide in 4 runs of 5 if nothing fell: over 100 of them the ratio of two
            τ had a standard error of 2.3%, so over 80 one of 2.6%, and a bound at 95% needs 2.5 times that. `outrider
            gate` by itself takes 3%, for which 560 prompts are needed.
    """

    recipe: str = "embedded-eagle1"
    given: bool = False
    prepared: str | None = None
    grown: bool = True
    suites: tuple[str, ...] = ("code", "docs")  # what is measured, each time
    prompt: str = '"def "'  # of an example
    tolerance: float = 0.07
    seconds: float = 350.0  # for all of it
    prompts: int = 960  # of the first training, at most
    least_prompts: int = 320
    refresh_share: float = 0.3  # of them, for the refresh
    new_tokens: int = 48  # of the target's responses to them, at most
    train_seconds: float = 90.0
    refresh_seconds: float = 20.0
    suite_prompts: int = 9  # of each suite, measured each time
    suite_tokens: int = 40
    tune_prompts: int = 2  # the last ones of each suite, which are not measured
    tune_tokens: int = 20
    gate_prompts: int = 80  # that pair v1 remembers: probes repeat some, and the gate counts all
    lora_steps: int = 75
    lora_rows: int = 4
    lora_length: int = 96
    lora_rate: float = 4e-3

    @classmethod
    def of(cls, target: str) -> QuickstartBudget:
        """Return the budget of a target, `embedded` or `smollm2`; the latter's story takes longer."""
        if target == EMBEDDED:
            return cls()
        if target != SMOLLM2:
            raise BadInputError(f"quickstart --target: expected {EMBEDDED} or {SMOLLM2}, found {target!r}.")
        return cls(
            recipe="smollm2-eagle3",
            given=True,
            prepared="smollm2-pair",
            grown=False,
            suites=(str(packaged_file(SMOLLM2, QUESTIONS)),),
            prompt='--chat "Explain photosynthesis to a child."',
            tolerance=0.1,
            seconds=1300.0,
            prompts=960,
            refresh_share=0.2,
            train_seconds=360.0,
            refresh_seconds=120.0,
            tune_tokens=16,
            gate_prompts=32,
            lora_steps=20,
            lora_rate=5e-4,
        )

    @property
    def last_stages(self) -> list[QuickstartStage]:
        """The stages of other packages, where they follow."""
        return LAST_STAGES if self.grown else []

    def changes(self, output: Path, sizes: QuickstartSizes | None = None) -> list[str]:
        """Return the overrides that fit the packaged recipe to this budget, and to what was measured once it was."""
        values: dict[str, Any] = {
            "output": str(output),
            "training.logging_steps": 25,
            "eval.suites": list(self.suites),
            "eval.limit": self.suite_prompts,
            "eval.max_new_tokens": self.suite_tokens,
            "eval.repeats": 1,
            "eval.temperatures": [0.0],
            "eval.baselines": list(BASELINES),
        }
        if self.given:
            values["data.prompts"] = [str(output / ANSWERS)]
            values["data.holdout"] = 0.1  # the questions that are measured were the recipe's held-out ones
        else:
            values["data.max_new_tokens"] = self.new_tokens
            # The few responses are read several times; a busy machine would spend all of its training on their states.
            slow = sizes is not None and sizes.seconds > 2 * self.seconds
            values["data.features"] = "online" if slow else "cached"
        if sizes is not None:
            values |= {"target.dtype": sizes.dtype, "training.bf16": sizes.bf16}
            values |= {} if self.given else {"data.limit": sizes.prompts}
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@dataclass(frozen=True)
class QuickstartSizes:
    """What was measured of the machine, and how much of the story fits its time there. story.json records it.

    Attributes:
        dtype: of the target. bf16: whether training multiplies in bfloat16.
        prompts, refresh_prompts: that the target answers.
        seconds: that all of it should take. pace: seconds of each kind of work (`costs.machine_speed.Pace`).
    """

    dtype: str
    bf16: bool
    prompts: int
    refresh_prompts: int
    seconds: float
    pace: dict[str, Any]

    @classmethod
    def fitting(cls, budget: QuickstartBudget, pace: Pace) -> QuickstartSizes:
        """Return the most that fits `budget.seconds` at this pace; the least where nothing does."""
        fewest = min(budget.least_prompts, budget.prompts)
        choices = [*range(budget.prompts, fewest, -20), fewest]
        prompts = next((n for n in choices if expected_seconds(budget, n, pace) <= budget.seconds), fewest)
        refreshed = max(1, round(budget.refresh_share * prompts))
        seconds = round(expected_seconds(budget, prompts, pace))
        return cls(pace.dtype, pace.bf16, prompts, refreshed, seconds, pace.to_dict())


def expected_seconds(budget: QuickstartBudget, prompts: int, pace: Pace) -> float:
    """Return the seconds of the story at this pace, from how often it does each kind of work.

    The factors are counts where the code decides them, and rounded from a timed run where acceptance or a library does.
    """
    started = 25.0  # imports, loading, reports, checkpoints, and the pace itself
    prompt = 150  # tokens of a mean one
    answered = (not budget.given) * prompts + budget.refresh_share * prompts
    counted = 2 * budget.gate_prompts + 32  # prompts of probes and gates
    per_count = 2.5 * (prompt + budget.suite_tokens) + 2 * budget.suite_tokens
    fine_tuned = budget.lora_steps * budget.lora_rows * budget.lora_length
    tuned = 85 * budget.tune_tokens * (1 + budget.tune_prompts / 3)  # in the plain target's, for three prompts a suite
    measured = 5.0 * len(budget.suites) * budget.suite_prompts * budget.suite_tokens
    worked = pace.seconds(
        prefills=prompt * answered + per_count * counted + 1.6 * fine_tuned,
        answers=(budget.new_tokens - 1) * answered + budget.suite_tokens / 4 * counted,
        tokens=tuned + measured,
    )
    given = budget.train_seconds + budget.refresh_seconds + sum(stage.seconds for stage in budget.last_stages)
    return started + worked + given
