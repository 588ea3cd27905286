"""Making a pair: everything is written into a folder beside the final one, which it replaces in one step."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ..common import BadInputError, Refusal
from ..common.atomic import replacing_folder, write_atomically
from ..common.digests import listed_problems
from ..common.locks import locked
from ..common.places import PAIR, require_place
from ..common.untrusted_files import read_json, yaml_text
from ..distill.data_set import learnt_questions
from ..distill.dataset_formats import understand
from ..distill.prompt_table import Prompt
from ..distill.responses import data_folder
from ..distill.sources import as_specs, rows_of
from ..eval.model_card import portable
from ..eval.reports.report import ContestantInfo, Report
from ..heads import Drafter, Fusion, load_drafter
from ..heads.registry import with_defaults
from ..recipes import Recipe, SourceSpec
from ..recipes.schema import TargetSpec
from ..recipes.suite_names import PACKAGED
from ..targets import Target
from ..targets.fingerprint import digest_file, digest_files
from ..targets.model_folder import NAMES, is_local
from ..targets.peft_adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .calibration import calibrate, choose_prompts, settings, write_calibration
from .folder import verify
from .manifest import (
    ADAPTER,
    CALIBRATION,
    DRAFTER,
    LEARNT,
    MANIFEST,
    RECIPE,
    REPORTS,
    SCHEMA_VERSION,
    SUITES,
    TOKENIZER,
    DrafterRecord,
    Figure,
    FingerprintRecord,
    Headline,
    Lineage,
    Manifest,
    Measurements,
    Parent,
    PlanRecord,
    ProbeBaseline,
    Source,
    TargetRecord,
)
from .pair import Pair

_COPIED = {".json", ".safetensors", ".jinja", ".model", ".txt"}
_log = logging.getLogger(__name__)
# The place that a tokenizer was loaded from, the loader, and code that came with it.
_INCIDENTAL = ("name_or_path", "_name_or_path", "is_local", "local_files_only", "transformers_version", "auto_map")
_REPORT_FILES = ("report.json", "report.md", "report.html")


def new_pair(
    folder: str | Path,
    target: Target,
    drafter: Drafter | str | Path,
    recipe: Recipe,
    report_folder: str | Path | None = None,
    parent: Pair | None = None,
    calibration: Sequence[Prompt] | None = None,
    console: Console | None = None,
) -> Pair:
    """Write a pair into `folder` and measure its probe baseline.

    The same pair in the same place is left as it is. A new measurement or recipe of it takes its place and keeps the
    older reports, the tuning, and the target's adapter.

    Args:
        drafter: in memory, or the folder it was saved to.
        report_folder: of `write_report`; None for a pair that was not measured.
        parent: the version this one follows.
        calibration: prompts for the probe; None takes the first of the recipe's suites. A target without its layers is
            not probed.

    Raises:
        BadInputError: something else is in `folder`, another process writes there, or the drafter or report cannot be
            read.
        IncompatibleError: the drafter cannot draft for this target.
    """
    final = Path(folder).expanduser().resolve()
    require_place(final, PAIR, what="the pair")
    with locked(final), replacing_folder(final) as partial:
        existing = _existing(final)
        saved = _save_drafter(drafter, partial / DRAFTER, target)
        write_atomically(partial / RECIPE, yaml_text(_portable(_keep_suites(recipe, partial))))
        report = None if report_folder is None else _copy_report(Path(report_folder).expanduser(), partial / REPORTS)
        measured = None if report is None else _measured(report, target, saved)
        manifest = _identified(partial, target, saved, recipe, _plan(measured, recipe), parent)
        if existing is not None:
            manifest = _keep_adapter(existing, partial, manifest)
            _require_same(existing, manifest)
            if _adds_nothing(existing, manifest):
                shutil.rmtree(partial)
                return existing
            _keep_reports(existing, partial)
            kept = {"tuning": existing.manifest.tuning, "served": existing.manifest.served}
            manifest = manifest.model_copy(update=kept)
        changes: dict[str, Any] = {"reports": digest_files(partial / REPORTS)}
        changes |= _keep_learnt(partial, recipe, [parent, existing])
        baseline, prompts = None, choose_prompts(recipe, target) if calibration is None else calibration
        if prompts and target.has_layers:  # only our own decoder measures them
            write_calibration(partial / CALIBRATION, prompts)
            changes["calibration"] = digest_file(partial / CALIBRATION)
            under = settings(recipe)
            measures = calibrate(target, saved, prompts, under, manifest.plan.restored(), console)
            baseline = under.model_copy(update={"prompts": measures})
        changes["measurements"] = Measurements(headline=[], suites={}, conditions={}, baseline=baseline)
        if report is not None and measured is not None:
            changes["measurements"] = _measurements(report, measured, baseline)
        manifest = manifest.model_copy(update=changes)
        sizes = {name: (partial / name).stat().st_size for name in manifest.files()}
        manifest = manifest.model_copy(update={"sizes": sizes}).sealed()
        manifest.write(partial)
    return Pair(final, manifest)


def _existing(final: Path) -> Pair | None:
    """Return the pair that is already there, if any; its altered files are written anew."""
    return Pair.load(final, check=False) if (final / MANIFEST).exists() else None


def _require_same(existing: Pair, manifest: Manifest) -> None:
    if existing.digest != manifest.identity():
        raise BadInputError(
            f"{str(existing.folder)!r} already holds another pair: {existing.name} version {existing.version} "
            f"({existing.digest[:12]}…), "
            f"this one is {manifest.name} version {manifest.version} ({manifest.digest[:12]}…). Nothing was written; "
            "choose another folder."
        )


def _adds_nothing(existing: Pair, manifest: Manifest) -> bool:
    """Return whether the existing pair holds all of the new one, and is intact."""
    old = existing.manifest
    same = (old.recipe, old.suites, old.lineage) == (manifest.recipe, manifest.suites, manifest.lineage)
    return same and {*old.reports.values()}.issuperset(manifest.reports.values()) and not verify(existing.folder)


def _keep_reports(existing: Pair, partial: Path) -> None:
    """Copy the older reports, except one of the new one's date and those that were altered."""
    reports = existing.folder / REPORTS
    altered = listed_problems(reports, existing.manifest.reports, existing.manifest.sizes_in(REPORTS))
    for line in altered:
        _log.warning("%s: %s; this report is not kept.", reports, line)
    dates = {line.partition("/")[0] for line in altered}
    for older in sorted(reports.glob("*")):
        if older.is_dir() and older.name not in dates and not (partial / REPORTS / older.name).exists():
            shutil.copytree(older, partial / REPORTS / older.name)


