"""The `training:` section of a recipe as `transformers.TrainingArguments`, checked before anything is loaded."""

from __future__ import annotations

import logging
import math
import os
import re
import typing
from dataclasses import dataclass, fields
from enum import EnumType
from typing import Any, cast

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..common import BadInputError, refuse_unknown_keys
from ..common.errors import reason
from ..common.hub import HUB_ID
from ..common.values import accepts, checked_value
from ..recipes.schema import Recipe
from . import muon
from .hooks import train_on_one_gpu

_log = logging.getLogger(__name__)

MEASURED, GAP = "measured_tau", "tau_gap"  # what the decoder measures while training, see train/decoding.py

# Fields that change a loss or a model which a drafter does not have. Off by default, and refused when switched on.
_MEANINGLESS = {
    "label_smoothing_factor": "a drafter learns the target's whole distribution, there are no labels to smooth",
    "neftune_noise_alpha": "a drafter's input embeddings are the target's or must match them, noise is not supported",
    "use_liger_kernel": "on CUDA, losses use it by themselves where it is installed; the models stay as they are",
    **dict.fromkeys(("hub_strategy", "hub_always_push"), "training.push_to_hub pushes once, when all is trained"),
    "hub_revision": "training.push_to_hub pushes to the main branch",
    "fsdp": "the launcher says so (accelerate launch --config_file recipes/accelerate/fsdp2.yaml)",
}

# What torch or the library would refuse only when the training begins: at least the first, and less than the second.
_RANGES: dict[str, tuple[int, float]] = {
    "per_device_train_batch_size": (1, math.inf),
    "per_device_eval_batch_size": (1, math.inf),
    "gradient_accumulation_steps": (1, math.inf),
    "learning_rate": (0, math.inf),
    "weight_decay": (0, math.inf),
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "adam_epsilon": (0, math.inf),
    "max_grad_norm": (0, math.inf),
    "seed": (0, 2**32),
    "data_seed": (0, 2**32),
    "dataloader_num_workers": (0, math.inf),
    "eval_steps": (0, math.inf),
    "save_steps": (0, math.inf),
    "max_length": (1, math.inf),
}


_OWN = {"packing": bool, "max_length": int | None}  # TRL's words, which are no `TrainingArguments`


PUSH = ("push_to_hub", "hub_model_id", "hub_private_repo")  # which `train.hub` reads, in the place of the trainer


@dataclass(frozen=True)
class Push:
    """Where on the Hub a finished drafter goes; `private` is None for what is the rule there."""

    repository: str
    private: bool | None = None


def push_of(values: dict[str, Any]) -> Push | None:
    """Return where a recipe's `training` pushes its drafter; None for nowhere."""
    checked = check_training(values)
    return Push(checked["hub_model_id"], checked.get("hub_private_repo")) if checked.get("push_to_hub") else None


def unpushed(values: dict[str, object]) -> dict[str, object]:
    """Return a recipe's `training` without a place to push to."""
    return {name: value for name, value in values.items() if name not in PUSH}


@dataclass(frozen=True)
class Packing:
    """The settings of packing: tokens of a pack, None for those of the longest row."""

    max_length: int | None = None


def packing_of(values: dict[str, Any]) -> Packing | None:
    """Return how a recipe's `training` packs; None if it does not."""
    checked = check_training(values)
    return Packing(checked.get("max_length")) if checked.get("packing") else None


def check_training(values: dict[str, Any]) -> dict[str, Any]:
    """Return `training:` with every value of its field's type (`"3e-3"` becomes a number, a bare no of YAML `"no"`).

    Raises BadInputError for an unknown field, a value of the wrong type or out of range, or a field without meaning
    here.
    """
    known = {f.name for f in fields(TrainingArguments) if f.init} | _OWN.keys()
    refuse_unknown_keys(values, known, "training")
    for name in values:
        if name.endswith("_token") and values[name] is not None:  # which the message must not repeat
            raise BadInputError(
                f"training.{name}: found a secret in the recipe, which the output and trackers keep; leave it out, and "
                "set the environment variable HF_TOKEN."
            )
    hints, checked = typing.get_type_hints(TrainingArguments) | _OWN, {}
    for name, value in values.items():
        is_bare_no = value is False and any(accepts(hints[name], kind) for kind in (IntervalStrategy, SaveStrategy))
        checked[name] = checked_value(f"training.{name}", "no" if is_bare_no else value, hints[name])
        kinds: list[Any] = [kind for kind in typing.get_args(hints[name]) if isinstance(kind, EnumType)]
        words = [member.value for kind in kinds for member in kind]
        if words and isinstance(checked[name], str):
            refuse_unknown_keys([checked[name]], words + [muon.NAME] * (name == "optim"), f"training.{name}")
    for name, (low, high) in _RANGES.items():
        if checked.get(name) is not None and not low <= checked[name] < high:
            below = "" if high == math.inf else f" and less than {high}"
            raise BadInputError(f"training.{name}: expected {low} or more{below}, found {checked[name]:g}.")
    for name, unset in (("num_train_epochs", None), ("max_steps", -1)):  # an untrained drafter would look trained
        value = checked.get(name)
        if value not in (None, unset) and not 0 < value < math.inf:
            raise BadInputError(f"training.{name}: expected more than 0, found {value:g}: a drafter needs steps.")
    if checked.get("optim") == muon.NAME and checked.get("optim_args"):
        raise BadInputError("training.optim_args: muon takes none here; leave it out.")
    if checked.get("max_length") is not None and not checked.get("packing"):
        raise BadInputError(
            "training.max_length is the length of a pack: set training.packing: true, or leave it out (rows are as "
            "long as data.max_prompt_tokens and data.max_new_tokens allow)."
        )
    if checked.get("push_to_hub") and not HUB_ID.fullmatch(checked.get("hub_model_id") or ""):
        raise BadInputError(
            f"training.hub_model_id: expected ORG/NAME, where training.push_to_hub pushes to, found "
            f"{checked.get('hub_model_id')!r}."
        )
    for name, why in _MEANINGLESS.items():
        if checked.get(name) and checked[name] not in ("end", "every_save"):  # of hub_strategy: no checkpoints
            raise BadInputError(f"training.{name}: leave it out: {why}.")
    return checked


