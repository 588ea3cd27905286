"""The record of a tuning on one machine: a plan for each batch size, with its measurements. A pair keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import ConfigDict, SerializerFunctionWrapHandler, model_serializer, model_validator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import decode
from ..common.values import ForeignModel
from .reports.figures import Seconds


class Part(ForeignModel):
    """A part of pair.json; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SparsePart(Part):
    """A part of pair.json whose `OPTIONAL` fields are left out where they have their defaults."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        fields = type(self).model_fields
        return {k: v for k, v in values.items() if k not in self.OPTIONAL or v != fields[k].default}


class CostRecord(Part):
    """The costs of a round, `outrider.decode.Costs`, as JSON holds them.

    Attributes:
        verify: seconds of a target pass at `widths` drafts.
        draft: seconds of drafting 0, 1, … levels. host: of the rest of a round.
    """

    widths: list[int]
    verify: list[Seconds]
    draft: list[Seconds]
    host: Seconds

    @model_validator(mode="after")
    def _is_whole(self) -> CostRecord:
        if len(self.widths) != len(self.verify):
            raise ValueError(f"{len(self.verify)} times of passes stand beside {len(self.widths)} widths")
        return self

    @classmethod
    def of(cls, costs: decode.Costs) -> CostRecord:
        """Return the record of `costs`."""
        widths, times = zip(*costs.verify, strict=True)
        return cls(widths=list(widths), verify=list(times), draft=list(costs.draft), host=costs.host)

    def restored(self) -> decode.Costs:
        """Return the costs that were recorded."""
        return decode.Costs(tuple(zip(self.widths, self.verify, strict=True)), tuple(self.draft), self.host)


class Candidate(SparsePart):
    """A plan with its predicted figures, and its measured ones (None where it did not take part).

    Attributes:
        plan: the settings of `Plan.to_dict` that are not its defaults, without the controller.
        weight: of the rates in the controller that decides the depth of each round, see `Control`; predicted is then
            the best fixed depth in its reach. None: no controller.
        statistical: type and settings of the drafter without weights that drafts together with the tuned one (see
            `outrider.heads.fuse`); None for the tuned one alone.
        predicted_tau: tokens per round and sequence. round_seconds: of a round of the whole batch.
        predicted, tokens_per_second: of whole requests, prefills included.
        speedup, low, high: over the plain target in the same run, with its interval; None where there are too few
            batches for one.
    """

    OPTIONAL = ("statistical",)

    plan: dict[str, Any]
    weight: float | None = None
    predicted_tau: float
    round_seconds: float
    predicted: float
    tau: float | None = None
    tokens_per_second: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    statistical: dict[str, Any] | None = None

    def restored(self, costs: CostRecord, rates: Sequence[float]) -> decode.Plan:
        """Return the plan; its controller, if it has one, decides by `costs` and `rates`."""
        control = None if self.weight is None else decode.Control(costs.restored(), tuple(rates), self.weight)
        return decode.Plan.from_dict(self.plan | {"control": control and control.to_dict()})


class BatchTuning(Part):
    """The tuning at one batch size.

    Attributes:
        context: tokens after which passes were timed.
        rates: acceptance at depth 1, 2, … given the depth before. ranks: acceptance of a tree's children, by depth and
            rank; [] without trees.
        chosen: one of `candidates`. reason: why.
    """

    batch_size: int
    context: int
    rates: list[float]
    ranks: list[list[float]]
    costs: CostRecord
    candidates: list[Candidate]
    chosen: Candidate
    reason: str

    @property
    def plan(self) -> decode.Plan:
        """The chosen plan."""
        return self.chosen.restored(self.costs, self.rates)

    @property
    def statistical(self) -> dict[str, Any] | None:
        """The drafter without weights that the chosen plan is a fusion with; None for the tuned drafter alone."""
        return self.chosen.statistical

    def name(self, candidate: Candidate) -> str:
        """Return a candidate's plan in words."""
        return plan_words(candidate.restored(self.costs, self.rates), candidate.statistical)

    def __str__(self) -> str:
        """Return the choice in words: `depth up to 5: 1.42× [1.38, 1.46] the plain target's speed`."""
        best = self.chosen
        speed = "" if best.speedup is None else f": {best.speedup:.2f}×{_bounds(best)} the plain target's speed"
        return f"{self.name(best)}{speed if self.plan.depth else ''}"


