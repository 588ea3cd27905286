"""The answers of verbs with `--json`: one envelope around the fields of each, and JSON Schemas of all of them.

    {"schema": "outrider.gate/1", "exit_code": 1, …the answer's own fields…}

Where a verb has a result, its fields are the answer's. The schemas, with those of pair.json and report.json, are
generated:

    python -m outrider.scripts.json_schemas FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from pydantic import ConfigDict, TypeAdapter, create_model

from ..common.atomic import write_atomically
from ..common.digests import CHECKSUM
from ..eval.reports.advice import decision, remarks
from ..eval.reports.gate import GateResult
from ..eval.reports.report import Report
from ..eval.tuning_record import Tuning
from ..pair.comparison import tuned_plans
from ..pair.manifest import Headline, Lineage, Manifest
from .verb_group import verb_groups

if TYPE_CHECKING:
    from ..pair import PairFiles
    from ..pair.registry import Version

VERSION: Final = 1
Fields = dict[str, Any]  # by the names of fields


def fields_of(result: type, *names: str) -> Fields:
    """Return the fields of a verb's result (a dataclass or a model) with their types, those of `names` if any are."""
    known = get_type_hints(result, include_extras=True)
    declared = getattr(result, "__dataclass_fields__", None) or getattr(result, "model_fields", {})
    return {name: known[name] for name in names or declared}


_REPORT = ("created", "conditions", "contestants", "baselines", "figures", "groups", "batches")


@dataclass(frozen=True)
class PairFacts:
    """A pair in short: what it is, where it comes from, and what it achieved."""

    name: str
    version: int
    digest: str
    target: str
    drafter: str
    lineage: Lineage
    headline: list[Headline]


@dataclass(frozen=True)
class PairVersion(PairFacts):
    """A version of a pair in a registry."""

    revision: int
    created: str
    tuned: list[str]


REPORT: Fields = {"folder": str, **fields_of(Report, *_REPORT), "remarks": list[str], "decision": str}
PAIR: Fields = {"folder": str, **fields_of(PairFacts)}

# The fields of every answer that needs no torch, by the verb that gives it; `_with_torch` has the others.
ANSWERS: Fields = {
    "error": {"error": str},
    "dry-run": {"reads": list[str], "writes": list[str], "spends": list[str], "sends": list[str]},
    "distill": {"folder": str, "counts": dict[str, int | float]},
    "train": {"drafter": str, "steps": int, "metrics": dict[str, Any]},
    "eval": REPORT,
    "compare": REPORT,
    "tune": {"folder": str, "stored": bool, "tuning": Tuning},
    "pair-new": PAIR,
    "pair-verify": {"folder": str, "intact": bool, "differences": list[str], "signer": str | None},
    "pair-push": {"registry": str, "name": str, "version": int, "revision": int, "digest": str},
    "pair-pull": PAIR,
    "pair-log": {"registry": str, "versions": list[PairVersion]},
    "pair-diff": {"one": str, "other": str, "differences": dict[str, list[str]]},
    "refresh": PAIR,
    "gate": fields_of(GateResult),
    "doctor": dict[str, Any],
    "fetch": {"folder": str, "seconds": dict[str, float]},
}


@cache
def _with_torch() -> Fields:
    """Return the fields of answers whose types need torch, those of other packages' verbs among them."""
    from ..costs.training import Needs
    from ..distill.recipe_prompts import RowCounts
    from ..formats.lint import LintFinding
    from ..formats.support import Support
    from ..pair.probing import ProbeResult
    from ..serving.diagnosis import ServedResult

    answers = {
        "data-check": {
            "prompts": int,
            "sources": list[RowCounts],
            "prompt_tokens": dict[str, int],
            "answers": dict[str, int] | None,
        },
        "plan": fields_of(Needs) | {"peak_memory": int},
        "formats": {"support": list[Support]},
        "lint": {"folder": str, "findings": list[LintFinding]},
        "probe": {"pair": str, "target": str, **fields_of(ProbeResult)},
        "served": ServedResult,
    }
    return answers | {kind: fields for group in verb_groups().values() for kind, fields in group.bodies().items()}


def all_answers() -> Fields:
    """Return the fields (or the type) of the answer of every verb."""
    return ANSWERS | _with_torch()


@cache
def adapter_of(kind: str) -> TypeAdapter[Any]:
    """Return the type of a verb's answer, which checks, writes and describes it."""
    fields = ANSWERS[kind] if kind in ANSWERS else _with_torch()[kind]
    if not isinstance(fields, Mapping):
        return TypeAdapter(fields)
    model = create_model(kind, __config__=ConfigDict(extra="forbid"), **fields)
    return TypeAdapter(model)


def answer(kind: str, body: Any, exit_code: int = 0) -> Fields:
    """Return a verb's answer as plain values: the envelope and the fields of `body`. NaN and inf become null."""
    form = adapter_of(kind)
    whole = form.validate_python(body) if isinstance(body, dict) else body
    plain = form.dump_python(whole, mode="json", warnings="error")
    return {"schema": f"outrider.{kind}/{VERSION}", "exit_code": exit_code, **_finite(plain)}


def report_fields(report: Report, folder: Path) -> Fields:
    """Return the answer about a report in `folder`: without its prompts, with remarks on them, and what to do."""
    own = {name: getattr(report, name) for name in _REPORT}
    return own | {"folder": str(folder), "remarks": remarks(report), "decision": decision(report)}


def pair_fields(pair: PairFiles) -> Fields:
    """Return the answer about a pair: what it is, where it comes from, and what it achieved."""
    return {"folder": str(pair.folder), **_in_short(pair.manifest)}


def version_fields(version: Version) -> Fields:
    """Return the answer about a pair's version in a registry."""
    manifest = version.manifest
    return {
        **_in_short(manifest),
        "created": manifest.created,
        "tuned": tuned_plans(manifest),
        **vars(version.entry),
    }


def _in_short(manifest: Manifest) -> Fields:
    return {
        "name": manifest.name,
        "version": manifest.version,
        "digest": manifest.digest,
        "target": manifest.target.fingerprint.digest,
        "drafter": manifest.drafter.type,
        "lineage": manifest.lineage,
        "headline": manifest.measurements.headline,
    }


def schema(kind: str) -> Fields:
    """Return the JSON Schema of a verb's answer."""
    body = adapter_of(kind).json_schema(mode="serialization")
    envelope = {"schema": {"const": f"outrider.{kind}/{VERSION}"}, "exit_code": {"type": "integer", "minimum": 0}}
    fields = {"properties": envelope | body.get("properties", {})}
    fields["required"] = [*envelope, *body.get("required", [])]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | body | fields


def schemas() -> dict[str, Fields]:
    """Return all schemas by their files' names: one for each answer, those of pair.json and of report.json."""
    found = {f"{kind}.json": schema(kind) for kind in all_answers()}
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