def _keep_adapter(existing: Pair, partial: Path, manifest: Manifest) -> Manifest:
    """Copy the adapter that the pair keeps, maybe its only copy, where the same target came without it from memory."""
    older = existing.manifest.target
    if manifest.target.adapter_files or not older.adapter_files:
        return manifest
    sizes = existing.manifest.sizes_in(ADAPTER)
    altered = listed_problems(existing.folder / ADAPTER, older.adapter_files, sizes)
    if altered:
        raise Refusal(
            f"{existing.folder / ADAPTER} was altered after the pair was made: {'; '.join(altered)}. Nothing was "
            "written; take a good copy of that pair, or choose another folder."
        )
    shutil.copytree(existing.folder / ADAPTER, partial / ADAPTER)
    record = manifest.target.model_copy(update={"source": older.source, "adapter_files": older.adapter_files})
    return manifest.model_copy(update={"target": record}).identified()


def _save_drafter(drafter: Drafter | str | Path, folder: Path, target: Target) -> Drafter:
    """Write the drafter's files, and return the drafter that they hold: that one is measured."""
    if isinstance(drafter, Drafter):
        drafter.save(folder)
    else:
        source = Path(drafter).expanduser()
        load_drafter(source, target)
        for file in sorted(source.rglob("*")):
            if file.is_file() and file.suffix in _COPIED and not _leads_out(file, source):
                copy = folder / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
    return load_drafter(folder, target)


def _keep_suites(recipe: Recipe, partial: Path) -> Recipe:
    """Copy the prompt files that the recipe measures on, with their folders' names, and return it with the copies."""
    names = list(recipe.eval.suites)
    for i, name in enumerate(names):
        file = Path(name).expanduser().resolve()
        if name not in PACKAGED and file.is_file():
            _require_own_images(file)
            copy = Path(SUITES) / file.parent.name / file.name
            (partial / copy).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, partial / copy)
            names[i] = copy.as_posix()
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"suites": names})})


def _portable(recipe: Recipe) -> dict[str, object]:
    """Return a recipe's values with no more of this machine's folders than a refresh or another training must read.

    Where results went, and what a refresh replaces, are names; paths below the working folder go from there.
    """
    named = {"output": portable(recipe.output), "training": portable(recipe.training)}
    named["data"] = recipe.data.model_copy(update={"responses": portable(recipe.data.responses)})
    values = recipe.model_copy(update=named).model_dump(mode="json")
    values["drafter"] = portable(with_defaults(recipe.drafter))
    for source in as_specs(recipe.data.prompts):
        if _from_here(source.path).startswith("/"):
            _log.info("the pair's recipe names %s: elsewhere a refresh wants its own data.prompts=[…]", source.path)
    return {name: portable(section, _from_here) for name, section in values.items()}


