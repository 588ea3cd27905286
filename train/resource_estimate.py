"""The plan of a training (`costs.training`), made of configs alone: no weights of the target are loaded."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch.overrides import TorchFunctionMode
from transformers import Trainer, TrainingArguments

from ..common import BadInputError, OutriderError
from ..common.errors import LIBRARY_ERRORS, reason
from ..common.machine import best_device, free_bytes
from ..costs.machine_speed import HERE, ROOM, measure_own_pace
from ..costs.training import Needs, Sharding, TrainingEstimate, Workload
from ..distill.data_set import load_responses
from ..distill.dataset_formats import Message
from ..distill.engine_states import plain_words, states_words
from ..distill.features import stored_taps
from ..distill.recipe_prompts import PromptReading, collect
from ..distill.responses import data_folder
from ..distill.sources import as_specs, count_rows, is_hub
from ..heads import Drafter
from ..heads.losses import FIRST_LEARNED
from ..recipes import Recipe, SourceSpec
from ..targets import Target, load_tokenizer
from ..targets.loading import image_reader_of, meta_causal_lm, target_path
from ..targets.model_folder import model_folder
from . import muon
from .arguments import packing_of, training_arguments
from .checkpoints import last_complete, require_own_state, state_of, step_of
from .drafter_init import check_abilities, check_drafter, check_made, make_drafter
from .forecast import Forecast

_SAMPLE = 1000  # prompts whose lengths stand for those of all
_BYTES = 4  # of a token, where no tokenizer tells


class UnknownNeedsError(BadInputError):
    """Needs that configs alone do not tell."""


class UnknownShapesError(UnknownNeedsError):
    """A drafter that is made of its target's weights."""


def plan(
    recipe: Recipe,
    processes: int = 1,
    sharding: Sharding = "none",
    rows: int | None = None,
    measured: bool = False,
    sketch: Target | None = None,
) -> Needs:
    """Return the needs of training this recipe, by configs, and the lengths of finished responses or local prompts.

    Args:
        processes: one device each.
        sharding: of the drafter's training, as the accelerate config says.
        rows: prompts, where neither `data.limit` nor local files tell.
        measured: also load the target, and measure how fast this machine answers and trains.
        sketch: the recipe's target without contents, as an earlier plan used it (`sketch_target`).

    Raises BadInputError for a config that cannot be read, a drafter that cannot be trained, or an unknown number of
    prompts.
    """
    if processes < 1 or sharding not in get_args(Sharding):
        raise BadInputError(
            f"plan: expected at least 1 process and one of {', '.join(get_args(Sharding))}; found {processes} and "
            f"{sharding!r}."
        )
    drafter_class = check_drafter(recipe.drafter)
    check_abilities(recipe, drafter_class, drafter_class)
    args = _arguments(recipe)
    target = sketch or sketch_target(recipe)
    work = workload(recipe, rows)
    drafter = sketch_drafter(recipe, target)
    packing = packing_of(recipe.training)
    pack = 0 if packing is None else packing.max_length or work.longest
    make = partial(_optimizer, drafter, args)
    with _ExpertsOfAnyDtype():
        needs = TrainingEstimate(recipe, args, target, drafter, work, pack, make, processes, sharding).needs()
    if recipe.target.engine is not None:
        folder = recipe.target.engine.folder or str(recipe.output_folder / "engine")
        layers = (*stored_taps(drafter.taps, target.num_layers), target.num_layers)
        words = ["--model", recipe.target.path, *plain_words(recipe, target, work.longest)]
        words += states_words(recipe.target.engine, layers, folder)
        needs = replace(
            needs, notes=[*needs.notes, f"a vLLM that writes this drafter's states is started with {shlex.join(words)}"]
        )
    begun = last_complete(recipe.output_folder / "checkpoints")
    if begun is not None:
        needs = replace(needs, notes=[*needs.notes, *_course(begun)])
    return _here(needs, recipe, measured)


