"""The export of a pair to an engine: its drafter in the engine's layout, how to start it, and the expected figures.

| file | content |
|---|---|
| config.json, *.safetensors | the drafter, as the engine reads it |
| launch.json | the engine, its command, and the part of it that configures drafting |
| served.json | our own figures, to compare with the served ones; of a rounded drafter, what rounding cost |
| written.json | the config as it was written, and a digest of every tensor, for `outrider lint` |
| README.md | the same for people |
| target/ | the target with its adapter merged, where it has one |
| adapter/ | the adapter itself instead, where the target is served as a LoRA module |
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..common import BadInputError
from ..common.atomic import readable_bytes, replacing_folder, write_atomically
from ..common.locks import locked
from ..common.places import require_new, require_outside
from ..costs.machine_speed import device_bandwidth
from ..decode import Plan
from ..eval.reports.figures import ALL
from ..eval.reports.report import ContestantInfo, Report
from ..eval.reports.tables import markdown_text
from ..formats import EngineLaunch, Exported, launch, layout_of, oldest_version, require_served, rounded, write_drafter
from ..formats.early_exit import save_target
from ..formats.engines import lora_words
from ..formats.export import PLAIN_PRECISIONS
from ..heads import Drafter
from ..heads.registry import head_class, restore_drafter
from ..heads.saved import read_config
from ..targets import Target
from ..targets.peft_adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, checked_config
from ..targets.weights import stored_tensors
from .comparison import newest_report
from .manifest import ADAPTER, Figure
from .pair import Pair
from .probing import DrafterChange, drafter_change

LAUNCH = "launch.json"
SERVED = "served.json"
README = "README.md"
TARGET = "target"


@dataclass(frozen=True)
class RoundingCost:
    """What quantising a pair's drafter costs, and what it saves.

    Attributes:
        change: of τ, on the pair's own target; None where its layers, or a baseline, are not at hand.
        num_bytes, num_bytes_before: of the files of weights, the export's and the pair's own.
        bandwidth: bytes a second that this machine reads: no draft is faster than its weights are read.
    """

    change: DrafterChange | None
    num_bytes: int
    num_bytes_before: int
    bandwidth: float

    @property
    def lines(self) -> list[str]:
        """It in words."""
        now, before = self.num_bytes, self.num_bytes_before
        times = " instead of ".join(f"{1e3 * size / self.bandwidth:.3g}" for size in (now, before))
        size = f"weights: {readable_bytes(now)} instead of {readable_bytes(before)}, read here in {times} ms at best"
        if (one := self.change) is None:
            return [size, "τ: not measured, since the pair has no baseline, or its target no layers here"]
        how = "greedy" if one.temperature == 0 else f"analytic, temperature {one.temperature:g}"
        said = f"{one.num_prompts} calibration prompts, {how}, up to {one.max_new_tokens} new tokens"
        return [f"τ: {one.tau.text()}, was {one.tau_before.text()}; ratio {one.ratio.text(3)} ({said})", size]

    def record(self) -> dict[str, object]:
        """Return it as JSON."""
        names = ("tau", "tau_before", "ratio")
        figures = {name: Figure.of(getattr(self.change, name)).model_dump() for name in names if self.change}
        return asdict(self) | {"change": self.change and asdict(self.change) | figures}


@dataclass(frozen=True)
class PairExport:
    """A pair that was written for an engine.

    Attributes:
        cost: of rounding the drafter; None for one that was not quantised.
    """

    exported: Exported
    launch: EngineLaunch
    depth: int
    cost: RoundingCost | None = None

    @property
    def folder(self) -> Path:
        return self.exported.folder


def export_pair(
    pair: Pair,
    to: str,
    folder: str | Path | None = None,
    depth: int | None = None,
    target: Target | None = None,
    lora: bool = False,
    precision: str = "",
    console: Console | None = None,
) -> PairExport:
    """Write a pair's drafter for an engine, with all that it needs for serving.

    Args:
        to: an engine or a format, see `outrider.formats.LAYOUTS`.
        folder: where it goes; None for `runs/exports/NAME-vVERSION-TO`.
        depth: draft tokens of a round; None for the tuned plan's, else the pair's.
        target: the pair's target; None loads it.
        lora: serve the target's adapter as a LoRA module beside its base, in place of a target with it merged.
        precision: of the drafter's matrices, as `outrider.formats.export_drafter` has it. What a quantised one costs is
            measured before anything is written.

    Raises:
        BadInputError, IncompatibleError: as `outrider.formats.export_drafter` does; another process writes there.
        StaleError: the target's content is not that of the pair's target.
    """
    require_exportable(pair, to)  # before the target is loaded
    folder = Path(folder or Path("runs") / "exports" / f"{pair.name}-v{pair.version}-{to}").expanduser()
    require_outside(folder, "the export")
    with locked(folder):  # from here on: a refused run, too, clears what a dead one left
        require_new(folder, "the export")
        return _exported(pair, to, folder, depth, target, lora, precision, console)


def require_exportable(pair: Pair, to: str) -> None:
    """Refuse a pair whose drafter `to` cannot serve by its settings; nothing but its config.json is read."""
    layout_of(to, kind := pair.manifest.drafter.type)
    values = read_config(pair.drafter_folder)
    if values.pop("drafter_type", None) == kind:  # others are draft models, and forms of a drafter
        require_served(to, kind, head_class(kind).configured(values, f"{pair.drafter_folder}: drafter"))


def _exported(
    pair: Pair,
    to: str,
    folder: Path,
    depth: int | None,
    target: Target | None,
    lora: bool,
    precision: str,
    console: Console | None,
) -> PairExport:
    adapter = _lora_of(pair, to, folder) if lora else None
    target, drafter, _ = pair.open(target or pair.load_target(layers=False))
    drafter = restore_drafter(pair.drafter_folder, target).to(target.device).eval()  # in the precision it was saved in
    depth = depth or export_depth(pair, drafter.max_depth)
    if target.max_context is not None and depth >= target.max_context:
        raise BadInputError(f"depth {depth} leaves no room for a text in the target's context of {target.max_context}.")
    place = target.place if lora else served_path(target, folder)
    started = launch(to, drafter.name, place, str(folder.absolute()), depth, pair.dtype)
    if needed := oldest_version(started.engine, drafter.name, drafter.config.to_dict()):
        started = replace(started, oldest=": ".join(needed))
    if adapter is not None:
        started = replace(started, command=f"{started.command} {shlex.join(lora_words(adapter))}", adapter=adapter)
    change, quantises = None, precision not in ("", *PLAIN_PRECISIONS)
    if quantises and target.has_layers:
        change = drafter_change(pair, target, exported_drafter(pair, target, to, depth, precision), console)
    with replacing_folder(folder) as building:
        exported = write_drafter(drafter, target, to, building, depth, precision)
        cost = None
        if quantises:
            bandwidth = device_bandwidth(target.device, torch.get_num_threads())
            cost = RoundingCost(change, _file_bytes(building), _file_bytes(pair.drafter_folder), bandwidth)
        if lora:
            shutil.copytree(str(pair.adapter), building / ADAPTER)
        elif target.source.get("adapter") is not None:
            save_target(target, building / TARGET)
        made = PairExport(replace(exported, folder=folder), started, depth, cost)
        _write_beside(pair, made, building)
    return made


def _file_bytes(folder: Path) -> int:
    """Return the bytes of the files of weights in a folder."""
    return sum(file.stat().st_size for kind in ("safetensors", "gguf") for file in folder.glob(f"*.{kind}"))


def exported_drafter(pair: Pair, target: Target, to: str, depth: int, precision: str) -> Drafter:
    """Return the pair's drafter with the weights that its export in this precision holds, in the target's dtype."""
    drafter = rounded(restore_drafter(pair.drafter_folder, target).to(target.device), target, to, depth, precision)
    return drafter.cast(target.dtype if target.dtype.is_floating_point else torch.float32).eval()


_PRODUCT = re.compile(r".*\.\d+\..*\.lora_[AB]\.weight")  # a tensor of a LoRA on a projection in a layer


def _lora_of(pair: Pair, to: str, folder: Path) -> dict[str, Any]:
    """Return the name, the future place and the rank of a target's adapter, as vLLM is told."""
    place = Path(pair.adapter or "")
    settings = vars(checked_config(place)) if pair.adapter and (place / ADAPTER_CONFIG).is_file() else {}
    # vLLM scales all modules by lora_alpha / r, takes products alone, and has one module for tied embeddings.
    uneven = any(settings.get(name) for name in ("rank_pattern", "alpha_pattern", "target_parameters"))
    names = stored_tensors(place / ADAPTER_WEIGHTS) if settings else {}
    is_plain = bool(names) and not uneven and all(_PRODUCT.fullmatch(name) for name in names)
    if to != "vllm" or not is_plain:
        why = f"only vLLM's launch is known, not that of {to}" if is_plain else "it has no plain LoRA on this machine"
        raise BadInputError(f"the target cannot be served as a LoRA module: {why}. Leave --lora out.")
    return {"name": pair.name, "path": str((folder / ADAPTER).absolute()), "rank": settings["r"]}