def trackers(args: TrainingArguments) -> list[str]:
    """Return the trackers that a training reports to: of whatever `report_to` was, transformers has made a list."""
    return cast(list[str], args.report_to or [])


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """Return a recipe's `TrainingArguments`, over the defaults below; refuse bad values. Sets up processes, device."""
    values = {n: v for n, v in (_defaults(recipe) | check_training(recipe.training)).items() if n not in {*_OWN, *PUSH}}
    with_muon = values.get("optim") == muon.NAME
    try:
        values["remove_unused_columns"] = False  # all are used, and `forward` names none of them
        args = TrainingArguments(**values | ({"optim": "adamw_torch"} if with_muon else {}))
        device = args.device
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        raise BadInputError(f"training: {error}") from error
    refuse_unknown_keys(dict.fromkeys(trackers(args)), INTEGRATION_TO_CALLBACK, "training.report_to")
    _check_measures(recipe, args)
    _check_scheduler(args)
    if args.lr_scheduler_type == "reduce_lr_on_plateau":  # which by itself waits for a fall
        mode = {"mode": "max" if args.greater_is_better else "min"}
        args.lr_scheduler_kwargs = mode | cast("dict[str, Any]", args.lr_scheduler_kwargs or {})
    unset_hf_deepspeed_config()  # else ZeRO stage 3 would take apart any model that is loaded from now on: the target
    if with_muon:
        args.optim = muon.NAME  # not one of the library's names: DrafterTrainer reads it
    if "load_best_model_at_end" not in recipe.training:
        # The trainer saves what is better than all before it: steps of saving need not be those of evaluating.
        saves = args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH) and not args.save_only_model
        args.load_best_model_at_end = saves and args.eval_strategy != IntervalStrategy.NO
    if args.n_gpu > 1:
        _log.warning(
            "%d GPUs are visible but this is one process: training on %s only. Use `accelerate launch --multi_gpu "
            "-m outrider.train …` for all of them.",
            args.n_gpu,
            device,
        )
        train_on_one_gpu(args)
    return args


def _check_measures(recipe: Recipe, args: TrainingArguments) -> None:
    """Refuse a figure to measure, or to choose the best checkpoint by, that no evaluation gives."""
    if recipe.eval.training_prompts and recipe.data.holdout == 0:
        raise BadInputError(
            "eval.training_prompts: τ is measured where held-out rows are evaluated, and data.holdout is 0; set it to "
            "0.05."
        )
    wanted = str(args.metric_for_best_model or "").removeprefix("eval_")
    if wanted == MEASURED and not recipe.eval.training_prompts:
        raise BadInputError(
            f"training.metric_for_best_model is {MEASURED}, which nothing measures; set eval.training_prompts, to 16 "
            "for example."
        )
    if wanted and not re.fullmatch(rf"loss|tau|{MEASURED}|{GAP}|[a-z0-9]+_(d\d+|loss)", wanted):
        raise BadInputError(
            f"training.metric_for_best_model: expected loss, tau, {MEASURED}, or a figure of a depth such as alpha_d1, "
            f"found {args.metric_for_best_model!r}."
        )


def _check_scheduler(args: TrainingArguments) -> None:
    """Refuse settings that the scheduler of the learning rate does not have, or lacks."""
    nothing = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    try:
        get_scheduler(args.lr_scheduler_type, nothing, 1, 2, cast(Any, args.lr_scheduler_kwargs))
    except (ValueError, TypeError) as error:
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        raise BadInputError(f"training.lr_scheduler_kwargs: does not fit {kind}: {reason(error)}") from error


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """Return our defaults for settings that the recipe leaves out; steps below 1 are fractions of the training."""
    has_gpu, evaluates = torch.cuda.is_available(), recipe.data.holdout > 0
    best: dict[str, Any] = {}
    # transformers derives greater_is_better from the name, also from one in the recipe.
    if evaluates and recipe.eval.training_prompts:
        best = {"metric_for_best_model": f"eval_{MEASURED}"}
    elif evaluates and recipe.training.get("lr_scheduler_type") != "reduce_lr_on_plateau":  # which follows the loss
        best = {"metric_for_best_model": "eval_tau"}
    return {
        "output_dir": str(recipe.output_folder / "checkpoints"),
        "run_name": recipe.name,
        "report_to": "none",
        "average_tokens_across_devices": True,
        "use_cpu": not has_gpu,
        "dataloader_pin_memory": has_gpu,
        "disable_tqdm": os.environ.get("WORLD_SIZE", "1") != "1",  # bars of several processes run through the lines
        "logging_steps": 10,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": 0.1,
        "save_total_limit": 2,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": 0.25 if evaluates else None,
        **best,
    }