def _course(checkpoint: Path) -> Iterator[str]:
    """Yield a note on how far the training of a checkpoint is, and what its course says of its end."""
    require_own_state(checkpoint)
    foreseen = [found for entry in state_of(checkpoint).log_history if (found := Forecast.read(entry))]
    if foreseen:
        now = f"analytic tau {foreseen[-1].now:.2f} after step {step_of(checkpoint):,}"
        yield f"this training has begun: {now}, {foreseen[-1].text()}"


class _ExpertsOfAnyDtype(TorchFunctionMode):
    """Products of experts without contents: torch knows their shapes for bfloat16 alone, the library for all."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch._grouped_mm and args[0].is_meta and args[0].dtype != torch.bfloat16:
            return torch.ops.transformers.grouped_mm_fallback(args[0], args[1], (kwargs or {})["offs"])
        return function(*args, **(kwargs or {}))


def _here(needs: Needs, recipe: Recipe, measured: bool) -> Needs:
    """Return the needs with this machine beside the named GPUs: whether they fit, and its own measured times."""
    room = free_bytes(best_device())
    needs = replace(needs, fits=needs.fits if room is None else {HERE: needs.memory.peak <= ROOM * room, **needs.fits})
    if not measured:
        return needs
    if needs.processes > 1:
        raise BadInputError("--measure: this machine is measured with one process; leave out --processes.")
    pace, work = measure_own_pace(recipe), needs.workload
    times = {
        "responses": pace.seconds(prefills=work.prompt_tokens, answers=work.tokens - work.prompt_tokens),
        "features": pace.seconds(prefills=work.tokens),
        "training": pace.seconds(steps=needs.steps * int(recipe.training.get("gradient_accumulation_steps", 1))),
    }
    stages = [replace(stage, seconds={HERE: times[stage.name], **stage.seconds}) for stage in needs.stages]
    note = f"this machine was measured, with the target in {pace.dtype}" + (
        " and training in bfloat16." if pace.bf16 else "."
    )
    return replace(needs, stages=stages, notes=[*needs.notes, note])


def sketch_target(recipe: Recipe) -> Target:
    """Return the recipe's target without contents, with its tokenizer if that is there: it decides what fits."""
    spec = recipe.target
    return Target(meta_causal_lm(spec.path, spec.dtype, spec.revision, spec.trust_remote_code), _tokenizer(recipe))


def sketch_drafter(recipe: Recipe, target: Target) -> Drafter:
    """Return the recipe's drafter without contents, in fp32 as it is trained, checked as it will be with them.

    A drafter whose first weights are computed from the target's has the shapes of a random one, where it can be that.
    """
    values = recipe.drafter
    try:
        with torch.device("meta"):
            counts = torch.zeros(target.vocab_size, dtype=torch.long, device="cpu")
            drafter = make_drafter(values, target, lambda: counts).to("meta")
    except OutriderError:
        raise
    except LIBRARY_ERRORS as error:
        if values.get("init") != "random" and "random" in check_drafter(values).config_class.words.get("init", ()):
            return sketch_drafter(recipe.model_copy(update={"drafter": values | {"init": "random"}}), target)
        raise UnknownShapesError(
            f"a {values.get('type')} drafter of these settings cannot be planned from configs alone: {reason(error)}"
        ) from error
    target.check_taps(drafter.taps)
    if target.tokenizer is not None:
        check_made(drafter, target)
    return drafter


def _arguments(recipe: Recipe) -> TrainingArguments:
    """Return the recipe's arguments, on whatever machine the estimate is made."""
    of_devices = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32", "use_cpu", "deepspeed", "torch_compile")
    kept = {name: value for name, value in recipe.training.items() if name not in of_devices}
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
    """Return the lengths of finished responses, else of local prompts with answers as long as allowed, else at most."""
    spec = recipe.data
    finished = data_folder(recipe)
    if finished.is_dir() and rows is None:
        return _of_responses(finished, spec.learn_prompts)
    if rows is None and not any(is_hub(source.path) for source in as_specs(spec.prompts)):
        return _of_prompts(recipe)
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


