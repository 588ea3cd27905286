"""Versions of a pair side by side: their differences, the gate between two, and their lineage."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common import BadInputError
from ..common.untrusted_files import parse_yaml
from ..eval.reports.gate import Counted, GateComparison, GateResult, Judge, gate
from ..eval.reports.report import Report
from .folder import PairFiles
from .manifest import MANIFEST, RECIPE, REPORTS, TOKENIZER, Figure, Headline, Manifest

_TOKENS = f"{TOKENIZER}/tokenizer.json"
_DATA = ("data.", "eval.suites")


@dataclass(frozen=True)
class Side:
    """One of the two pairs: its manifest, and a reader of its small files ("" for a missing one)."""

    manifest: Manifest
    read: Callable[[str], str]


def compare(one: Side, other: Side) -> dict[str, list[str]]:
    """Return the differences, in lines for people, by subject; a subject without any has no lines."""
    recipe = list(_recipe(one, other))
    a, b = one.manifest, other.manifest
    target = a.target.fingerprint.restored().differences(b.target.fingerprint.restored())
    return {
        "target": [line for line in target if line != "tokenizer"],
        "tokenizer": list(_tokenizer(one, other)),
        "drafter": list(_drafter(a, b)),
        "recipe": [line for line in recipe if not line.startswith(_DATA)],
        "data": [*(line for line in recipe if line.startswith(_DATA)), *_prompts(a, b)],
        "tau": list(_figures(a, b)),
    }


def _drafter(one: Manifest, other: Manifest) -> Iterator[str]:
    if one.drafter.type != other.drafter.type:
        yield f"type: {one.drafter.type} → {other.drafter.type}"
    mine, theirs = one.drafter.files, other.drafter.files
    yield from (f"{name}: other content" for name in sorted(mine.keys() & theirs.keys()) if mine[name] != theirs[name])
    for name in sorted(mine.keys() ^ theirs.keys()):
        yield f"{name}: only in the {'first' if name in mine else 'second'}"
    if one.plan != other.plan:
        yield f"plan: {one.plan.restored()} → {other.plan.restored()}"


def _tokenizer(one: Side, other: Side) -> Iterator[str]:
    if one.manifest.target.fingerprint.tokenizer == other.manifest.target.fingerprint.tokenizer:
        return
    before, after = _vocabulary(one.read(_TOKENS)), _vocabulary(other.read(_TOKENS))
    moved = sorted((before[t], t) for t in before.keys() & after.keys() if before[t] != after[t])
    if moved:
        token = moved[0][1]
        yield f"{len(moved)} tokens have another id (first: {token!r}, {before[token]} → {after[token]})"
    for tokens, where in ((before.keys() - after.keys(), "first"), (after.keys() - before.keys(), "second")):
        if tokens:
            yield f"{len(tokens)} tokens only in the {where} (such as {min(tokens)!r})"
    if before == after:
        yield "the vocabulary is the same; merges, normalisation or special tokens differ"


def _vocabulary(text: str) -> dict[str, int]:
    """Return the ids of a fast tokenizer's tokens; {} for any other text."""
    try:
        values = json.loads(text)
        listed = values["model"]["vocab"]
        own = listed if isinstance(listed, dict) else {token: i for i, (token, _) in enumerate(listed)}
        return own | {added["content"]: added["id"] for added in values.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _recipe(one: Side, other: Side) -> Iterator[str]:
    before, after = (dict(_flat(_settings(side))) for side in (one, other))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            both = (
                json.dumps(v[key], ensure_ascii=False, default=str) if key in v else "(not set)"
                for v in (before, after)
            )
            yield f"{key}: {' → '.join(both)}"


def _settings(side: Side) -> dict[str, Any]:
    """Return a pair's recipe, {} without one; BadInputError where it holds anything but settings."""
    values = parse_yaml(side.read(RECIPE), RECIPE) or {}
    if not isinstance(values, dict):
        raise BadInputError(
            f"{RECIPE} of {side.manifest.name} version {side.manifest.version} is a {type(values).__name__}; expected "
            "a mapping of settings. Take a good copy of the pair."
        )
    return values


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _prompts(one: Manifest, other: Manifest) -> Iterator[str]:
    before, after = one.measurements.suites, other.measurements.suites
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            both = (digests.get(name, "")[:12] or "not measured" for digests in (before, after))
            yield f"suite {name}: {' → '.join(both)}"
    if one.calibration != other.calibration:
        yield "calibration prompts differ"


def _figures(one: Manifest, other: Manifest) -> Iterator[str]:
    """Yield τ of both at each temperature, equal or not, and a warning if they were measured on other prompts."""
    before, after = ({h.temperature: h.tau for h in side.measurements.headline} for side in (one, other))
    for temperature in sorted(before.keys() | after.keys()):
        taus = (side.get(temperature, Figure.of(None)).text("not measured") for side in (before, after))
        yield f"at temperature {temperature:g}: {' → '.join(taus)}"
    if before and after and one.measurements.suites != other.measurements.suites:
        yield "on other prompts: the two cannot be compared; `outrider gate` needs the same ones"


@dataclass
class VersionNode:
    """A version, and the versions that were made from it.

    Attributes:
        missing: the parent's name and version, if it has one that is not among the versions.
    """

    manifest: Manifest
    missing: str | None = None
    children: list[VersionNode] = field(default_factory=list)


def lineage(manifests: Sequence[Manifest]) -> list[VersionNode]:
    """Return the versions as trees: those without a parent here, each with its descendants, in the order given."""
    known = {manifest.digest for manifest in manifests}
    children: dict[str, list[Manifest]] = defaultdict(list)
    roots: list[Manifest] = []
    for manifest in manifests:
        parent = manifest.lineage.parent
        # Only a forged pair can be its own ancestor: a digest cannot be known before the pair is made.
        if parent is None or parent.digest not in known or parent.version >= manifest.version:
            roots.append(manifest)
        else:
            children[parent.digest].append(manifest)
    trees = []
    for root in roots:
        parent = root.lineage.parent
        missing = None if parent is None or parent.digest in known else f"{parent.name} version {parent.version}"
        trees.append(VersionNode(root, missing))
        open_nodes = trees[-1:]
        while open_nodes:  # not recursive: a lineage may have hundreds of versions
            node = open_nodes.pop()
            node.children = [VersionNode(child) for child in children.pop(node.manifest.digest, [])]
            open_nodes += node.children
    return trees


def headline_text(headline: Headline) -> str:
    """Return τ and speedup at one temperature in words."""
    faster = "" if headline.speedup.value is None else f", {headline.speedup.value:.2f}×"
    return f"τ {headline.tau.text('–')}{faster} at temperature {headline.temperature:g}"


def tuned_plans(manifest: Manifest) -> list[str]:
    """Return the tuned plans in words, each with its speedup, batch size and machine."""
    plans = []
    for tuning in manifest.tuning:
        where = f"temperature {tuning.temperature:g}, {tuning.dtype} on {tuning.device_name}, {tuning.created}"
        plans += [f"batch {found.batch_size}, {found} ({where})" for found in tuning.batches]
    return plans


def gate_pairs(
    new: PairFiles, old: PairFiles, tolerance: float = 0.03, confidence: float = 0.95, judge: Judge | None = None
) -> GateResult:
    """Return whether τ of `new` fell below that of `old` by more than the tolerance; see `eval.reports.gate`.

    A refresh keeps its parent's calibration prompts, so both versions have figures on the same ones. They count beside
    the prompts of the reports if plan and settings are the same, too.

    Raises:
        BadInputError: a pair without a report, or reports that were made under different conditions.
    """
    report, kind = newest_report(new), new.manifest.drafter.type
    name = kind if any(c.name == kind for c in report.contestants) else None
    return gate(report, newest_report(old), tolerance, confidence, name, _calibration(new, old), judge)


def gate_folders(new: Path, old: Path, tolerance: float, confidence: float, judge: Judge | None = None) -> GateResult:
    """Return the verdict of `gate_pairs` on two pairs' folders, or on two of which one is a report's."""
    if all((folder / "pair.json").is_file() for folder in (new, old)):
        return gate_pairs(PairFiles.load(new), PairFiles.load(old), tolerance, confidence, judge)
    return gate(report_in(new), report_in(old), tolerance, confidence, judge=judge)


def newest_report(pair: PairFiles) -> Report:
    """Return the pair's last report; BadInputError if it has none."""
    dated = sorted(p for p in (pair.folder / REPORTS).glob("*") if p.is_dir())
    if not dated:
        raise BadInputError(
            f"{pair.folder}: this pair holds no report; measure it (`outrider eval`), and bind it again with one."
        )
    return Report.load(dated[-1])


def _calibration(new: PairFiles, old: PairFiles) -> GateComparison | None:
    """Return the counts of both drafters on the calibration prompts; None if these, plan or settings differ."""
    after, before = (pair.manifest.measurements.baseline for pair in (new, old))
    same = (new.manifest.calibration, new.manifest.plan) == (old.manifest.calibration, old.manifest.plan)
    if after is None or before is None or not same:
        return None
    if after.model_copy(update={"prompts": []}) != before.model_copy(update={"prompts": []}):
        return None
    counts = (
        [Counted(m.suite, m.id, m.accepted + m.rounds, m.rounds) for m in side.prompts] for side in (after, before)
    )
    return GateComparison(after.temperature, *counts)


def report_in(folder: Path) -> Report:
    """Return the report in `folder`, or the newest one of the pair in `folder`."""
    return newest_report(PairFiles.load(folder)) if (folder / MANIFEST).is_file() else Report.load(folder)
