"""The report of a measurement, with everything it depends on. It is JSON; `render` writes and prints it for people."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ...common import BadInputError, refuse_unknown_keys
from ...common.digests import CHECKSUM, digest_json, unsealed
from ...common.untrusted_files import MEGABYTE, RECORD, Unreadable, parse_json, read_text
from .figures import (
    ALL,
    CONFIDENCE,
    RESAMPLES,
    Baselines,
    BatchFigures,
    Figures,
    GroupFigures,
    PromptRecord,
    ReportModel,
)

SCHEMA_VERSION = 1
REPORT_FILE = "report.json"
_LIMITS = replace(RECORD, num_bytes=64 * MEGABYTE)

DEFINITIONS = {
    "τ (tau)": (
        "mean tokens emitted per round, with the target's own bonus or correction token. "
        "A round is one draft and one verification; what was drafted past the limit of new tokens is not emitted."
    ),
    "acceptance rate": "accepted ÷ drafted tokens. It falls with depth: compare it only at equal depth.",
    "alpha at depth d": (
        "share of rounds that accepted the draft token at depth d, of those that drafted it and accepted all before it."
    ),
    "acceptance by position and kind": (
        "of the new tokens that a draft reached (all drafts before it in its round were accepted), the share at which "
        "the draft was kept: by the token's position in the answer, and by the kind of the token that the target "
        "emitted there. Copied: it and the two tokens before it stand, in this order, earlier in prompt or answer. Of "
        "the others, number: it has a digit; word: a letter, or a part of a character; symbol: anything else to be "
        "seen, and the target's special tokens; blank: nothing but white space."
    ),
    "speedup": (
        "tokens/s ÷ tokens/s of the plain target in the same engine and the same run; "
        "sums over prompts, paired by prompt."
    ),
    "identical": (
        "prompts whose tokens equal the plain target's, at temperature 0 and for drafters without chance. "
        "In bfloat16 or float16 a near-tie can be decided differently by another order of sums."
    ),
    "floor ÷ round": (
        "of the plain target, the time that reading a pass's weights from memory has to take (their bytes over the "
        "bandwidth that was measured) ÷ the time of verification per round. Computing, keys and values, and waiting "
        "take the rest. A target that fits into a processor's caches need not wait for memory, and can be above 1."
    ),
    "[low, high]": (
        "95% confidence interval over prompts: expanded percentiles of 2000 resamples, drawn suite by suite."
    ),
}

ENERGY = {
    "joules per token": (
        "energy of the whole GPU during the timed requests, by NVML's counter, ÷ new tokens. It moves every 20 to "
        "100 ms, so that the figure of one request is rough: only the sum over all of them says something."
    )
}


class SuiteInfo(ReportModel):
    """The prompts that were used; the digest covers their ids, tokens and later turns, in order.

    Attributes:
        left_out: prompts longer than `eval.max_prompt_tokens`, which were not asked. learnt: prompts that the drafter
            learned from (`data.allow_leaks`).
        later_turns: turns of conversations after the first that were asked. unasked_turns: those that were not: there
            was no room or no chat template, it refused them, or a context was filled.
    """

    name: str
    digest: str
    num_prompts: int
    left_out: int = 0
    learnt: int = 0
    later_turns: int = 0
    unasked_turns: int = 0


class TrainingInfo(ReportModel):
    """How a drafter was trained, where that is part of the comparison (`outrider compare`).

    Attributes:
        seconds: of training; the last step ends a little after the `budget`. parameters: those that were trained.
        held_out_tau: analytic, on held-out responses; None if none were held out.
    """

    seconds: float
    budget: float
    steps: int
    sequences: int
    processes: int
    parameters: int
    held_out_tau: float | None = None


class ContestantInfo(ReportModel):
    """A contestant and its plan.

    Attributes:
        kind: drafter, plain or generate.
        digest: the drafter's identity by content; None for the target alone.
        verify: the rule that was asked for. shape: the plan in words.
        trained_depth: the depth up to which the drafter learned to draft; None for any. tuned: the plan is the tuner's.
    """

    name: str
    kind: str
    drafter: str | None = None
    digest: str | None = None
    depth: Annotated[int, Field(ge=0, le=1024)] | None = None
    width: int = 1
    nodes: int | None = None
    tree: list[int] | None = None
    verify: str | None = None
    confidence: float = 0.0
    control: dict[str, Any] | None = None
    shape: str | None = None
    trained_depth: int | None = None
    tuned: bool = False
    parameters: int | None = None
    training: TrainingInfo | None = None

    @property
    def label(self) -> str:
        if self.depth == 0:  # what a tuner chooses where no drafts pay
            return f"{self.name}, without drafts"
        return self.name if self.depth is None else f"{self.name}, {self.shape or f'depth {self.depth}'}"


class Conditions(ReportModel):
    """The conditions of every figure of a report.

    Attributes:
        target: its source, model type, number of parameters, and fingerprint.
        timing: how the seconds of a prompt are measured. excluded: work that no figure contains.
        pass_backend: of the target's passes in rounds, such as "eager" or "kernels" (see `targets.fast`).
        pass_bytes: of the weights that a pass over one token reads. read_bandwidth: bytes per second at which this
            device reads memory, by the best of a few reads of `probe_bytes`.
        template: arguments that the chat template was given.
        sampling: beside the temperature, under `eval.sampling: served`.
        command: the shell line that repeats the run; None where no `outrider` command measured.
    """

    target: dict[str, Any]
    dtype: str
    device: str
    device_name: str
    threads: int
    attention: str
    pass_backend: str | None = None
    pass_bytes: int | None = None
    read_bandwidth: float | None = None
    probe_bytes: int | None = None
    template: dict[str, Any] = Field(default_factory=dict)
    batch_size: int = 1
    max_new_tokens: int
    temperatures: list[float]
    sampling: dict[str, Any] = Field(default_factory=dict)
    repeats: int
    timing: str = (
        "whole requests, both prefills included; per prompt the median of the repeats "
        "(of an even number the faster of the middle two); contestants take turns in random order"
    )
    excluded: str = "one warm-up request per contestant and temperature"
    seed: int
    resamples: int = RESAMPLES
    confidence: float = CONFIDENCE
    suites: list[SuiteInfo]
    versions: dict[str, str]
    command: str | None = None

    @property
    def floor(self) -> float | None:
        """The seconds that reading the weights of one pass has to take."""
        return self.pass_bytes / self.read_bandwidth if self.pass_bytes and self.read_bandwidth else None


class Report(ReportModel):
    """The result of `measure`.

    Attributes:
        contestants: in the order they were given; the headline is about the first drafter.
        figures: per contestant, temperature and suite ("all" first). records: per prompt, to make the figures from.
        groups: the figures by category, task and turn, where a suite has several. batches: by batch size.
        findings: sentences on what was found wrong in the run, and no figure shows.
    """

    schema_version: int = SCHEMA_VERSION
    created: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    conditions: Conditions
    definitions: dict[str, str] = DEFINITIONS
    contestants: list[ContestantInfo]
    baselines: Baselines
    figures: list[Figures]
    groups: list[GroupFigures] = Field(default_factory=list)
    batches: list[BatchFigures] = Field(default_factory=list)
    findings: list[str] = Field(default_factory=list)
    records: list[PromptRecord] = Field(default_factory=list)

    @property
    def primary(self) -> str | None:
        """The first drafter's name; None if only baselines were measured."""
        return next((c.name for c in self.contestants if c.kind == "drafter"), None)

    def contestant(self, name: str) -> ContestantInfo:
        """Return the contestant of this name; BadInputError if it did not take part."""
        known = {c.name: c for c in self.contestants}
        if name not in known:
            raise BadInputError(f"the report has no contestant {name!r}; it has: {', '.join(known)}.")
        return known[name]

    def headline(self, contestant: str | None = None, temperature: float | None = None, suite: str = ALL) -> Figures:
        """Return the figures of one contestant, on all suites together unless one is named.

        Args:
            contestant: the first drafter if not given. temperature: the first one measured if not given.

        Raises:
            BadInputError: the report holds no such figures.
        """
        name = contestant or self.primary or self.baselines.plain
        heat = self.conditions.temperatures[0] if temperature is None else temperature
        for figures in self.figures:
            if (figures.contestant, figures.temperature, figures.suite) == (name, heat, suite):
                return figures
        self.contestant(name)
        measured = ", ".join(map(str, self.conditions.temperatures))
        raise BadInputError(
            f"the report has no figures of {name} on {suite!r} at temperature {heat}; "
            f"temperatures measured: {measured}."
        )

    def sentence(self, contestant: str | None = None, temperature: float | None = None) -> str:
        """Return the headline in words.

        `eagle3, depth 4: τ 2.41 [2.33, 2.49], 1.42× [1.38, 1.46] the speed of the plain target at temperature 0`.
        """
        figures = self.headline(contestant, temperature)
        tau = f"τ {figures.tau.text()}, " if figures.tau else ""
        speed = f"{figures.speedup.text(unit='×')} the speed of the plain target at temperature {figures.temperature:g}"
        rule = "" if figures.rule in ("none", "greedy") else f" ({figures.rule})"
        return f"{self.contestant(figures.contestant).label}: {tau}{speed}{rule}"

    @property
    def is_comparison(self) -> bool:
        """Whether drafters were trained for it, all for the same time."""
        return any(c.training is not None for c in self.contestants)

    def records_of(self, contestant: str, temperature: float) -> list[PromptRecord]:
        """Return the records of a contestant at a temperature, in the order of the prompts."""
        return [r for r in self.records if r.contestant == contestant and r.temperature == temperature]

    def at(self, temperature: float) -> list[Figures]:
        """Return the figures of all contestants at a temperature, on every suite and on all of them."""
        return [f for f in self.figures if f.temperature == temperature]

    def overall(self, temperature: float) -> list[Figures]:
        """Return the figures of all contestants at a temperature, on all suites together."""
        return [f for f in self.at(temperature) if f.suite == ALL]

    def ranked(self) -> list[str]:
        """Return our decoder's contestants, the highest τ at the first temperature first; the plain target last."""
        names = [c.name for c in self.contestants if c.kind != "generate"]
        taus = {name: tau.value if (tau := self.headline(name).tau) else 0.0 for name in names}
        return sorted(names, key=lambda name: (name == self.baselines.plain, -taus[name]))

    def to_json(self) -> str:
        """Return the whole report as JSON with its checksum; one line per prompt record."""
        body = self.model_dump_json(exclude={"records"}, indent=1).removesuffix("\n}")
        lines = ",\n".join(r.model_dump_json() for r in self.records)
        text = f'{body},\n "records": [\n{lines}\n]'
        return f'{text},\n "{CHECKSUM}": "{digest_json(json.loads(text + "}"))}"}}\n'

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a saved report from its folder (or from its report.json).

        Raises:
            BadInputError: no report there, a damaged one, or one of a newer schema.
        """
        file = Path(path).expanduser()
        file = file / REPORT_FILE if file.is_dir() else file
        try:
            values = parse_json(read_text(file, _LIMITS.num_bytes), str(file), _LIMITS)
        except OSError as error:
            raise BadInputError(
                f"no report at {str(path)!r}: {file} cannot be read ({error.strerror}). "
                "Run `outrider eval` first, or give its folder."
            ) from error
        except Unreadable as error:
            raise BadInputError(f"{file}: damaged ({error.reason}). Measure again, or copy it again.") from error
        version = None
        if isinstance(values, dict):
            values = unsealed(file, values, "Measure again, or copy it again.", required=False)
            refuse_unknown_keys(values, cls.model_fields, str(file))
            version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise BadInputError(
                f"{file}: schema_version is {version!r}, this Outrider reads {SCHEMA_VERSION}; "
                "update Outrider or measure again."
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise BadInputError(
                f"{file}: not a report, {place}: {first['msg'].lower()}. Measure again, or copy it again."
            ) from None
