"""The next version of a pair, for a changed target: new responses, a warm start, a shorter training, a measurement.

out/data, out/drafter, …    as a training writes them; each stage continues where it was interrupted
out/reports/<digest>/       what was measured, by what it was measured on
out/pair/                   the new version
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.locks import locked
from ..distill.prompts import Prompt
from ..eval.measure import contestants, measure
from ..eval.reports.render import write_report
from ..eval.suites import load_suites
from ..heads import HEADS, Drafter, LowRank, load_drafter
from ..recipes import Recipe
from ..targets import Target
from ..targets.fingerprint import digest_files, digest_json
from ..train import train
from ..train.stopping import Until
from .calibration import rendered
from .new import new_pair
from .pair import Pair

# Of the first training's length: the drafter starts from one that was good for almost the same target.
BUDGET = 0.4
HOW = "refresh.json"  # how it was asked for, in its working folder
_DEFAULT_EPOCHS = 3.0  # of transformers.TrainingArguments


@dataclass(frozen=True)
class How:
    """How a refresh trains.

    Attributes:
        rank: of a low-rank change that is learnt instead of all weights (`heads.low_rank`); None for all of them.
        seconds: of training, instead of the recipe's steps; None for those.
        until: when it ends before the last step; None never.
    """

    rank: int | None = None
    seconds: float | None = None
    until: Until | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and self.until is not None:
            raise BadInputError("a refresh ends after a time, or after tokens or a flat curve; choose one of the two.")


def refresh(
    pair: Pair,
    target: Target,
    out: str | Path,
    overrides: Sequence[str] = (),
    console: Console | None = None,
    how: How | None = None,
) -> Pair:
    """Train the pair's drafter on for `target`, measure it, and write the next version to `out`/pair.

    Run again after an interruption, it goes on from there; run again after the end, it returns what is there.

    Args:
        out: a folder outside of the pair's own.
        overrides: changes to the pair's recipe, `key.path=value`; they win over what a refresh sets itself.
        how: all weights, for the recipe's steps, unless it says otherwise.

    Raises:
        IncompatibleError: the drafter cannot be warm-started for this target (tokenizer, vocabulary, taps).
        BadInputError: an override or the folder cannot be used, or somebody else writes there.
    """
    folder = _outside(Path(out).expanduser(), pair)
    pair.drafter_for(target)
    recipe = refresh_recipe(pair, target, folder, overrides)
    with locked(folder):
        drafter_folder = _trained(pair, recipe, target, console, how or How())
        drafter = load_drafter(drafter_folder, target)
        report_folder = _measured(recipe, target, drafter, drafter_folder, console)
        prompts = _calibration(pair, target, recipe.template)
        return new_pair(folder / "pair", target, drafter_folder, recipe, report_folder, pair, prompts, console)


def refresh_recipe(pair: Pair, target: Target, out: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the pair's recipe, pointed at the new target and at its own drafter, with `BUDGET` of the training.

    The drafter is trained for the target as it is, also where a joint training made the pair. A pair that was itself
    refreshed has a recipe of that length already; it is not cut again.
    """
    _refuse_other_targets(overrides)
    recipe = pair.recipe()
    changes: dict[str, Any] = {
        "output": str(out),
        "data.responses": None,
        "joint": None,
        "drafter.init": str(pair.drafter_folder.resolve()),
    }
    if target.source.get("path"):
        changes["target"] = (
            recipe.target.model_dump()
            | {k: target.source.get(k) for k in ("path", "revision", "adapter", "quantize")}
            | {"dtype": _dtype(target), "trust_remote_code": False}  # a pair's recipe is not the user's word
        )
    if recipe.data.verified:  # what is served from now on are this drafter's rounds
        changes["data.drafter"] = str(pair.drafter_folder.resolve())
    if pair.manifest.lineage.parent is None:
        changes |= _shorter(recipe.training)
    return pair.recipe([*(f"{key}={json.dumps(value)}" for key, value in changes.items()), *overrides])


def _refuse_other_targets(overrides: Sequence[str]) -> None:
    """Refuse overrides that a refresh cannot follow: its target is given, and so is where its results go."""
    for override in overrides:
        section = override.partition("=")[0].strip().partition(".")[0]
        if section in ("target", "output"):
            option = "--target and --adapter" if section == "target" else "--out"
            raise BadInputError(f"a refresh cannot follow the override {override!r}: {option} say that.")


def _shorter(training: dict[str, Any]) -> dict[str, Any]:
    steps = training.get("max_steps", -1)
    if steps > 0:
        return {"training.max_steps": ceil(BUDGET * steps)}
    return {"training.num_train_epochs": BUDGET * training.get("num_train_epochs", _DEFAULT_EPOCHS)}


def _dtype(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def _outside(out: Path, pair: Pair) -> Path:
    if out.resolve().is_relative_to(pair.folder.resolve()):
        raise BadInputError(
            f"{str(out)!r} lies inside the pair {str(pair.folder)!r}, which would alter it; choose a folder outside."
        )
    return out


def _trained(pair: Pair, recipe: Recipe, target: Target, console: Console | None, how: How) -> Path:
    """Return the folder of the drafter after training; a drafter that learns nothing stays as it is."""
    if not HEADS[pair.manifest.drafter.type].trainable:
        return pair.drafter_folder
    finished, asked = recipe.output_folder / "drafter", recipe.output_folder / HOW
    said = json.dumps(asdict(how), indent=1) + "\n"
    if asked.is_file() and asked.read_text(encoding="utf-8") != said:
        raise BadInputError(
            f"{recipe.output_folder} holds a refresh that was asked for in another way ({asked.name} there); choose "
            "another --out."
        )
    asked.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(asked, said)
    if finished.is_dir() and how.until is not None:  # its last step may never come
        return finished
    drafter = None if how.rank is None else LowRank.over(pair.drafter_folder, target, how.rank)
    return train(recipe, target, drafter, console=console, seconds=how.seconds, until=how.until).drafter_folder


def _measured(recipe: Recipe, target: Target, drafter: Drafter, drafter_folder: Path, console: Console | None) -> Path:
    """Measure the drafter beside the recipe's baselines; a finished measurement of the same thing is used again."""
    suites = load_suites(recipe.eval.suites, target.require_tokenizer(), recipe.eval.limit, recipe.template)
    subject = [
        target.fingerprint().digest,
        digest_files(drafter_folder),
        recipe.eval.model_dump(),
        [s.digest for s in suites],
    ]
    folder = recipe.output_folder / "reports" / digest_json(subject)[:12]
    if not (folder / "report.json").exists():
        report = measure(target, contestants(target, drafter, recipe.eval), suites, recipe.eval, console=console)
        write_report(report, folder)
    return folder


def _calibration(pair: Pair, target: Target, template: Mapping[str, Any]) -> list[Prompt]:
    """Return the parent's prompts, as the new target's template asks them: the two versions can be compared on them."""
    changed = "chat_template" in pair.fingerprint().differences(target.fingerprint())
    changed |= dict(template) != pair.recipe().template
    return rendered(pair.calibration(), target, template) if changed else pair.calibration()
