"""Versions of a pair beside each other: what differs, the gate between two, and which was refreshed from which."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common import BadInputError
from ..common.safe_load import parse_yaml
from ..eval.reports.gate import Counted, GateComparison, GateResult, gate
from ..eval.reports.report import Report
from .manifest import RECIPE, REPORTS, TOKENIZER, Figure, Headline, Manifest, ProbeBaseline
from .pair import Pair

_TOKENS = f"{TOKENIZER}/tokenizer.json"
_DATA = ("data.", "eval.suites")


@dataclass(frozen=True)
class Side:
    """One of the two pairs: its pair.json, and how to read its small files ("" for one that it does not have)."""

    manifest: Manifest
    read: Callable[[str], str]


def compare(one: Side, other: Side) -> dict[str, list[str]]:
    """Return what differs, in lines for people, by what it is about; a part without a difference has none."""
    recipe = list(_recipe(one, other))
    a, b = one.manifest, other.manifest
    return {
        "target": _target(a, b),
        "tokenizer": list(_tokenizer(one, other)),
        "drafter": list(_drafter(a, b)),
        "recipe": [line for line in recipe if not line.startswith(_DATA)],
        "data": [*(line for line in recipe if line.startswith(_DATA)), *_prompts(a, b)],
        "tau": list(_figures(a, b)),
    }


def _target(one: Manifest, other: Manifest) -> list[str]:
    found = one.target.fingerprint.restored().differences(other.target.fingerprint.restored())
    return [line for line in found if line not in ("tokenizer",)]


def _drafter(one: Manifest, other: Manifest) -> Iterator[str]:
    if one.drafter.type != other.drafter.type:
        yield f"type: {one.drafter.type} → {other.drafter.type}"
    mine, theirs = one.drafter.files, other.drafter.files
    yield from (f"{name}: other content" for name in sorted(mine.keys() & theirs.keys()) if mine[name] != theirs[name])
    yield from (f"{name}: only in the {_side(name, mine)}" for name in sorted(mine.keys() ^ theirs.keys()))
    if one.plan != other.plan:
        yield f"plan: {one.plan.restored()} → {other.plan.restored()}"


def _side(name: str, first: dict[str, str]) -> str:
    return "first" if name in first else "second"


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
    """Return the ids of a fast tokenizer's tokens; {} where it cannot be told."""
    try:
        values = json.loads(text)
        listed = values["model"]["vocab"]
        own = listed if isinstance(listed, dict) else {token: i for i, (token, _) in enumerate(listed)}
        return own | {added["content"]: added["id"] for added in values.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _recipe(one: Side, other: Side) -> Iterator[str]:
    before, after = (dict(_flat(parse_yaml(side.read(RECIPE), RECIPE) or {})) for side in (one, other))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key}: {_shown(before, key)} → {_shown(after, key)}"


def _shown(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False, default=str) if key in values else "(not set)"


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
            found = (digests.get(name, "")[:12] or "not measured" for digests in (before, after))
            yield f"suite {name}: {' → '.join(found)}"
    if one.calibration != other.calibration:
        yield "calibration prompts differ"


def _figures(one: Manifest, other: Manifest) -> Iterator[str]:
    """Say τ of both at each temperature, equal or not, and whether they are figures of the same conditions."""
    before, after = ({h.temperature: h for h in side.measurements.headline} for side in (one, other))
    for temperature in sorted(before.keys() | after.keys()):
        taus = " → ".join(_tau(side.get(temperature)) for side in (before, after))
        yield f"at temperature {temperature:g}: {taus}"
    if before and after and one.measurements.suites != other.measurements.suites:
        yield "on other prompts: the two cannot be compared; `outrider gate` needs the same ones"


def _tau(headline: Headline | None) -> str:
    figure = Figure.of(None) if headline is None else headline.tau
    return "not measured" if figure.value is None else f"{figure.value:.2f} [{figure.low:.2f}, {figure.high:.2f}]"


@dataclass
class VersionNode:
    """A version, and the versions that were made from it.

    Attributes:
        missing: the parent's name and version where that is not among the versions; None where it is, or where there
            is no parent.
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
        # A pair cannot be its own ancestor: its digest would have to be known before it was made. A forged one can.
        if parent is None or parent.digest not in known or parent.version >= manifest.version:
            roots.append(manifest)
        else:
            children[parent.digest].append(manifest)
    return [_node(root, children, known) for root in roots]


def _node(manifest: Manifest, children: dict[str, list[Manifest]], known: set[str]) -> VersionNode:
    parent = manifest.lineage.parent
    missing = None if parent is None or parent.digest in known else f"{parent.name} version {parent.version}"
    root = VersionNode(manifest, missing)
    open_nodes = [root]
    while open_nodes:  # not recursive: a lineage may have hundreds of versions
        node = open_nodes.pop()
        node.children = [VersionNode(child) for child in children.pop(node.manifest.digest, [])]
        open_nodes += node.children
    return root


def headline_text(headline: Headline) -> str:
    """Return τ and speedup at one temperature in words."""
    tau, speedup = headline.tau, headline.speedup
    shown = "τ –" if tau.value is None else f"τ {tau.value:.2f} [{tau.low:.2f}, {tau.high:.2f}]"
    faster = "" if speedup.value is None else f", {speedup.value:.2f}×"
    return f"{shown}{faster} at temperature {headline.temperature:g}"


def gate_pairs(new: Pair, old: Pair, tolerance: float = 0.03, confidence: float = 0.95) -> GateResult:
    """Tell whether τ of `new` fell beyond the tolerance below that of `old`, with confidence; see `eval.reports.gate`.

    A refresh hands its parent's calibration prompts on, so both versions hold what their drafter did on the same ones.
    They count beside the prompts of the reports wherever both ran them under the same plan and settings.

    Raises:
        BadInputError: a pair without a report, or reports that were made under different conditions.
    """
    report, kind = newest_report(new), new.manifest.drafter.type
    name = kind if any(c.name == kind for c in report.contestants) else None
    return gate(report, newest_report(old), tolerance, confidence, name, _calibration(new, old))


def newest_report(pair: Pair) -> Report:
    """Return the report that came with the pair last; BadInputError if none did."""
    dated = sorted(p for p in (pair.folder / REPORTS).glob("*") if p.is_dir())
    if not dated:
        raise BadInputError(
            f"{pair.folder}: this pair holds no report; measure it (`outrider eval`), and bind it again with one."
        )
    return Report.load(dated[-1])


def _calibration(new: Pair, old: Pair) -> GateComparison | None:
    """Return what both drafters did on the calibration prompts; None if these, plan or settings differ."""
    baselines = [pair.manifest.measurements.baseline for pair in (new, old)]
    same = (new.manifest.calibration, new.plan) == (old.manifest.calibration, old.plan)
    after, before = baselines
    if after is None or before is None or not same or _settings(after) != _settings(before):
        return None
    return GateComparison(after.temperature, _counted(after), _counted(before))


def _settings(baseline: ProbeBaseline) -> tuple[int, float, int]:
    return baseline.max_new_tokens, baseline.temperature, baseline.seed


def _counted(baseline: ProbeBaseline) -> list[Counted]:
    return [Counted(m.suite, m.id, m.accepted, m.rounds) for m in baseline.prompts]