def _from_here(text: str) -> str:
    path = Path(text)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else text


def _require_own_images(file: Path) -> None:
    """Raise BadInputError if a suite's rows name images beside them, which its copy would not find."""
    for number, row in enumerate(rows_of(SourceSpec(path=str(file))), 1):
        asked = understand(row, f"{file}, row {number}", folder=file.parent) if isinstance(row, dict) else None
        if asked is not None and any(not image.place.startswith("data:") for image in asked.images):
            raise BadInputError(
                f"{file}, row {number}: its image is a file, and a pair keeps its suites alone; write it into the row "
                "as a data: URL."
            )


def _keep_learnt(partial: Path, recipe: Recipe, earlier: Sequence[Pair | None]) -> dict[str, str]:
    """Write down what the drafter and `earlier` ones learned from, and return the manifest's field; none if unknown."""
    learnt = learnt_questions(data_folder(recipe)).union(
        *(pair.learnt() for pair in earlier if pair is not None and (pair.folder / LEARNT).is_file())
    )
    if not learnt:
        return {}
    write_atomically(partial / LEARNT, "".join(f"{digest}\n" for digest in sorted(learnt)))
    return {"learnt": digest_file(partial / LEARNT)}


def _leads_out(file: Path, folder: Path) -> bool:
    """Return whether a link leads to a file that does not belong to the drafter in `folder`: pairs are given away.

    Folders of the Hub's cache hold links to the files beside them.
    """
    here, shown = folder.resolve(), file.resolve()
    return not any(shown.is_relative_to(home) for home in (here, *(p / "blobs" for p in here.parents[1:2])))


