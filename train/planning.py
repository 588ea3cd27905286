"""The plan of a training (`costs.training`), made of configs alone: no weights of the target are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from transformers import Trainer, TrainingArguments

from ..common import BadInputError, OutriderError
from ..common.errors import LIBRARY_ERRORS, reason
from ..costs.training import Needs, Sharding, TrainingEstimate, Workload
from ..distill.data_set import load_responses
from ..distill.responses import data_folder
from ..distill.sources import count_rows
from ..heads import Drafter
from ..recipes import Recipe, SourceSpec
from ..targets import Target
from ..targets.loading import meta_causal_lm
from . import muon
from .arguments import packing_of, training_arguments
from .data import FIRST_LEARNED
from .drafter_init import check_drafter, make_drafter


def plan(recipe: Recipe, processes: int = 1, sharding: Sharding = "none", rows: int | None = None) -> Needs:
    """Return the needs of training this recipe, by configs, and the lengths of finished responses if there are some.

    Args:
        processes: one device each.
        sharding: of the drafter's training, as the accelerate config says.
        rows: prompts, where neither `data.limit` nor local files tell.

    Raises:
        BadInputError: a config that cannot be read, a drafter that cannot be trained, or an unknown number of prompts.
    """
    if processes < 1 or sharding not in get_args(Sharding):
        raise BadInputError(
            f"plan: expected at least 1 process and one of {', '.join(get_args(Sharding))}; found {processes} and "
            f"{sharding!r}."
        )
    check_drafter(recipe.drafter)
    args = _arguments(recipe)
    target = sketch_target(recipe)
    work = workload(recipe, rows)
    drafter = sketch_drafter(recipe, target)
    target.check_taps(drafter.taps)
    packing = packing_of(recipe.training)
    pack = 0 if packing is None else packing.max_length or work.longest
    make = partial(_optimizer, drafter, args)
    return TrainingEstimate(recipe, args, target, drafter, work, pack, make, processes, sharding).needs()


def sketch_target(recipe: Recipe) -> Target:
    """Return the recipe's target without contents."""
    spec = recipe.target
    return Target(meta_causal_lm(spec.path, spec.dtype, spec.revision, spec.trust_remote_code))


def sketch_drafter(recipe: Recipe, target: Target) -> Drafter:
    """Return the recipe's drafter without contents, in fp32 as it is trained.

    A drafter whose first weights are computed from the target's has the shapes of a random one, where it can be that.
    """
    values = recipe.drafter
    try:
        with torch.device("meta"):
            counts = torch.zeros(target.vocab_size, dtype=torch.long, device="cpu")
            return make_drafter(values, target, lambda: counts).to("meta")
    except OutriderError:
        raise
    except LIBRARY_ERRORS as error:
        if values.get("init") != "random" and "random" in check_drafter(values).config_class.words.get("init", ()):
            return sketch_drafter(recipe.model_copy(update={"drafter": values | {"init": "random"}}), target)
        raise BadInputError(
            f"a {values.get('type')} drafter of these settings cannot be planned from configs alone: {reason(error)}"
        ) from error


def _arguments(recipe: Recipe) -> TrainingArguments:
    """Return the recipe's arguments, on whatever machine the estimate is made."""
    of_devices = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32", "use_cpu", "deepspeed", "torch_compile")
    kept = {name: value for name, value in recipe.training.items() if name not in (*of_devices, "report_to")}
    return training_arguments(recipe.model_copy(update={"training": kept | {"use_cpu": True}}))


def _optimizer(drafter: Drafter, args: TrainingArguments) -> tuple[torch.optim.Optimizer, bool]:
    """Return the optimizer that the trainer would make, not fused, and whether that one's steps are."""
    if args.optim == muon.NAME:
        return muon.MuonAdamW(*muon.split_parameters(drafter), args.learning_rate), False
    try:
        made, settings = Trainer.get_optimizer_cls_and_kwargs(args)
        is_fused = bool(settings.pop("fused", False))
        return made([p for p in drafter.parameters() if p.requires_grad], **settings), is_fused
    except (ImportError, ValueError, RuntimeError, TypeError) as error:
        raise BadInputError(
            f"training.optim {args.optim}: cannot be planned here: {str(error).splitlines()[0]}"
        ) from error


def workload(recipe: Recipe, rows: int | None = None) -> Workload:
    """Return the lengths of finished responses; else as many sequences as prompts, each as long as it may be."""
    spec = recipe.data
    finished = data_folder(recipe)
    if finished.is_dir() and rows is None:
        return _of_responses(finished, spec.learn_prompts)
    count = rows or _count(spec.prompts, spec.limit)
    longest = spec.max_prompt_tokens + spec.max_new_tokens
    share = (longest - FIRST_LEARNED if spec.learn_prompts else spec.max_new_tokens) / longest
    words = f"at most: {count:,} prompts of {spec.max_prompt_tokens} tokens, answered with {spec.max_new_tokens}"
    return Workload(words, count, count * longest, longest, share, count * spec.max_prompt_tokens)


def _of_responses(folder: Path, learn_prompts: bool) -> Workload:
    masks = load_responses(folder)["loss_mask"]
    lengths, tokens = [len(mask) for mask in masks], sum(map(len, masks))
    learned = sum(max(0, len(m) - FIRST_LEARNED) if learn_prompts else sum(m[FIRST_LEARNED:]) for m in masks)
    prompts, source = tokens - sum(map(sum, masks)), f"the responses in {folder}"
    return Workload(source, len(lengths), tokens, max(lengths), learned / tokens, prompts)


def _count(sources: Sequence[str | SourceSpec], limit: int | None) -> int:
    counts = [count_rows(source) for source in sources]
    known = None if None in counts else sum(count or 0 for count in counts)
    if known is None and limit is None:
        raise BadInputError(
            "how many prompts there are is not known before the data set is read: set data.limit, or say it with "
            "--rows."
        )
    return min(n for n in (known, limit) if n is not None)
