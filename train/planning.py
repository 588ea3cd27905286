"""What a training will need, before anything is spent: parameters, memory, disk, operations, time, from configs alone.

Bytes are exact where the code decides them (weights, gradients, optimizer states, features) and rehearsed without
contents where a step does (`train.rehearsal`). Seconds are the work divided by what a device could do at best, times a
utilisation that is assumed, not measured.

Shapes: B rows, T tokens, K taps, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import TrainingArguments

from ..common import BadInputError, OutriderError
from ..common.errors import LIBRARY_ERRORS, reason
from ..distill.data_set import load_responses
from ..distill.responses import data_folder
from ..distill.shards import precision_of, stored_taps
from ..distill.sources import count_rows
from ..heads import Drafter
from ..recipes import Recipe, SourceSpec
from ..targets import Target, decoder_layers, embedded_path
from ..targets.loading import EMBEDDED
from ..targets.meta_model import sketch_causal_lm
from .arguments import packing_of, training_arguments
from .data import FIRST_LEARNED
from .rehearsal import rehearse, rehearse_optimizer
from .warmstart import check_drafter, make_drafter

Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp"]
SPLIT_WEIGHTS = ("zero3", "fsdp")
# Shares of a device's best that are assumed to be reached, and of its memory that can be used.
COMPUTE, BANDWIDTH, ROOM = 0.4, 0.6, 0.9
BUCKET = 500_000_000  # elements of a bucket in DeepSpeed's default config; it keeps two


@dataclass(frozen=True)
class Gpu:
    """A device at its best: dense bfloat16 and float32 (without TF32) in TFLOP/s, memory in GB/s and GB."""

    name: str
    bfloat16: float
    float32: float
    bandwidth: float
    memory: float


# Makers' data sheets, SXM where there is one; figures "with sparsity" halved.
GPUS = (
    Gpu("A100-80G", 312, 19.5, 2039, 80),  # NVIDIA A100 data sheet (2021)
    Gpu("H100", 989, 67, 3350, 80),  # NVIDIA H100 data sheet, SXM5
    Gpu("H200", 989, 67, 4800, 141),  # NVIDIA H200 data sheet
    Gpu("B200", 2250, 75, 7700, 180),  # NVIDIA HGX B200 data sheet, an eighth of the board
    Gpu("L40S", 362, 91.6, 864, 48),  # NVIDIA L40S data sheet
    Gpu(
        "RTX 4090", 165, 82.6, 1008, 24
    ),  # NVIDIA Ada GPU architecture white paper, appendix A; bfloat16 with float32 accumulation
)


@dataclass(frozen=True)
class Workload:
    """The sequences to learn from.

    Attributes:
        source: where the numbers come from, in words.
        tokens: of all of them. longest: of the longest one. supervised: share of the tokens that are learned.
        prompt_tokens: of the tokens, those that are given, not generated.
    """

    source: str
    sequences: int
    tokens: int
    longest: int
    supervised: float
    prompt_tokens: int

    @property
    def mean_length(self) -> int:
        return math.ceil(self.tokens / self.sequences)


@dataclass(frozen=True)
class Memory:
    """Bytes of one process on its device, by what they hold; `peak` is the most that is held at one time."""

    target_weights: int
    drafter_weights: int
    gradients: int
    optimizer_states: int
    buffers: int
    features: int
    target_pass: int
    activations: int
    optimizer_step: int

    @property
    def lasting(self) -> int:
        return self.target_weights + self.drafter_weights + self.optimizer_states + self.buffers

    @property
    def peak(self) -> int:
        """The most bytes at one time: the target's pass, the drafter's step and the optimizer's follow each other."""
        step = self.features + self.gradients + self.activations
        return self.lasting + max(self.features + self.target_pass, step, self.gradients + self.optimizer_step)