def export_depth(pair: Pair, max_depth: int | None) -> int:
    """Return an engine's depth for this pair: a tuned one, else that of the pair's plan, at most `max_depth`."""
    tuned = [batch.plan for tuning in pair.manifest.tuning for batch in tuning.batches if batch.statistical is None]
    depth = next((plan.depth for plan in tuned if plan.depth), None) or pair.plan.depth or Plan.depth
    return min(depth, max_depth or depth)


def served_path(target: Target, folder: Path | None = None) -> str:
    """Return the target's path for an engine; a target with an adapter goes merged into the export's `folder`."""
    if folder is not None and target.source.get("adapter") is not None:
        return str(folder.absolute() / TARGET)
    if not target.place:
        raise BadInputError(
            "this target was given in memory, or grown while it was loaded (`outrider lab grow` writes it); load it "
            "from a folder that the engine can read, too."
        )
    return target.place


def _expectations(pair: Pair) -> list[dict[str, Any]]:
    """Return the figures of the pair's newest report, by plan and temperature; [] without one."""
    if not pair.manifest.reports:
        return []
    report = newest_report(pair)
    plans = [c for c in report.contestants if c.drafter == pair.manifest.drafter.type]
    return [_expected(report, plan, temperature) for plan in plans for temperature in report.conditions.temperatures]


