"""What a training will need, before anything is spent: parameters, memory, disk, operations and time.

Bytes are exact where the code decides them (weights, gradients, optimizer states, features) and rehearsed without
contents where a step does (`costs.counting`). Seconds are the work by the share of a device's best that is assumed to
be reached (`costs.machine_speed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from transformers import TrainingArguments

from ..common.atomic import readable_bytes
from ..distill.features import precision_of, stored_taps
from ..heads import Drafter
from ..recipes import Recipe
from ..targets import Target, decoder_layers
from ..targets.config_only import around_layers
from .counting import OptimizerBytes, RehearsedStep, pass_flops, rehearse, rehearse_optimizer, weight_bytes
from .machine_speed import GPUS, Gpu

Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp"]
SPLIT_WEIGHTS = ("zero3", "fsdp")
BUCKET = 500_000_000  # elements of a bucket in DeepSpeed's default config; it keeps two


@dataclass(frozen=True)
class Workload:
    """The sequences to learn from."""

    source: str  # where the numbers come from, in words
    sequences: int
    tokens: int  # of all of them
    longest: int  # tokens of the longest one
    supervised: float  # share of the tokens that are learned
    prompt_tokens: int  # of the tokens, those that are given, not generated

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
    def peak(self) -> int:
        """The most bytes at one time: the target's pass, the drafter's step and the optimizer's follow each other."""
        lasting = self.target_weights + self.drafter_weights + self.optimizer_states + self.buffers
        step = self.features + self.gradients + self.activations
        return lasting + max(self.features + self.target_pass, step, self.gradients + self.optimizer_step)


@dataclass(frozen=True)
class Stage:
    """A part of the work."""

    name: str
    flops: float  # of all processes together
    seconds: dict[str, float]  # on each named GPU, with so many of them


@dataclass(frozen=True)
class Needs:
    """What a training will need: the answer of `plan`."""

    recipe: str
    target: str
    drafter: str
    dtype: str
    precision: str
    processes: int
    sharding: Sharding
    workload: Workload
    target_parameters: int
    total_parameters: int  # of the drafter
    trained_parameters: int  # of those, the ones that a step changes
    steps: int  # of the optimizer
    tokens_per_step: int  # of all processes, at the mean length
    memory: Memory
    feature_bytes: int  # on disk with `data.features: cached`
    uses_features: bool  # whether this recipe asks for them
    checkpoint_bytes: int  # of all checkpoints that are kept, with the final drafter
    stages: list[Stage]
    fits: dict[str, bool]
    notes: list[str] = field(default_factory=list)  # what to know before believing it


def features_bytes(target: Target, taps: Sequence[int], tokens: int, dtype: str = "auto") -> int:
    """Return the bytes of so many tokens' states in a feature store of `data.features_dtype`."""
    vectors = len(stored_taps(taps, target.num_layers)) + 1
    return tokens * precision_of(dtype, target.dtype).bytes_per_token(vectors, target.hidden_size)