@dataclass(frozen=True)
class Stage:
    """A part of the work.

    Attributes:
        flops: of all processes together. seconds: on each named GPU, with so many of them.
    """

    name: str
    flops: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class Needs:
    """What a training will need: the answer of `plan`.

    Attributes:
        target_parameters, total_parameters, trained_parameters: of the target, of the drafter, and of those that a step
            changes.
        steps: optimizer steps. tokens_per_step: of all processes, at the mean length.
        feature_bytes: on disk with `data.features: cached`; uses_features: whether this recipe asks for them.
        checkpoint_bytes: of all checkpoints that are kept, with the final drafter.
        notes: what to know before believing it.
    """

    recipe: str
    target: str
    drafter: str
    dtype: str
    precision: str
    processes: int
    sharding: Sharding
    workload: Workload
    target_parameters: int
    total_parameters: int
    trained_parameters: int
    steps: int
    tokens_per_step: int
    memory: Memory
    feature_bytes: int
    uses_features: bool
    checkpoint_bytes: int
    stages: list[Stage]
    fits: dict[str, bool]
    notes: list[str] = field(default_factory=list)


def plan(recipe: Recipe, processes: int = 1, sharding: Sharding = "none", rows: int | None = None) -> Needs:
    """Return what training this recipe will need.

    Configs are read, and the lengths of finished responses if there are some; no weights of the target are loaded.

    Args:
        processes: one device each.
        sharding: of the drafter's training, as the accelerate config says.
        rows: prompts, where neither `data.limit` nor local files tell.

    Raises:
        BadInputError: a config that cannot be read, a drafter that cannot be trained, or a number of prompts that
            nobody tells.
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
    return _Planning(recipe, args, target, drafter, work, processes, sharding).plan()


def sketch_target(recipe: Recipe) -> Target:
    """Return the recipe's target without contents."""
    spec = recipe.target
    path = str(embedded_path()) if spec.path == EMBEDDED else spec.path
    return Target(sketch_causal_lm(path, spec.dtype, spec.revision, spec.trust_remote_code))


def sketch_drafter(recipe: Recipe, target: Target) -> Drafter:
    """Return the recipe's drafter without contents, in fp32 as it is trained.

    A drafter whose first weights are computed from the target's has the shapes of a random one, where it can be that,
    too.
    """
    values = recipe.drafter
    try:
        return _sketch(values, target)
    except OutriderError:
        raise
    except LIBRARY_ERRORS as error:
        if values.get("init") != "random" and "random" in check_drafter(values).config_class.init_words:
            return sketch_drafter(
                recipe.model_copy(
                    update={"drafter": {k: v for k, v in values.items() if k != "prune"} | {"init": "random"}}
                ),
                target,
            )
        raise BadInputError(
            f"a {values.get('type')} drafter of these settings cannot be planned from configs alone: {reason(error)}"
        ) from error


def _sketch(values: dict[str, Any], target: Target) -> Drafter:
    with torch.device("meta"):
        return make_drafter(values, target, lambda: torch.zeros(target.vocab_size, dtype=torch.long, device="cpu")).to(
            "meta"
        )


def _arguments(recipe: Recipe) -> TrainingArguments:
    """Return the recipe's arguments, on whatever machine the estimate is made."""
    devices = (
        "bf16",
        "fp16",
        "tf32",
        "use_cpu",
        "deepspeed",
        "torch_compile",
        "report_to",
        "bf16_full_eval",
        "fp16_full_eval",
    )
    kept = {name: value for name, value in recipe.training.items() if name not in devices}
    return training_arguments(recipe.model_copy(update={"training": kept | {"use_cpu": True}}))


# ------------------------------------------------------------ sequences


def workload(recipe: Recipe, rows: int | None = None) -> Workload:
    """Return the lengths of finished responses; else as many sequences as prompts, each as long as it may be."""
    spec = recipe.data
    finished = data_folder(recipe)
    if finished.is_dir() and rows is None:
        return _of_responses(finished, spec.learn_prompts)
    found = rows or _count(spec.prompts, spec.limit)
    longest = spec.max_prompt_tokens + spec.max_new_tokens
    share = (longest - FIRST_LEARNED if spec.learn_prompts else spec.max_new_tokens) / longest
    words = f"at most: {found:,} prompts of {spec.max_prompt_tokens} tokens, answered with {spec.max_new_tokens}"
    return Workload(words, found, found * longest, longest, share, found * spec.max_prompt_tokens)


def _of_responses(folder: Path, learn_prompts: bool) -> Workload:
    masks = load_responses(folder)["loss_mask"]
    lengths = [len(mask) for mask in masks]
    responses = sum(map(sum, masks))
    learned = (
        sum(max(0, n - FIRST_LEARNED) for n in lengths)
        if learn_prompts
        else sum(sum(mask[FIRST_LEARNED:]) for mask in masks)
    )
    return Workload(
        f"the responses in {folder}",
        len(lengths),
        sum(lengths),
        max(lengths),
        learned / sum(lengths),
        sum(lengths) - responses,
    )


