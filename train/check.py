"""What is refused before work starts: by the recipe and the launch alone (`check`), and once the target is loaded.

A run that cannot end well stops here with a sentence about what to change, not after hours. A section of a recipe by
itself is checked where it is read: `training` in `arguments`, `drafter` in `drafter_init`, processes in `processes`,
the rest in `recipes.schema`.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from ..common import BadInputError
from ..common.atomic import free_bytes, readable_bytes
from ..common.errors import reason
from ..common.places import TRAINED, require_place
from ..costs.training import features_bytes
from ..distill.responses import data_folder
from ..formats import require_served
from ..heads import Drafter
from ..recipes import Recipe
from ..targets import Target
from .arguments import packing_of, trackers, training_arguments
from .drafter_init import check_abilities, check_drafter, check_makes
from .hooks import asks_for_checkpointing
from .processes import check_kind_of_processes, check_number_of_processes, check_sharding, kind_of_processes
from .resource_estimate import UnknownShapesError, sketch_drafter, sketch_target, workload
from .stopping import check_schedule

_log = logging.getLogger(__name__)


def check(recipe: Recipe, drafter: Drafter | None = None, seconds: float | None = None) -> TrainingArguments:
    """Return the arguments of a training that can be done; another one is refused. Nothing is loaded for that.

    `drafter` and `seconds` are those of `train`, in the place of the recipe's drafter and steps.
    """
    own = check_drafter(recipe.drafter) if drafter is None else type(drafter)
    drafter_class = own if drafter is None else drafter.learns_as
    check_abilities(recipe, drafter_class, own)
    args = training_arguments(recipe)
    if args.process_index == 0:
        require_place(recipe.output_folder, *TRAINED)
    check_reports(args)
    check_number_of_processes(args)
    check_kind_of_processes(args)
    check_sharding(args)
    if recipe.data.features == "engine" and args.world_size > 1:
        raise BadInputError(
            "data.features: engine makes states for one training process; several read those of data.features: cached."
        )
    check_many_processes(recipe, drafter_class, args)
    if seconds is not None:
        check_schedule(args)
    return args


def check_with_target(recipe: Recipe, args: TrainingArguments, target: Target, drafter: Drafter | None = None) -> None:
    """Refuse a drafter that cannot be trained for this target, before that answers any prompt."""
    is_answered = data_folder(recipe).is_dir()
    if drafter is not None:
        drafter.check(target)
    elif not is_answered:  # else the drafter itself is made, and checked, at once
        drafter = check_makes(recipe, target)
    if drafter is not None:
        check_recomputes(drafter, args)
        if not is_answered and args.process_index == 0:  # else the store computes exactly what it needs
            warn_of_features(recipe, target, drafter)


def check_by_configs(recipe: Recipe, args: TrainingArguments) -> None:
    """Refuse a drafter that does not fit the target's config, before its weights are read."""
    if recipe.target.engine is None:
        try:
            drafter = sketch_drafter(recipe, sketch_target(recipe))
        except UnknownShapesError:
            return
        check_recomputes(drafter, args)


def check_recomputes(drafter: Drafter, args: TrainingArguments) -> None:
    """Refuse activation checkpointing for a drafter without a Hugging Face model: it has one layer and keeps little."""
    if asks_for_checkpointing(args) and not isinstance(getattr(drafter, "model", None), PreTrainedModel):
        raise BadInputError(
            f"training.gradient_checkpointing: a {drafter.name} drafter has one layer and keeps no logits; leave it "
            "out."
        )


def check_reports(args: TrainingArguments) -> None:
    """Refuse unknown trackers, and those whose package or account is missing."""
    for name in trackers(args):
        try:
            get_reporting_integration_callbacks([name])[0]()
        except (RuntimeError, ImportError) as error:
            raise BadInputError(
                f"training.report_to: {name} cannot report here: {reason(error)} Install its package (pip install "
                f"{name}), or leave it out."
            ) from error
    if "wandb" not in trackers(args) or args.process_index != 0:
        return
    wandb: Any = importlib.import_module("wandb")
    if wandb.run is not None or wandb.Settings().mode in ("offline", "disabled", "dryrun"):
        return
    try:
        wandb.login()
    except Exception as error:  # of wandb's own kinds, which differ by version
        raise BadInputError(
            f"training.report_to: wandb cannot log in ({reason(error)}); run `wandb login`, or set WANDB_MODE=offline "
            "and `wandb sync` the run later."
        ) from error


def warn_of_features(recipe: Recipe, target: Target, drafter: Drafter) -> None:
    """Warn before any prompt is answered if hidden states may not find room on the disk, as far as that is known."""
    if recipe.data.features != "cached":
        return
    try:
        work = workload(recipe)
    except BadInputError:  # the number of prompts is not known
        return
    most = features_bytes(target, drafter.taps, work.tokens, recipe.data.features_dtype)
    free = free_bytes(recipe.output_folder)
    if free < most:
        _log.warning(
            "data.features: cached takes up to %s on the disk of %s, which has %s free (%s). The exact number is "
            "known, and checked, when they are answered. Free some, store less (data.features_dtype), or compute "
            "hidden states while training (data.features=online).",
            readable_bytes(most),
            recipe.output_folder,
            readable_bytes(free),
            work.source,
        )


def check_many_processes(recipe: Recipe, drafter_class: type[Drafter], args: TrainingArguments) -> None:
    """Refuse passes in numbers that differ between processes, and a target in parts where whole layers are needed."""
    # A language model reads a pack in as many passes as its texts need, and FSDP2 gathers layers in each of them.
    if packing_of(recipe.training) and drafter_class.by_layers and kind_of_processes(args) == "FSDP":
        raise BadInputError(
            f"training.packing: under FSDP2 a {drafter_class.name} must make as many passes in every process, and "
            "packs want different numbers; leave out training.packing, or launch with --multi_gpu or ZeRO."
        )
    sharding = recipe.target.sharding
    prunes = recipe.drafter.get("init") == "prune"
    if sharding != "none" and (prunes or drafter_class.needs_layers):
        raise BadInputError(
            f"target.sharding is {sharding!r}, but {drafter_class.name} drafters or init prune need "
            "the target's whole layers; leave out target.sharding, or take another drafter."
        )


def check_servable(recipe: Recipe, engine: str) -> None:
    """Refuse a recipe whose drafter `engine` cannot serve; configs are read, and no weights.

    Raises:
        BadInputError: an unknown engine, or a config that cannot be read.
        IncompatibleError: it serves no drafters of this type, or not with these settings: each is named with the
            nearest one that it serves.
    """
    target = sketch_target(recipe)
    drafter = sketch_drafter(recipe, target)
    require_served(engine, drafter.name, drafter.config, target.num_layers)
