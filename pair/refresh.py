"""The next version of a pair, for a changed target: new responses, a warm start, a shorter training, a measurement.

out/data, out/drafter, …    as a training writes them; each stage continues where it was interrupted
out/reports/<digest>/       measurements, by target, drafter and prompts
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
from ..common.places import REFRESH, require_place
from ..distill.prompt_table import Prompt
from ..eval.measure import contestants, measure
from ..eval.reports.render import write_report
from ..eval.suites import Suite, suites_of
from ..heads import HEADS, Drafter, LowRank, load_drafter
from ..recipes import EvalSpec, Recipe
from ..targets import Target
from ..targets.fingerprint import digest_files, digest_json
from ..train import train
from ..train.provenance import keep_target
from ..train.stopping import Until
from .calibration import NUM_PROMPTS, rendered
from .comparison import newest_report
from .manifest import REPORTS
from .new import new_pair
from .pair import Pair

TRAINING_SHARE = 0.4  # of the first training's length: the drafter starts from one for almost the same target
OPTIONS_FILE = "refresh.json"  # the settings of the refresh, in its working folder
_DEFAULT_EPOCHS = 3.0  # of transformers.TrainingArguments


@dataclass(frozen=True)
class RefreshOptions:
    """How a refresh trains.

    Attributes:
        rank: of a low-rank change that is learnt instead of all weights (`heads.low_rank`); None for all of them.
        seconds: of training, instead of the recipe's steps; None for those.
        until: the condition for ending before the last step, if any.
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
    options: RefreshOptions | None = None,
    generate_baseline: bool = True,
) -> Pair:
    """Train the pair's drafter on for `target`, measure it, and write the next version to `out`/pair.

    Run again after an interruption, it goes on from there; run again after the end, it returns the finished version.

    Args:
        out: a folder outside of the pair's own.
        overrides: changes to the pair's recipe, `key.path=value`; they win over those of the refresh itself.
        options: all weights for the recipe's steps by default.
        generate_baseline: whether `transformers.generate` is measured beside it, too.

    Raises:
        IncompatibleError: the drafter cannot be warm-started for this target (tokenizer, vocabulary, taps).
        BadInputError: an override, a suite or the folder cannot be used, or another process writes there.
    """
    folder = Path(out).expanduser()
    require_place(folder, REFRESH, what="the refresh")
    pair.drafter_for(target)
    recipe, options = refresh_recipe(pair, target, folder, overrides), options or RefreshOptions()
    settings = _measured_as(pair, recipe.eval, overrides, options)
    learnt, data = pair.learnt(), f"the training data of the pair {pair.name!r}"
    suites = suites_of(target, settings, recipe.template, learnt, data, recipe.data.allow_leaks)
    with locked(folder):
        drafter_folder = refreshed_drafter(pair, recipe, target, options, console)
        drafter = load_drafter(drafter_folder, target)
        place = recipe.output_folder / "reports"
        report_folder = _measured(place, settings, suites, target, drafter, drafter_folder, generate_baseline, console)
        prompts = _calibration(pair, target, recipe.template)
        return new_pair(folder / "pair", target, drafter_folder, recipe, report_folder, pair, prompts, console)