def _copy_adapter(target: Target, folder: Path) -> None:
    """Keep the target's adapter if it is local, without the folder that its base had on this machine."""
    adapter = Path(target.source.get("adapter") or "")
    if not target.source.get("adapter") or not (adapter / ADAPTER_WEIGHTS).is_file():
        return
    folder.mkdir()
    shutil.copyfile(adapter / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
    config = read_json(adapter / ADAPTER_CONFIG)
    base = config.get("base_model_name_or_path")
    config["base_model_name_or_path"] = None if base is None or is_local(base) else base
    write_atomically(folder / ADAPTER_CONFIG, json.dumps(config, indent=2, sort_keys=True))


def _copy_report(source: Path, reports: Path) -> Report:
    """Copy a report's files into a folder named by today's date."""
    report = Report.load(source)
    dated = reports / _today()
    dated.mkdir(parents=True)
    for name in _REPORT_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, dated / name)
    return report


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _identified(
    partial: Path, target: Target, drafter: Drafter, recipe: Recipe, plan: PlanRecord, parent: Pair | None
) -> Manifest:
    """Return the manifest as it is before anything is measured, and write the files of tokenizer and adapter."""
    fingerprint = target.fingerprint()
    if target.tokenizer is not None:
        _save_tokenizer(target.tokenizer, partial / TOKENIZER)
    _copy_adapter(target, partial / ADAPTER)
    kept = {"tokenizer_files": digest_files(partial / TOKENIZER), "adapter_files": digest_files(partial / ADAPTER)}
    changed = target.source.get("changed")
    why = "" if changed is None else f"; the drafter was trained for another target, of which differ: {changed}"
    lineage = Lineage(parent=None, reason=f"first version{why}")
    if parent is not None:
        changed = ", ".join(parent.fingerprint().differences(fingerprint))
        reason = f"the target changed: {changed}" if changed else "a new drafter for the same target"
        record = Parent(name=parent.name, version=parent.version, digest=parent.digest)
        lineage = Lineage(parent=record, reason=reason)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=recipe.name,
        version=1 if parent is None else parent.version + 1,
        digest="",
        target=TargetRecord(fingerprint=FingerprintRecord(**fingerprint.to_dict()), source=_source(target), **kept),
        drafter=DrafterRecord(type=drafter.name, files=digest_files(partial / DRAFTER)),
        recipe=digest_file(partial / RECIPE),
        calibration=None,
        reports=digest_files(partial / REPORTS),
        suites=digest_files(partial / SUITES),
        plan=plan,
        measurements=Measurements(headline=[], suites={}, conditions={}, baseline=None),
        lineage=lineage,
        created=_today(),
        outrider_version=installed_version("outrider"),
    ).identified()


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer without the place that it was loaded from: its files are part of the pair's identity."""
    tokenizer.save_pretrained(str(folder))
    file = folder / "tokenizer_config.json"
    if file.exists():
        config = {name: value for name, value in read_json(file).items() if name not in _INCIDENTAL}
        write_atomically(file, json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n")


def _source(target: Target) -> Source:
    """Return the place that the target was loaded from, with absolute local paths."""
    values = {name: target.source.get(name) for name in Source.model_fields}
    for name in ("path", "adapter"):
        if (value := values[name]) is not None and value not in NAMES and Path(value).exists():
            values[name] = str(Path(value).resolve())
    return Source(**values)


def _measurements(report: Report, measured: ContestantInfo, baseline: ProbeBaseline | None) -> Measurements:
    conditions = report.conditions.model_dump(mode="json")
    suites = {suite["name"]: suite["digest"] for suite in conditions.pop("suites")}
    figures = [report.headline(measured.name, temperature) for temperature in report.conditions.temperatures]
    headline = [
        Headline(
            temperature=f.temperature,
            rule=f.rule,
            num_prompts=f.num_prompts,
            tau=Figure.of(f.tau),
            speedup=Figure.of(f.speedup),
        )
        for f in figures
    ]
    return Measurements(headline=headline, suites=suites, conditions=conditions, baseline=baseline)


def _plan(measured: ContestantInfo | None, recipe: Recipe) -> PlanRecord:
    """Return the plan that was measured; without a report, the recipe's."""
    if measured is None:
        return PlanRecord(**{name: getattr(recipe.eval, name) for name in ("depth", "width", "nodes", "tree")})
    return PlanRecord(**{name: getattr(measured, name) for name in PlanRecord.model_fields})


def _measured(report: Report, target: Target, drafter: Drafter) -> ContestantInfo:
    """Return the pair's drafter in a report, under its own plan: the contestant with its name, else one of its type.

    A tuned plan of it, or of a fusion with it, may stand first: that one is kept with the tuning. BadInputError for a
    report about another target or drafter: a pair's parts must have been measured together.
    """
    reported = str(report.conditions.target.get("fingerprint"))
    fingerprint = target.fingerprint().digest
    if reported != fingerprint:
        raise BadInputError(
            f"the report is about another target: its fingerprint is {reported[:12]}…, this target's "
            f"{fingerprint[:12]}… ({target.dtype}). Measure this one, or load it as it was measured (another dtype is "
            "another target)."
        )
    drafting = [c for c in report.contestants if c.kind == "drafter"]
    of_its_type = [c for c in drafting if c.drafter == drafter.name]
    if not of_its_type or drafting[0].drafter not in (drafter.name, Fusion.name):
        about = "plain decoding only"
        if drafting:
            about = f"{drafting[0].name!r}, a drafter of type {drafting[0].drafter!r}"
        raise BadInputError(
            f"the report is about {about}, but the pair's drafter is of type {drafter.name!r}; measure that one, first "
            "in the list."
        )
    measured = next((c for c in of_its_type if c.name == drafter.name), of_its_type[0])
    own = drafter.digest()
    if measured.digest is None:
        raise BadInputError(
            "the report does not say which weights of the drafter were measured: an older Outrider made it. Measure "
            "again with `outrider eval`."
        )
    if measured.digest != own:
        raise BadInputError(
            f"the report is about other weights or settings of a {drafter.name}: the drafter measured has the digest "
            f"{measured.digest[:12]}…, this one {own[:12]}…. Measure this one with `outrider eval`, or name the one "
            "that was measured."
        )
    return measured


def paired(folder: str | Path, target: Target, drafter: Drafter, console: Console | None = None) -> Pair:
    """Make a pair of a drafter that was trained elsewhere, and measure its probe baseline.

    Raises:
        BadInputError: something else is in `folder`, or the target cannot be named.
        IncompatibleError: the drafter cannot draft for this target.
    """
    if target.source.get("path") is None:
        raise BadInputError("this target was given in memory; load it from a folder or the Hub to make a pair.")
    spec = {name: target.source[name] for name in TargetSpec.model_fields if target.source.get(name) is not None}
    values = {
        "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(folder).name).strip("-._") or drafter.name,
        "target": spec | {"dtype": str(target.dtype).removeprefix("torch.")},
        "drafter": {"type": drafter.name},
        # A refresh learns from these, unless it is given others: `outrider refresh … data.prompts=[…]`.
        "data": {"prompts": ["embedded:code", "embedded:docs", "embedded:prose"]},
        "eval": {"depth": min(4, drafter.max_depth or 4)},
    }
    return new_pair(folder, target, drafter, Recipe.from_dict(values), console=console)
