"""The answers of verbs with `--json`: one envelope around the body of each, and JSON Schemas of all of them.

    {"schema": "outrider.gate/1", "exit_code": 1, …the body's own fields…}

The schemas, with those of pair.json and report.json, are generated:

    python -m outrider.scripts.json_schemas FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from ..common.atomic import write_atomically
from ..common.digests import CHECKSUM
from ..eval.reports.advice import decision, remarks
from ..eval.reports.figures import BatchFigures, GroupFigures
from ..eval.reports.gate import GateResult
from ..eval.reports.report import Baselines, Conditions, ContestantInfo, Figures, Report
from ..eval.tuning_record import Tuning
from ..pair.comparison import tuned_plans
from ..pair.manifest import Figure, Lineage, Manifest
from .verb_group import verb_groups

if TYPE_CHECKING:
    from ..pair import PairFiles
    from ..pair.registry import Version

VERSION: Final = 1

Measured = Annotated[Figure, BeforeValidator(Figure.of)]  # made of an `Interval`


class Body(BaseModel):
    """The fields that one verb answers beside the envelope, made of a mapping or of an object's attributes."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)


class ErrorBody(Body):
    """Why a verb that was asked for JSON has no answer; the exit code says of which kind it is."""

    error: str


class FindingBody(Body):
    """The gate's conclusion at one temperature; `ratio` is τ after ÷ τ before, with one-sided bounds."""

    temperature: float
    conclusion: str
    tau_before: float | None = Field(validation_alias="before")
    tau_after: float | None = Field(validation_alias="after")
    ratio: Measured
    smallest_drop: float | None
    line: str


class FetchBody(Body):
    """A model that was fetched: where it is now, and the seconds of each step; none if it was there."""

    folder: str
    seconds: dict[str, float]


class GateBody(Body):
    """The gate's verdict. `same_target`: whether both reports are about one target."""

    passed: bool
    label: str
    tolerance: float
    confidence: float
    target: str
    baseline_target: str
    same_target: bool
    findings: list[FindingBody]
    remarks: list[str]

    @classmethod
    def of(cls, result: GateResult) -> GateBody:
        """Return the body of the gate's result."""
        target, baseline = result.targets
        plain = {"target": target, "baseline_target": baseline, "same_target": target == baseline}
        names = ("passed", "label", "tolerance", "confidence", "findings", "remarks")
        return cls.model_validate(plain | {name: getattr(result, name) for name in names})


class ProbeBody(Body):
    """A probe's verdict: fresh, stale or incompatible; figures are null where nothing was measured."""

    pair: str
    target: str
    verdict: str
    certain: bool
    ratio: Measured
    tau: Measured
    tau_baseline: Measured
    tau_predicted: Measured
    alpha: Measured
    alpha_baseline: Measured = Field(validation_alias="baseline")
    lines: list[str]


class ReportBody(Body):
    """A report without its prompts, remarks on them, what to do, and the folder that holds all of it."""

    folder: str
    created: str
    conditions: Conditions
    contestants: list[ContestantInfo]
    baselines: Baselines
    figures: list[Figures]
    groups: list[GroupFigures]
    batches: list[BatchFigures]
    remarks: list[str]
    decision: str

    @classmethod
    def of(cls, report: Report, folder: Path) -> ReportBody:
        """Return the body of the report that was written to `folder`."""
        names = ("created", "conditions", "contestants", "baselines", "figures", "groups", "batches")
        values = {name: getattr(report, name) for name in names}
        return cls(folder=str(folder), remarks=remarks(report), decision=decision(report), **values)


class TuneBody(Body):
    """What the tuner found, and whether the pair keeps it."""

    folder: str
    stored: bool
    tuning: Tuning


class DistillBody(Body):
    """Where the responses are, and how many there are."""

    folder: str
    counts: dict[str, int | float]


class SourceBody(Body):
    """What became of the rows of one source, by reason, with one example of each, and of many `malformed` ones."""

    source: str
    rows: int
    kept: int
    truncated: int
    raw_texts: int
    leaked: int
    layouts: dict[str, int]
    dropped: dict[str, int]
    examples: dict[str, str]
    malformed: list[str]


class DataCheckBody(Body):
    """What a recipe's data amounts to.

    `prompt_tokens` are quantiles of the lengths of the prompts that are kept; `answers` the numbers of finished ones by
    their ends, null where there are none yet.
    """

    prompts: int
    sources: list[SourceBody]
    prompt_tokens: dict[str, int]
    answers: dict[str, int] | None


class TrainBody(Body):
    """Where the trained drafter is; `adapter` is what its target was trained to, null without joint training."""

    drafter: str
    adapter: str | None
    steps: int
    metrics: dict[str, Any]


