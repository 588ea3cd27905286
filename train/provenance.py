"""The files beside a trained drafter: the resolved recipe, and provenance.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..common import BadInputError, Refusal, digests
from ..common.atomic import write_atomically
from ..common.digests import read_sealed, seal_problem, sealed_text, write_json
from ..common.places import RUN, mark
from ..common.runtime import versions
from ..distill.data_set import provenance as data_provenance
from ..heads.registry import is_warm, with_defaults
from ..recipes import Recipe, load_recipe
from ..targets import Fingerprint, Target
from .arguments import PUSH
from .drafter_init import warm_folder

RECIPE = "recipe.yaml"
PROVENANCE = "provenance.json"
TARGET = "target.json"
SCHEMA_VERSION = 2

_log = logging.getLogger(__name__)

# Training settings that may change between an interrupted run and the one that continues it: how long it goes on, where
# and how it runs, and what is saved, measured and shown on the way.
_FREE = {"max_steps", "num_train_epochs", "resume_from_checkpoint", "output_dir", "overwrite_output_dir", "run_name"}
_FREE |= {"use_cpu", "ddp_timeout", "dataloader_num_workers", "dataloader_pin_memory"}
_FREE |= {"dataloader_persistent_workers", "dataloader_prefetch_factor"}
_FREE |= {"save_strategy", "save_steps", "save_total_limit", "save_only_model"}
_FREE |= {"eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size"}
_FREE |= {"logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_level"}
_FREE |= {"report_to", "project", "disable_tqdm", *PUSH}


# How the rows of a step are spread. Where a checkpoint says how many there are in all, only that must stay.
_SPREAD = {"training.per_device_train_batch_size", "training.gradient_accumulation_steps"}


def check_same_run(recipe: Recipe, output: Path, may_spread: bool = False) -> None:
    """Refuse to continue a run with other settings, named; a step's rows `may_spread` over processes in another way."""
    if not (output / RECIPE).is_file():
        if (output / "checkpoints").is_dir():
            _log.warning("%s is missing: its run may have been of another recipe.", output / RECIPE)
        return
    if (problem := seal_problem(output / RECIPE)) is not None:
        _log.warning("%s: %s. It is compared as it is, and written anew.", output / RECIPE, problem)
    begun = load_recipe(output / RECIPE)
    then, now = _deciding_settings(begun), _deciding_settings(recipe)
    keys = sorted((then.keys() | now.keys()) - (_SPREAD if may_spread else set()))
    if changed := [f"{k} (was {then.get(k)!r}, is {now.get(k)!r})" for k in keys if then.get(k) != now.get(k)]:
        raise BadInputError(
            f"{output} holds an unfinished or finished run of another recipe: {'; '.join(changed)}. Choose another "
            "output, or start over (--fresh)."
        )
    for name in ("max_steps", "num_train_epochs"):
        was, is_now = begun.training.get(name), recipe.training.get(name)
        if was != is_now:
            _log.info("training.%s was %s and is %s: learning rates go on as of such a length", name, was, is_now)


def _deciding_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that decide the final weights, by dotted key."""
    values = recipe.model_dump(mode="json") | {"drafter": with_defaults(recipe.drafter)}
    sections = {name: values[name] or {} for name in ("target", "drafter", "data", "training")}
    flat = {f"{section}.{key}": value for section, entries in sections.items() for key, value in entries.items()}
    free = {f"training.{name}" for name in _FREE}
    # A target may be moved: the responses it wrote are compared with it by content. Of given ones the path counts.
    free |= set() if recipe.data.responses else {"target.path"}
    free |= {"target.engine", "target.allow_changed"}  # the target is compared by itself
    return {key: value for key, value in flat.items() if key not in free}


def write_recipe(recipe: Recipe, output: Path) -> None:
    mark(output, RUN)
    write_atomically(output / RECIPE, sealed_text(recipe.to_yaml(drafter=with_defaults(recipe.drafter))))


def keep_target(recipe: Recipe, target: Target, goes_on: bool) -> None:
    """Write down the target of a run, by content; refuse another one than the run that `goes_on` was begun for."""
    found, output = target.fingerprint(), recipe.output_folder
    if goes_on and (known := target_of(output)) is not None:
        target.check_same(known, f"the run in {output}", recipe.target.allow_changed, found)
    if not goes_on and is_warm(recipe.drafter):
        start = warm_folder(recipe.drafter)
        known = target_of(start.parent)
        if known is not None and (differing := known.differences(found)):
            _log.warning("drafter.init: %s was trained for another target: %s differ.", start, "; ".join(differing))
    write_json(output / TARGET, found.to_dict())


def target_of(output: Path) -> Fingerprint | None:
    """Return the target that the drafter of a run was trained for; None where that is not known.

    An earlier version wrote its digest alone: where it answered the prompts itself, its parts are with the responses.
    """
    if (output / TARGET).is_file():
        return Fingerprint.from_dict(read_sealed(output / TARGET, "Train again with the same recipe."))
    if not ((output / PROVENANCE).is_file() and (output / "data" / PROVENANCE).is_file()):
        return None
    answered = data_provenance(output / "data")["target"]
    is_same = answered["digest"] == read_provenance(output)["target"]["digest"]
    return Fingerprint.from_dict(answered) if is_same else None


def write_provenance(output: Path, target: Target, data: Path, facts: dict[str, Any]) -> None:
    """Write `<output>/provenance.json`: the target and its data by content, versions, and the `facts` of the run."""
    saved = data_provenance(data)
    whole = {
        "schema_version": SCHEMA_VERSION,
        "target": {"digest": target.fingerprint().digest, **target.source},
        "data": {"responses_of": saved["target"]["digest"]}
        | {k: v for k, v in saved.items() if k in ("prompts", "sampling", "source", "counts")},
        **facts,
        "versions": versions(),
    }
    write_json(output / PROVENANCE, whole)


def read_provenance(output: Path) -> dict[str, Any]:
    """Return the content of provenance.json; a missing, damaged or altered one is refused."""
    advice = "Train again with the same recipe: a finished training only writes its result anew."
    saved = read_sealed(output / PROVENANCE, advice, required=False)
    if (version := saved.get("schema_version")) != SCHEMA_VERSION:
        raise Refusal.of(output / PROVENANCE, f"schema version {version!r}", f"{SCHEMA_VERSION}", advice)
    return saved


def require_result(output: Path, name: str) -> Path:
    """Return the folder of a result of the training in `output`, checked.

    Raises Refusal if it was altered or damaged after it was written, and in which files.
    """
    folder = output / name
    if has_ended := (output / PROVENANCE).is_file():
        read_provenance(output)
    else:
        _log.warning("%s is missing: the training of %s did not come to its end.", output / PROVENANCE, folder)
    if has_ended or (folder / digests.LIST).exists():
        digests.require_whole(folder, "Run `outrider train` with its recipe again: a finished training writes it anew.")
    return folder
