"""What differs between two pairs: target, tokenizer, drafter, recipe, data, and what they achieved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..common.safe_load import parse_yaml
from .manifest import RECIPE, TOKENIZER, Figure, Headline, Manifest

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