class TauBody(Body):
    """A pair's figures at one temperature."""

    temperature: float
    tau: Figure
    speedup: Figure


class PairBody(Body):
    """A pair in short: what it is, where it comes from, and what it achieved. `pair show --json` gives all of it."""

    folder: str
    name: str
    version: int
    digest: str
    target: str
    drafter: str
    lineage: Lineage
    headline: list[TauBody]

    @classmethod
    def of(cls, pair: PairFiles) -> PairBody:
        """Return the body of a pair."""
        return cls.model_validate({"folder": str(pair.folder), **_in_short(pair.manifest)})


def _in_short(manifest: Manifest) -> dict[str, Any]:
    facts = {name: getattr(manifest, name) for name in ("name", "version", "digest", "lineage")}
    facts |= {"target": manifest.target.fingerprint.digest, "drafter": manifest.drafter.type}
    return facts | {"headline": manifest.measurements.headline}


class VerifyBody(Body):
    """Whether a pair is intact, what differs if it is not, and who signed it, if that was asked."""

    folder: str
    intact: bool
    differences: list[str]
    signer: str | None = None


class PushBody(Body):
    """Where a pair is in a registry."""

    registry: str
    name: str
    version: int
    revision: int
    digest: str


class VersionBody(Body):
    """A version in a registry."""

    name: str
    version: int
    revision: int
    digest: str
    target: str
    drafter: str
    created: str
    lineage: Lineage
    headline: list[TauBody]
    tuned: list[str]

    @classmethod
    def of(cls, version: Version) -> VersionBody:
        """Return the body of a version."""
        manifest = version.manifest
        facts = {**_in_short(manifest), "created": manifest.created, "tuned": tuned_plans(manifest)}
        return cls.model_validate(facts | vars(version.entry))


class LogBody(Body):
    """All versions of a registry, or of one pair in it."""

    registry: str
    versions: list[VersionBody]


class DiffBody(Body):
    """What differs between two pairs, in lines for people, by what it is about; "tau" has lines in any case."""

    one: str
    other: str
    differences: dict[str, list[str]]


# The body of every answer that needs no torch, by the verb that gives it; `json_schemas_torch` has the others.
BODIES: dict[str, Any] = {
    "error": ErrorBody,
    "distill": DistillBody,
    "data-check": DataCheckBody,
    "train": TrainBody,
    "eval": ReportBody,
    "compare": ReportBody,
    "tune": TuneBody,
    "pair-new": PairBody,
    "pair-verify": VerifyBody,
    "pair-push": PushBody,
    "pair-pull": PairBody,
    "pair-log": LogBody,
    "pair-diff": DiffBody,
    "probe": ProbeBody,
    "refresh": PairBody,
    "gate": GateBody,
    "doctor": dict[str, Any],
    "fetch": FetchBody,
}


def body_of(kind: str) -> Any:
    """Return the type of the body of a verb's answer."""
    return BODIES[kind] if kind in BODIES else _bodies_with_torch()[kind]


def _bodies_with_torch() -> dict[str, Any]:
    """Return the bodies whose types need torch, those of other packages' verbs among them."""
    from .json_schemas_torch import MEASURED

    return MEASURED | {kind: body for group in verb_groups().values() for kind, body in group.bodies().items()}


def answer(kind: str, body: Any, exit_code: int = 0) -> dict[str, Any]:
    """Return a verb's answer as plain values, the envelope and the fields of `body`; numbers that are none are null."""
    form: TypeAdapter[Any] = TypeAdapter(body_of(kind))
    whole = form.validate_python(body) if isinstance(body, dict) else body
    said = form.dump_python(whole, mode="json", warnings="error")
    return {"schema": f"outrider.{kind}/{VERSION}", "exit_code": exit_code, **_finite(said)}


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a verb's answer."""
    body = TypeAdapter(body_of(kind)).json_schema(mode="serialization")
    envelope = {"schema": {"const": f"outrider.{kind}/{VERSION}"}, "exit_code": {"type": "integer", "minimum": 0}}
    fields = {"properties": envelope | body.get("properties", {})}
    fields["required"] = [*envelope, *body.get("required", [])]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | body | fields


def schemas() -> dict[str, dict[str, Any]]:
    """Return all schemas by their files' names: one for each answer, those of pair.json and of report.json."""
    found = {f"{kind}.json": schema(kind) for kind in (*BODIES, *_bodies_with_torch())}
    report = Report.model_json_schema()
    report["properties"][CHECKSUM] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}  # of everything else in the file
    return found | {"pair.json": Manifest.model_json_schema(), "report.json": report}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_schemas(folder: Path) -> None:
    """Write all schemas into `folder`, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in schemas().items():
        write_atomically(folder / file_name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