def _of_prompts(recipe: Recipe) -> Workload:
    """Return the lengths of local prompts, in the target's tokens; of many rows some stand for all.

    Without a tokenizer beside the target's config a token is assumed to have `_BYTES` bytes.
    """
    spec, tokenizer = recipe.data, cast(Any, _tokenizer(recipe) or _BytesOnly())
    how = f"; no tokenizer is there: {_BYTES} bytes are taken for a token" if isinstance(tokenizer, _BytesOnly) else ""
    given = spec.answers == "given"
    place = recipe.target
    images = image_reader_of(place.path, place.revision, place.trust_remote_code, tokenizer)
    reading = PromptReading(
        spec.max_prompt_tokens, recipe.template, True, given, True, True, images=images, sample=spec.sample
    )
    read = collect(spec.prompts, tokenizer, min(_SAMPLE, spec.limit or _SAMPLE), reading)
    questions = [[len(prompt.tokens), *(_length(tokenizer, turn) for turn in prompt.later)] for prompt in read.prompts]
    answers = [
        [min(spec.max_new_tokens, _length(tokenizer, turn)) for turn in prompt.given]
        if given
        else [spec.max_new_tokens] * len(asked)
        for prompt, asked in zip(read.prompts, questions, strict=True)
    ]
    lengths = [sum(asked) + sum(said) for asked, said in zip(questions, answers, strict=True)]
    count = sampled = len(lengths)
    if sampled == _SAMPLE != spec.limit:  # there may be more rows
        share = sampled / sum(source.rows for source in read.sources)
        count = max(sampled, min(round(share * _count(spec.prompts, None)), spec.limit or 2**63))
    scale, prompted = count / sampled, sum(map(sum, questions))
    learned = sum(lengths) - sampled * FIRST_LEARNED if spec.learn_prompts else sum(map(sum, answers))
    longest = (
        max(lengths) if count == sampled and not how else max(spec.max_prompt_tokens + spec.max_new_tokens, *lengths)
    )
    words = (
        f"{count:,} prompts of {min(map(sum, questions)):,} to {max(map(sum, questions)):,} tokens"
        + (f", {sampled:,} of them read" if count > sampled else "")
        + (", with answers of their own" if given else f", answered with {spec.max_new_tokens} at most")
        + how
    )
    return Workload(words, count, round(scale * sum(lengths)), longest, learned / sum(lengths), round(scale * prompted))


def _tokenizer(recipe: Recipe) -> Any:
    """Return the tokenizer beside the target's config; None if there is none, or it needs code of its own."""
    spec = recipe.target
    try:
        return load_tokenizer(model_folder(target_path(spec.path), spec.revision, weights=False))
    except BadInputError:
        return None


def _length(tokenizer: Any, turn: Sequence[Message]) -> int:
    texts = [str(message.get("content") or "") for message in turn]
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


class _BytesOnly:
    """What stands for a target's tokenizer where there is none: as many tokens as a text's bytes make."""

    chat_template, bos_token_id = "plain", None

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, range]:
        return {"input_ids": range(math.ceil(len(text.encode(errors="replace")) / _BYTES))}

    def apply_chat_template(self, messages: Sequence[Message], **_: Any) -> str:
        return "".join(str(message.get("content") or "") for message in messages)


def _count(sources: Sequence[str | SourceSpec], limit: int | None) -> int:
    counts = [count_rows(source) for source in sources]
    known = None if None in counts else sum(count or 0 for count in counts)
    if known is None and limit is None:
        raise UnknownNeedsError(
            "how many prompts there are is not known before the data set is read: set data.limit, or say it with "
            "--rows."
        )
    return min(n for n in (known, limit) if n is not None)