def refresh_recipe(pair: Pair, target: Target, out: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the pair's recipe, pointed at the new target and at its own drafter, for a share of the training.

    The drafter is trained for the target as it is. A pair that was itself refreshed has a recipe of that length
    already; it is not cut again.
    """
    for override in overrides:
        section = override.partition("=")[0].strip().partition(".")[0]
        if section in ("target", "output"):
            option = "--target and --adapter" if section == "target" else "--out"
            raise BadInputError(f"a refresh cannot follow the override {override!r}: {option} say that.")
    recipe, drafter = pair.recipe(), str(pair.drafter_folder.resolve())
    changes: dict[str, Any] = {"output": str(out), "data.responses": None, "drafter.init": drafter}
    if target.source.get("path"):
        source = {k: target.source.get(k) for k in ("path", "revision", "adapter", "quantize")}
        dtype = {"dtype": str(target.dtype).removeprefix("torch.")}
        safe = {"trust_remote_code": False, "engine": None}  # a pair's recipe may not name programs to run
        safe["allow_changed"] = False
        changes["target"] = recipe.target.model_dump(mode="json") | source | dtype | safe
    if recipe.training.get("push_to_hub"):  # nor a place on the Hub
        changes["training.push_to_hub"] = False
    if pair.manifest.lineage.parent is None:
        if (steps := recipe.training.get("max_steps", -1)) > 0:
            changes["training.max_steps"] = ceil(TRAINING_SHARE * steps)
        else:
            epochs = recipe.training.get("num_train_epochs", _DEFAULT_EPOCHS)
            changes["training.num_train_epochs"] = TRAINING_SHARE * epochs
    return pair.recipe(overrides, changes)


def refreshed_drafter(
    pair: Pair, recipe: Recipe, target: Target, options: RefreshOptions, console: Console | None = None
) -> Path:
    """Return the folder of the drafter after training by `refresh_recipe`'s recipe; one that cannot learn stays."""
    if not HEADS[pair.manifest.drafter.type].trainable:
        return pair.drafter_folder
    finished, asked = recipe.output_folder / "drafter", recipe.output_folder / OPTIONS_FILE
    settings = json.dumps(asdict(options), indent=1) + "\n"
    if asked.is_file() and asked.read_text(encoding="utf-8") != settings:
        raise BadInputError(
            f"{recipe.output_folder} holds a refresh that was asked for in another way ({asked.name} there); choose "
            "another --out."
        )
    asked.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(asked, settings)
    if finished.is_dir() and options.until is not None:  # its last step may never come
        keep_target(recipe, target, goes_on=True)
        return finished
    drafter = None if options.rank is None else LowRank.over(pair.drafter_folder, target, options.rank)
    return train(recipe, target, drafter, console=console, seconds=options.seconds, until=options.until).drafter_folder


def _measured_as(pair: Pair, settings: EvalSpec, overrides: Sequence[str], options: RefreshOptions) -> EvalSpec:
    """Return how a refresh is measured: as its parent was, so that the two can be compared; overrides win.

    A training for a time whose parent has no report is measured on as many prompts as a calibration has.
    """
    if any((pair.folder / REPORTS).glob("*/report.json")):
        then = newest_report(pair).conditions
        longest = max(suite.num_prompts + suite.left_out for suite in then.suites)
        found: dict[str, Any] = {name: getattr(then, name) for name in ("repeats", "max_new_tokens")}
        found |= {"limit": longest}
        found |= {} if settings.sampling == "served" else {"temperatures": then.temperatures}
    else:
        few = options.seconds is not None and settings.limit is None
        found = {"limit": ceil(NUM_PROMPTS / len(settings.suites))} if few else {}
    asked = {override.partition("=")[0].strip() for override in overrides}
    return settings.model_copy(update={k: v for k, v in found.items() if not {"eval", f"eval.{k}"} & asked})


def _measured(
    place: Path,
    settings: EvalSpec,
    suites: Sequence[Suite],
    target: Target,
    drafter: Drafter,
    drafter_folder: Path,
    generate: bool,
    console: Console | None,
) -> Path:
    """Measure the drafter beside the recipe's baselines; a finished measurement of the same thing is used again."""
    digests = [s.digest for s in suites]
    subject = [target.fingerprint().digest, digest_files(drafter_folder), settings.model_dump(), digests]
    folder = place / digest_json(subject)[:12]
    if not (folder / "report.json").exists():
        report = measure(target, contestants(target, drafter, settings), suites, settings, generate, console)
        write_report(report, folder)
    return folder


def _calibration(pair: Pair, target: Target, template: Mapping[str, Any]) -> list[Prompt]:
    """Return the parent's prompts, rendered by the new target's template, so that both versions can be compared."""
    changed = "chat_template" in pair.fingerprint().differences(target.fingerprint())
    changed |= dict(template) != pair.recipe().template
    return rendered(pair.calibration(), target, template) if changed else pair.calibration()