def _count(sources: Sequence[str | SourceSpec], limit: int | None) -> int:
    counts = [count_rows(source) for source in sources]
    known = None if None in counts else sum(count or 0 for count in counts)
    if known is None and limit is None:
        raise BadInputError(
            "how many prompts there are is not known before the data set is read: set data.limit, or say it with "
            "--rows."
        )
    return min(n for n in (known, limit) if n is not None)


# ------------------------------------------------------------ the arithmetic


def active_weights(model: Any, config: Any) -> int:
    """Return the weights that one token is multiplied with: no embeddings, and the experts that it chooses."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    embeddings |= {id(p) for p in output.parameters()} if output is not None else set()
    experts = next(
        (n for name in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(config, name, None))),
        1,
    )
    share = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and id(parameter) not in embeddings:
            total += parameter.numel() * (share if ".experts." in name else 1)
    return round(total)


def pass_flops(target: Target, rows: int, length: int) -> float:
    """Return the operations of a pass of the target's layers over whole rows, the masked half of attention included."""
    config, kinds = target.config, getattr(target.config, "layer_types", None) or ["full_attention"] * target.num_layers
    heads = int(getattr(config, "num_attention_heads", 0))
    size = int(getattr(config, "head_dim", None) or target.hidden_size // max(heads, 1))
    attending = sum(kind in ("full_attention", "sliding_attention") for kind in kinds)
    return rows * length * (2 * active_weights(target.model, config) + attending * 4 * length * heads * size)


def features_bytes(target: Target, taps: Sequence[int], tokens: int, dtype: str = "auto") -> int:
    """Return the bytes of so many tokens' states in a feature store of `data.features_dtype`."""
    vectors = len(stored_taps(taps, target.num_layers)) + 1
    return tokens * precision_of(dtype, target.dtype).bytes_per_token(vectors, target.hidden_size)


def weight_bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


@dataclass
class _Planning:
    recipe: Recipe
    args: TrainingArguments
    target: Target
    drafter: Drafter
    work: Workload
    processes: int
    sharding: Sharding

    def plan(self) -> Needs:
        recipe, work = self.recipe, self.work
        trained = sum(p.numel() for p in self.drafter.parameters() if p.requires_grad)
        memory, flops = self._memory(), self._step_flops()
        stages = self._stages(flops, memory)
        return Needs(
            recipe.name,
            recipe.target.path,
            self.drafter.name,
            self._name(self.target.dtype),
            self.precision,
            self.processes,
            self.sharding,
            work,
            sum(p.numel() for p in self.target.model.parameters()),
            sum(p.numel() for p in self.drafter.parameters()),
            trained,
            self.steps,
            self._rows_per_step * self._mean_length,
            memory,
            features_bytes(self.target, self.drafter.taps, work.tokens, recipe.data.features_dtype),
            recipe.data.features == "cached",
            self._checkpoints(memory),
            stages,
            {gpu.name: memory.peak <= ROOM * gpu.memory * 1e9 for gpu in GPUS},
            self._notes(),
        )

    @staticmethod
    def _name(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    @property
    def precision(self) -> str:
        """Of the drafter's matrix products."""
        values = self.recipe.training
        return "bfloat16" if values.get("bf16") else "float16" if values.get("fp16") else "float32"

    @property
    def _dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.precision, torch.float32)

    # ------------------------------------------------------------ steps

    @property
    def _rows(self) -> int:
        """How many rows there are to learn from; packed ones are assumed to be full."""
        share = 1 - self.recipe.data.holdout
        if self._pack:
            return max(1, math.ceil(self.work.tokens * share / self._pack))
        return max(1, round(self.work.sequences * share))

    @property
    def _pack(self) -> int:
        """The tokens of a packed row; 0 where each row is one text."""
        packing = packing_of(self.recipe.training)
        return 0 if packing is None else packing.max_length or self.work.longest

    @property
    def _mean_length(self) -> int:
        return self._pack or self.work.mean_length

    @property
    def _rows_per_step(self) -> int:
        return self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.processes

    @property
    def steps(self) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        batches = math.ceil(self._rows / (self.args.per_device_train_batch_size * self.processes))
        return math.ceil(
            self.args.num_train_epochs * max(1, math.ceil(batches / self.args.gradient_accumulation_steps))
        )

    # ------------------------------------------------------------ memory

    def _memory(self) -> Memory:
        rows, length = self.args.per_device_train_batch_size, max(self.work.longest, self._pack)
        trained = sum(p.numel() * 4 for p in self.drafter.parameters() if p.requires_grad)
        weights = weight_bytes(self.drafter)
        # Autocast keeps a copy of the weights in its own precision until the step is over; activations are all in it.
        mixed = self.precision != "float32"
        optimizer = rehearse_optimizer(self.drafter, self.args)
        step = rehearse(self.drafter.cast(self._dtype), self.target, rows, length, self.work.supervised)
        self.drafter.cast(torch.float32)
        own_gradients = trained // 2 if mixed else trained
        activations = max(0, step.peak - own_gradients) + (trained // 2 if mixed else 0)
        online = self.recipe.data.features == "online"
        whole = Memory(
            self._target_weights(),
            weights,
            trained,
            optimizer.states,
            0,
            step.features,
            self.target.footprint().of_prompt(rows, length) if online else 0,
            activations,
            optimizer.working,
        )
        return _sharded(whole, self.processes, self.sharding)

    def _target_weights(self) -> int:
        """Return the bytes in one process.

        Of a sharded target that is a part of each layer, the rest, and two layers gathered: the one in use, and on a
        device the last one's.
        """
        whole = weight_bytes(self.target.model)
        if self.recipe.target.sharding == "none" or self.processes == 1:
            return whole
        layers = [weight_bytes(layer) for layer in decoder_layers(self.target.body, self.target.num_layers)]
        return whole - sum(layers) + math.ceil(sum(layers) / self.processes) + 2 * max(layers)

    def _checkpoints(self, memory: Memory) -> int:
        """Return the bytes of all checkpoints, each with drafter and optimizer's states, and of the final drafter."""
        weights = sum(p.numel() * 4 for p in self.drafter.parameters())
        states = rehearse_optimizer(self.drafter, self.args).states
        return (self.args.save_total_limit or 1) * (weights + states) + weights

    # ------------------------------------------------------------ operations and time

    def _step_flops(self) -> tuple[float, float]:
        """Return the operations of one optimizer step, in all processes: the target's passes, and the drafter's."""
        rows, length = self.args.per_device_train_batch_size, self._mean_length
        texts = math.ceil(rows * length / self.work.mean_length)
        batches = self.args.gradient_accumulation_steps * self.processes
        online = self.recipe.data.features == "online"
        # In its own precision: without contents torch multiplies by groups of experts in bfloat16 only.
        drafted = rehearse(self.drafter.cast(self._dtype), self.target, rows, length, self.work.supervised).flops
        self.drafter.cast(torch.float32)
        read = pass_flops(self.target, texts, self.work.mean_length) * batches if online else 0.0
        return read, float(drafted * batches)

    def _stages(self, flops: tuple[float, float], memory: Memory) -> list[Stage]:
        work, found = self.work, []
        if not work.source.startswith("the responses"):
            answered = (
                pass_flops(self.target, 1, 1) * work.tokens
                + 2 * work.tokens * self.target.hidden_size * self.target.vocab_size
            )
            found.append(Stage("responses", answered, {gpu.name: self._answering(gpu, answered) for gpu in GPUS}))
        if self.recipe.data.features == "cached":
            states = pass_flops(self.target, 1, work.mean_length) * work.sequences
            share, dtype = states / self._at_work, self._name(self.target.dtype)
            found.append(Stage("features", states, {gpu.name: share / self._speed(gpu, dtype) for gpu in GPUS}))
        total = sum(flops) * self.steps
        return [
            *found,
            Stage("training", total, {gpu.name: self.steps * self._step_seconds(gpu, flops, memory) for gpu in GPUS}),
        ]

    @property
    def _at_work(self) -> int:
        """How many processes answer, and compute features: all, but for a target in parts, whose passes they share."""
        return 1 if self.recipe.target.sharding != "none" else self.processes

    def _answering(self, gpu: Gpu, flops: float) -> float:
        """Return the seconds of the responses: each new token reads all weights once."""
        at_work = self._at_work
        batches = math.ceil(self.work.sequences / self.recipe.data.batch_size / at_work)
        reading = (
            batches
            * self.recipe.data.max_new_tokens
            * weight_bytes(self.target.model)
            / (gpu.bandwidth * 1e9 * BANDWIDTH)
        )
        return max(reading, flops / at_work / self._speed(gpu, self._name(self.target.dtype)))

    def _step_seconds(self, gpu: Gpu, flops: tuple[float, float], memory: Memory) -> float:
        """Return the seconds of both kinds of passes, and of the optimizer, which moves its states."""
        target_flops, drafter_flops = (value / self.processes for value in flops)
        # A float32 target in a mixed-precision training runs in bfloat16, see `train.run`.
        precision = "bfloat16" if self.precision == "bfloat16" else self._name(self.target.dtype)
        moved = 2 * (memory.drafter_weights + memory.optimizer_states) + 3 * memory.gradients
        return (
            target_flops / self._speed(gpu, precision)
            + drafter_flops / self._speed(gpu, self.precision)
            + moved / (gpu.bandwidth * 1e9 * BANDWIDTH)
        )

    @staticmethod
    def _speed(gpu: Gpu, precision: str) -> float:
        """Return the FLOP/s that are assumed to be reached."""
        return COMPUTE * 1e12 * (gpu.float32 if precision == "float32" else gpu.bfloat16)

    # ------------------------------------------------------------ words

    def _notes(self) -> list[str]:
        notes = []
        if self.sharding in SPLIT_WEIGHTS:
            notes.append(
                f"{self.sharding} splits the drafter's weights; a checkpoint gathers them, one at a time, and the main "
                "process then holds a whole copy."
            )
        if self.processes > 1:
            if self.recipe.target.sharding == "none":
                notes.append("the target is whole in every process; all of them write responses.")
            else:
                notes.append(
                    "the target's layers are split over the processes; gathering them, for every token of the "
                    "responses, too, takes time that is not counted here."
                )
        if self.sharding != "none":
            notes.append("memory under DeepSpeed or FSDP follows their documents and was not measured.")
        quantized = getattr(self.target.model.config, "quantization_config", None)
        if quantized:
            method = (
                quantized.get("quant_method")
                if isinstance(quantized, dict)
                else getattr(quantized, "quant_method", quantized)
            )
            notes.append(
                f"the target's config names quantized weights ({method}); they are counted as "
                f"{self._name(self.target.dtype)}."
            )
        if self.recipe.data.on_policy:
            notes.append(
                "the text that the drafter writes for itself (data.on_policy) is in neither operations nor time."
            )
        if self.recipe.joint is not None:
            notes.append(
                "joint training's adapter, its second pass of the target and the pass back through it are in neither "
                "memory, operations nor time."
            )
        if self.recipe.target.adapter:
            notes.append("the adapter is merged into the target's weights and needs no memory of its own.")
        return notes


def _sharded(whole: Memory, processes: int, sharding: Sharding) -> Memory:
    """Return what one of several processes holds.

    ZeRO's stage 1 splits states, 2 gradients too, 3 weights too (Rajbhandari et al., arXiv 1910.02054, figure 1).
    """
    if sharding == "none":
        # Data parallelism reduces gradients in buckets, a second copy of them.
        return replace(whole, buffers=whole.gradients if processes > 1 else 0)
    part = {
        name: math.ceil(getattr(whole, name) / processes)
        for name in ("drafter_weights", "gradients", "optimizer_states", "optimizer_step")
    }
    split = (
        {"optimizer_states", "optimizer_step"}
        | ({"gradients"} if sharding != "zero1" else set())
        | ({"drafter_weights"} if sharding in SPLIT_WEIGHTS else set())
    )
    if sharding in SPLIT_WEIGHTS:
        buffers = whole.drafter_weights  # a drafter is one layer or few: what is gathered for a pass is most of it
    else:
        # DeepSpeed keeps its part of the weights once more in float32, and two buckets for reduction.
        buffers = part["drafter_weights"] + 2 * 4 * min(BUCKET, whole.gradients // 4)
    return replace(whole, buffers=buffers, **{name: value for name, value in part.items() if name in split})