@dataclass
class TrainingEstimate:
    """The estimate of one training, whose target and drafter are without contents."""

    recipe: Recipe
    args: TrainingArguments
    target: Target
    drafter: Drafter
    work: Workload
    pack: int  # the tokens of a packed row, assumed to be full; 0 where each row is one text
    # The optimizer of the drafter's trained weights, and whether the real one's steps are fused.
    make_optimizer: Callable[[], tuple[torch.optim.Optimizer, bool]]
    processes: int = 1  # one device each
    sharding: Sharding = "none"  # of the drafter's training

    def needs(self) -> Needs:
        """Return the needs of the training.

        Raises BadInputError if its loss or its optimizer asks for contents, or for a device.
        """
        recipe = self.recipe
        memory = self._memory()
        flops = self._step_flops()
        own = [(p.numel(), p.requires_grad) for p in self.drafter.parameters()]
        weights = sum(4 * count for count, _ in own)
        return Needs(
            recipe=recipe.name,
            target=recipe.target.path,
            drafter=self.drafter.name,
            dtype=self._target_precision,
            precision=self.precision,
            processes=self.processes,
            sharding=self.sharding,
            workload=self.work,
            target_parameters=sum(p.numel() for p in self.target.model.parameters()),
            total_parameters=sum(count for count, _ in own),
            trained_parameters=sum(count for count, is_trained in own if is_trained),
            steps=self.steps,
            tokens_per_step=self._rows * self.args.gradient_accumulation_steps * self.processes * self._mean_length,
            memory=memory,
            feature_bytes=features_bytes(self.target, self.drafter.taps, self.work.tokens, recipe.data.features_dtype),
            uses_features=recipe.data.features == "cached",
            # Each checkpoint holds the drafter and the optimizer's states; the final drafter comes on top.
            checkpoint_bytes=(self.args.save_total_limit or 1) * (weights + self._optimizer.states) + weights,
            stages=self._stages(flops, memory),
            fits={gpu.name: memory.peak <= gpu.usable_bytes for gpu in GPUS},
            notes=self._notes(),
        )

    @property
    def precision(self) -> str:
        """Of the drafter's matrix products."""
        values = self.recipe.training
        return "bfloat16" if values.get("bf16") else "float16" if values.get("fp16") else "float32"

    @property
    def _target_precision(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")

    @property
    def _is_online(self) -> bool:
        return self.recipe.data.features == "online"

    @property
    def _rows(self) -> int:
        """Rows of one batch of one process."""
        return self.args.per_device_train_batch_size

    @property
    def _mean_length(self) -> int:
        return self.pack or self.work.mean_length

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        share = 1 - self.recipe.data.holdout
        rows = math.ceil(self.work.tokens * share / self.pack) if self.pack else round(self.work.sequences * share)
        batches = math.ceil(max(1, rows) / (self._rows * self.processes))
        return math.ceil(
            self.args.num_train_epochs * max(1, math.ceil(batches / self.args.gradient_accumulation_steps))
        )

    def _rehearse(self, length: int) -> RehearsedStep:
        """Return a step on rows of `length` tokens, in the precision of the training."""
        drafter = self.drafter.cast(getattr(torch, self.precision))
        step = rehearse(drafter, self.target, self._rows, length, self.work.supervised)
        self.drafter.cast(torch.float32)
        return step

    @cached_property
    def _optimizer(self) -> OptimizerBytes:
        return rehearse_optimizer(self.drafter, *self.make_optimizer())

    def _memory(self) -> Memory:
        length = max(self.work.longest, self.pack)
        trained = sum(p.numel() * 4 for p in self.drafter.parameters() if p.requires_grad)
        weights = weight_bytes(self.drafter)
        optimizer, step = self._optimizer, self._rehearse(length)
        # Autocast keeps a copy of the weights in its own precision until the step is over; activations are all in it.
        mixed = self.precision != "float32"
        activations = max(0, step.peak - (trained // 2 if mixed else trained)) + (trained // 2 if mixed else 0)
        whole = Memory(
            target_weights=self._target_weights(),
            drafter_weights=weights,
            gradients=trained,
            optimizer_states=optimizer.states,
            buffers=0,
            features=step.features,
            target_pass=self.target.footprint().of_prompt(self._rows, length) if self._is_online else 0,
            activations=activations,
            optimizer_step=optimizer.working,
        )
        return _sharded(whole, self.processes, self.sharding)

    def _target_weights(self) -> int:
        """Return the bytes in one process.

        Of a sharded target: a part of each layer, the rest, and two layers gathered, the one in use and the last one.
        Of one in an engine: what is around its layers.
        """
        if self.recipe.target.engine is not None:
            return sum(parameter.nbytes for parameter in around_layers(self.target.model))
        whole = weight_bytes(self.target.model)
        if self.recipe.target.sharding == "none" or self.processes == 1:
            return whole
        layers = [weight_bytes(layer) for layer in decoder_layers(self.target.body, self.target.num_layers)]
        return whole - sum(layers) + math.ceil(sum(layers) / self.processes) + 2 * max(layers)

    def _step_flops(self) -> tuple[float, float]:
        """Return the operations of one optimizer step, in all processes: the target's passes, and the drafter's."""
        texts = math.ceil(self._rows * self._mean_length / self.work.mean_length)
        batches = self.args.gradient_accumulation_steps * self.processes
        drafted = self._rehearse(self._mean_length).flops
        read = pass_flops(self.target, texts, self.work.mean_length) * batches if self._is_online else 0.0
        return read, float(drafted * batches)

    def _stages(self, flops: tuple[float, float], memory: Memory) -> list[Stage]:
        work = self.work
        target = self.target
        stages = []
        # All processes answer, and compute features; but for a target in parts, whose passes they share.
        at_work = 1 if self.recipe.target.sharding != "none" else self.processes
        if not work.source.startswith("the responses") and self.recipe.data.answers != "given":
            answered = pass_flops(target, 1, 1) * work.tokens + 2 * work.tokens * target.hidden_size * target.vocab_size
            seconds = {gpu.name: self._answering(gpu, answered, at_work) for gpu in GPUS}
            stages.append(Stage("responses", answered, seconds))
        if self.recipe.data.features == "cached":
            states = pass_flops(target, 1, work.mean_length) * work.sequences
            speeds = {gpu.name: gpu.flops_per_second(self._target_precision) for gpu in GPUS}
            stages.append(Stage("features", states, {name: states / at_work / s for name, s in speeds.items()}))
        seconds = {gpu.name: self.steps * self._step_seconds(gpu, flops, memory) for gpu in GPUS}
        return [*stages, Stage("training", sum(flops) * self.steps, seconds)]

    def _answering(self, gpu: Gpu, flops: float, at_work: int) -> float:
        """Return the seconds of the responses: each new token reads all weights once."""
        spec = self.recipe.data
        batches = math.ceil(self.work.sequences / spec.batch_size / at_work)
        reading = batches * spec.max_new_tokens * weight_bytes(self.target.model) / gpu.bytes_per_second
        return max(reading, flops / at_work / gpu.flops_per_second(self._target_precision))

    def _step_seconds(self, gpu: Gpu, flops: tuple[float, float], memory: Memory) -> float:
        """Return the seconds of both kinds of passes, and of the optimizer, which moves its states."""
        target_flops, drafter_flops = (value / self.processes for value in flops)
        # A float32 target in a mixed-precision training runs in bfloat16, see `train.trainer`.
        precision = "bfloat16" if self.precision == "bfloat16" else self._target_precision
        moved = 2 * (memory.drafter_weights + memory.optimizer_states) + 3 * memory.gradients
        return (
            target_flops / gpu.flops_per_second(precision)
            + drafter_flops / gpu.flops_per_second(self.precision)
            + moved / gpu.bytes_per_second
        )

    def _notes(self) -> list[str]:
        whole, several = self.recipe.target.sharding == "none", self.processes > 1
        engine = self.recipe.target.engine
        quantized = getattr(self.target.model.config, "quantization_config", None) or {}
        values = quantized if isinstance(quantized, dict) else vars(quantized)
        notes = (
            (
                self.sharding in SPLIT_WEIGHTS,
                f"{self.sharding} splits the drafter's weights; a checkpoint gathers them, one at a time, and the main "
                "process then holds a whole copy.",
            ),
            (several and whole, "the target is whole in every process; all of them write responses."),
            (
                several and not whole,
                "the target's layers are split over the processes; gathering them, for every token of the "
                "responses, too, takes time that is not counted here.",
            ),
            (self.sharding != "none", "memory under DeepSpeed or FSDP follows their documents and was not measured."),
            (
                values,
                f"the target's config names quantized weights ({values.get('quant_method')}); they are counted as "
                f"{self._target_precision}.",
            ),
            (
                self.recipe.data.on_policy,
                "the text that the drafter writes for itself (data.on_policy) is in neither operations nor time.",
            ),
            (
                engine is not None,
                f"the target's {readable_bytes(weight_bytes(self.target.model))} of weights are in the engine, whose "
                "time for responses and features is that of one such GPU; its states wait in a folder of "
                f"{0 if engine is None else engine.disk_gb:g} GB at most before they are stored.",
            ),
            (
                self.recipe.target.adapter,
                "the adapter is merged into the target's weights and needs no memory of its own.",
            ),
        )
        return [note for applies, note in notes if applies]


def _sharded(whole: Memory, processes: int, sharding: Sharding) -> Memory:
    """Return the memory of one of several processes.

    ZeRO's stage 1 splits states, 2 gradients too, 3 weights too (Rajbhandari et al., arXiv 1910.02054, figure 1).
    """
    if sharding == "none":
        # Data parallelism reduces gradients in buckets, a second copy of them.
        return replace(whole, buffers=whole.gradients if processes > 1 else 0)
    split = ["optimizer_states", "optimizer_step"]
    split += ["gradients"] if sharding != "zero1" else []
    if sharding in SPLIT_WEIGHTS:
        split.append("drafter_weights")
        buffers = whole.drafter_weights  # a drafter is one layer or few: what is gathered for a pass is most of it
    else:
        # DeepSpeed keeps its part of the weights once more in float32, and two buckets for reduction.
        buffers = math.ceil(whole.drafter_weights / processes) + 2 * 4 * min(BUCKET, whole.gradients // 4)
    return replace(whole, buffers=buffers, **{name: math.ceil(getattr(whole, name) / processes) for name in split})