def plan_words(plan: decode.Plan, statistical: dict[str, Any] | None = None) -> str:
    """Return `plain`, `depth 4`, or of a fusion `depth 4, fused with ngram`."""
    words = str(plan) if plan.depth else "plain"
    return words if statistical is None else f"{words}, fused with {statistical['type']}"


class Tuning(Part):
    """One tuning, and its conditions.

    Attributes:
        threads: of torch, on a CPU. suites: digest of each suite's prompts, by name.
    """

    created: str
    device: str
    device_name: str
    dtype: str
    threads: int
    versions: dict[str, str]
    drafter: str
    temperature: float
    max_new_tokens: int
    repeats: int
    seed: int
    suites: dict[str, str]
    num_prompts: int
    batches: list[BatchTuning]

    @property
    def machine(self) -> tuple[str, str]:
        """The machine and dtype on which plans depend."""
        return self.device_name, self.dtype


def merged(known: Sequence[Tuning], new: Tuning) -> list[Tuning]:
    """Return `known` and `new`, which replaces its batch sizes on the same machine at the same temperature."""
    sizes = {b.batch_size for b in new.batches}
    kept = []
    for old in known:
        if (old.machine, old.temperature) == (new.machine, new.temperature):
            old = old.model_copy(update={"batches": [b for b in old.batches if b.batch_size not in sizes]})
        if old.batches:
            kept.append(old)
    return [*kept, new]


def nearest(
    known: Sequence[Tuning], machine: tuple[str, str], batch_size: int, temperature: float
) -> BatchTuning | None:
    """Return the tuning on `machine` at the largest batch size not above `batch_size`, at the nearest temperature."""
    fitting = [
        (b.batch_size, -abs(t.temperature - temperature), b)
        for t in known
        if t.machine == machine
        for b in t.batches
        if b.batch_size <= batch_size
    ]
    return max(fitting, key=lambda found: found[:2])[2] if fitting else None


_SHOWN = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)  # drafts of the passes that are printed


def print_batch(batch: BatchTuning, console: Console) -> None:
    """Print costs, acceptance, and predicted against measured tokens/s."""
    costs = batch.costs
    passes = [f"{n}: {1e3 * t:.1f}" for n, t in zip(costs.widths, costs.verify, strict=True) if n in _SHOWN]
    drafting = [f"{d}: {1e3 * t:.1f}" for d, t in enumerate(costs.draft) if d]
    alpha = [f"{d}: {rate:.2f}" for d, rate in enumerate(batch.rates, 1)]
    console.print(Text(f"batch {batch.batch_size}, passes after {batch.context} tokens", style="bold"))
    for name, values, unit in (
        ("target pass, ms", passes, "by drafts verified"),
        ("drafting, ms", drafting, f"by depth; {1e3 * costs.host:.1f} for the rest of a round"),
        ("alpha", alpha, "by depth"),
    ):
        console.print(Text.assemble((f"{name}  ", "dim"), "  ".join(values), (f"  ({unit})", "dim")))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("\nplan")
    for header in ("predicted\nτ", "\nτ", "predicted\ntokens/s", "\ntokens/s", "\nratio", "\nover plain"):
        table.add_column(header, justify="right", no_wrap=True)
    for candidate in batch.candidates:
        if (speed := candidate.tokens_per_second) is not None:
            table.add_row(*_cells(batch, candidate, speed), style="bold" if candidate == batch.chosen else "")
    console.print(table)
    console.print(Text(f"chosen: {batch.name(batch.chosen)}. {batch.reason}"))


def _cells(batch: BatchTuning, candidate: Candidate, speed: float) -> list[str]:
    tau, over = candidate.tau, candidate.speedup
    return [
        batch.name(candidate),
        f"{candidate.predicted_tau:.2f}",
        "–" if tau is None else f"{tau:.2f}",
        f"{candidate.predicted:.1f}",
        f"{speed:.1f}",
        f"{speed / candidate.predicted:.2f}",
        "–" if over is None else f"{over:.2f}×{_bounds(candidate)}",
    ]


def _bounds(candidate: Candidate) -> str:
    return "" if candidate.low is None else f" [{candidate.low:.2f}, {candidate.high:.2f}]"