def _expected(report: Report, plan: ContestantInfo, temperature: float) -> dict[str, Any]:
    figures = report.headline(plan.name, temperature, ALL)
    records = report.records_of(plan.name, temperature)
    return {
        "contestant": plan.name,
        "temperature": temperature,
        "rule": figures.rule,
        "depth": plan.depth,
        # An engine drafts a chain of one length in every round; trees and controllers have another tau.
        "is_fixed_chain": plan.width == 1 and plan.tree is None and plan.control is None and not plan.confidence,
        "num_prompts": figures.num_prompts,
        "max_new_tokens": report.conditions.max_new_tokens,
        "rounds": figures.num_rounds,
        "tokens": figures.num_tokens,
        "tau": Figure.of(figures.tau).model_dump(),
        "drafted_at": by_position([r.drafted for r in records]),
        "accepted_at": by_position([r.accepted for r in records]),
        "by_prompt": [
            {
                "id": r.prompt,
                "suite": r.suite,
                "rounds": len(r.accepted),
                "accepted": sum(r.accepted),
                "tokens": r.tokens,
            }
            for r in records
        ],
    }


def by_position(counts: list[list[int]]) -> list[int]:
    """Return the number of rounds that counted at least 1, 2, … drafts."""
    every = [count for prompt in counts for count in prompt]
    return [sum(count > position for count in every) for position in range(max(every, default=0))]


def _write_beside(pair: Pair, made: PairExport, folder: Path) -> None:
    expected = _expectations(pair)
    served = {
        "schema_version": 1,
        "pair": {"name": pair.name, "version": pair.version, "digest": pair.digest},
        "target": {"digest": pair.fingerprint().digest, "dtype": pair.dtype},
        "drafter": pair.manifest.drafter.type,
        "engine": made.launch.engine,
        "layout": made.exported.layout,
        "depth": made.depth,
        "logits_differ_by": made.exported.difference,
        "rounding": made.exported.rounding,
        "precision": made.exported.precision,
        "cost": made.cost and made.cost.record(),
        "suites": pair.manifest.measurements.suites,
        "expected": expected,
    }
    for name, values in ((LAUNCH, asdict(made.launch)), (SERVED, served)):
        write_atomically(folder / name, json.dumps(values, indent=2) + "\n")
    write_atomically(folder / README, _readme(pair, made, expected))


def _readme(pair: Pair, made: PairExport, expected: list[dict[str, Any]]) -> str:
    lines = [
        f"# {markdown_text(pair.name)} version {pair.version}, for {made.launch.engine}",
        "",
        f"A speculative drafter of type {pair.manifest.drafter.type}, written by Outrider in the layout "
        f"`{made.exported.layout}`. Read back as the engine reads it, its logits are the drafter's own (largest "
        f"difference {made.exported.difference:.1e} of their spread).",
        "",
        f"It drafts for one target only, whose content has the SHA-256 `{pair.fingerprint().digest}` ({pair.dtype}).",
    ]
    lines += [""] * bool(made.cost) + [f"- {line}" for line in (made.cost.lines if made.cost else ())]
    if made.launch.command is not None:
        lines += ["", "```sh", made.launch.command, "```"]
    if made.launch.adapter is not None:
        lines += ["", f"Ask for the model `{markdown_text(made.launch.adapter['name'])}`: the base has another text."]
    if made.launch.oldest is not None:
        lines += ["", f"It needs {made.launch.engine} {made.launch.oldest}."]
    lines += ["", f"It drafts {made.depth} tokens a round. Measured by Outrider, τ being the mean number of tokens "]
    lines[-1] += "emitted per round, with the target's own:" if expected else "emitted per round: nothing yet."
    lines += [""] * bool(expected)
    for entry in expected:
        tau = Figure(**entry["tau"]).text("not known", decimals=3)
        lines.append(
            f"- temperature {entry['temperature']:g}, depth {entry['depth']}: τ {tau} on {entry['num_prompts']} "
            f"prompts; accepted by position {', '.join(map(str, entry['accepted_at']))} of {entry['rounds']} rounds"
        )
    return "\n".join([*lines, "", f"`{SERVED}` holds these figures for programs.", ""])
