"""How fast machines are: GPUs by their data sheets, this one by measurement.

What is measured here is the work itself in small: answers of the target in one batch, a step of training, a pass for
one row. Nothing is concluded from a processor's description of itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..decode import Decoder, Plan
from ..distill.prompt_table import Prompt
from ..distill.recipe_prompts import PromptReading, collect
from ..heads import Drafter, TargetBatch, drafter_config
from ..recipes import Recipe
from ..targets import Target
from .round_timing import verify_times
from .timing import least, threads, timed

# Shares of a device's best that are assumed to be reached, and of its memory that can be used.
COMPUTE = 0.4
BANDWIDTH = 0.6
ROOM = 0.9


@dataclass(frozen=True)
class Gpu:
    """A device at its best: dense bfloat16 and float32 (without TF32) in TFLOP/s, memory in GB/s and GB."""

    name: str
    bfloat16: float
    float32: float
    bandwidth: float
    memory: float

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth that is assumed to be reached."""
        return self.bandwidth * 1e9 * BANDWIDTH

    @property
    def usable_bytes(self) -> float:
        """The memory that is assumed to be usable."""
        return ROOM * self.memory * 1e9

    def flops_per_second(self, precision: str) -> float:
        """Return the operations per second that are assumed to be reached in `precision`, a dtype's name."""
        return COMPUTE * 1e12 * (self.float32 if precision == "float32" else self.bfloat16)


# Makers' data sheets, SXM where there is one; figures "with sparsity" halved.
GPUS = (
    Gpu("A100-80G", 312, 19.5, 2039, 80),  # NVIDIA A100 data sheet (2021)
    Gpu("H100", 989, 67, 3350, 80),  # NVIDIA H100 data sheet, SXM5
    Gpu("H200", 989, 67, 4800, 141),  # NVIDIA H200 data sheet
    Gpu("B200", 2250, 75, 7700, 180),  # NVIDIA HGX B200 data sheet, an eighth of the board
    Gpu("L40S", 362, 91.6, 864, 48),  # NVIDIA L40S data sheet
    # NVIDIA Ada GPU architecture white paper, appendix A; bfloat16 with float32 accumulation
    Gpu("RTX 4090", 165, 82.6, 1008, 24),
)


HERE = "this machine"

_REALLY_FASTER = 0.95  # bfloat16 must take less than this part of what float32 takes
_ROUNDS = 6
_WIDTHS = (0, 4)
_REPEATS = 7
_OPTIMIZER = 1.25  # of a step: what the optimizer and the trainer around it add


@dataclass(frozen=True)
class Pace:
    """Seconds that this machine takes, in one precision."""

    dtype: str  # of the target's weights
    bf16: bool  # whether training multiplies in bfloat16
    prefill: float  # of one prompt's token in a large batch
    answer: float  # of one more token of each row of that batch
    step: float  # of training
    token: float  # of a pass of the target for one row

    def seconds(self, prefills: float = 0, answers: float = 0, steps: float = 0, tokens: float = 0) -> float:
        """Return the seconds of so much of each kind of work."""
        return prefills * self.prefill + answers * self.answer + steps * self.step + tokens * self.token

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON holds them."""
        return {k: round(v, 7) if isinstance(v, float) else v for k, v in asdict(self).items()}


def measure_pace(recipe: Recipe) -> Pace:
    """Measure how fast this machine answers, trains and decodes what `recipe` asks for, in float32 and in bfloat16.

    bfloat16 is taken where it is really faster: for training, where a step is; for the target's weights, where a
    step, a pass for one row and a batch of answers all are.
    """
    target = _load_target(recipe, "float32")
    prompts = _prompts(recipe, target)
    full = _measure_pace(recipe, target, prompts, bf16=False)
    step = _step_seconds(recipe, target, prompts, bf16=True)
    if step >= _REALLY_FASTER * full.step:
        return full
    half = _measure_pace(recipe, _load_target(recipe, "bfloat16"), prompts, bf16=True)
    names = ("prefill", "answer", "token", "step")
    better = all(getattr(half, name) < _REALLY_FASTER * getattr(full, name) for name in names)
    return half if better else replace(full, bf16=True, step=step)


def measure_own_pace(recipe: Recipe) -> Pace:
    """Measure how fast this machine answers, trains and decodes what `recipe` asks for, in the recipe's precisions."""
    target = _load_target(recipe, recipe.target.dtype)
    return _measure_pace(recipe, target, _prompts(recipe, target), bool(recipe.training.get("bf16")))


def _prompts(recipe: Recipe, target: Target) -> Sequence[Prompt]:
    """Return a batch of the recipe's prompts."""
    data = recipe.data
    reading = PromptReading(data.max_prompt_tokens, recipe.template, whole=True)
    return collect(data.prompts, target.require_tokenizer(), data.batch_size, reading).prompts


def _load_target(recipe: Recipe, dtype: str) -> Target:
    return Target.load(**recipe.target.to_load() | {"dtype": dtype})


def _measure_pace(recipe: Recipe, target: Target, prompts: Sequence[Prompt], bf16: bool) -> Pace:
    seconds = Decoder(target).generate([p.tokens for p in prompts], _ROUNDS, plan=Plan(0)).stats.seconds
    with threads(recipe.eval.threads):
        passes = verify_times(target, _WIDTHS, context=128, repeats=_REPEATS)
    return Pace(
        dtype=str(target.dtype).removeprefix("torch."),
        bf16=bf16,
        prefill=seconds.prefill / sum(len(p.tokens) for p in prompts),
        answer=(seconds.total - seconds.prefill) / (_ROUNDS - 1) / len(prompts),
        step=_step_seconds(recipe, target, prompts, bf16),
        token=statistics.mean(passes.values()),
    )


def _step_seconds(recipe: Recipe, target: Target, prompts: Sequence[Prompt], bf16: bool) -> float:
    """Return the seconds of a training step, by the median of three on prompts as long as the rows will be."""
    head, config = drafter_config(recipe.drafter)
    counts = torch.ones(target.vocab_size, dtype=torch.long)
    drafter = head.build(config, target, counts).float().to(target.device).train()
    rows = int(recipe.training.get("per_device_train_batch_size", 8))
    length = recipe.data.max_new_tokens + int(statistics.mean(len(p.tokens) for p in prompts))
    length = min(target.max_context or 1024, length)
    tokens = torch.randint(target.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    step = _training_step(target, drafter, tokens.to(target.device), bf16)
    return _OPTIMIZER * statistics.median([timed(step, target.device) for _ in range(4)][1:])


def _training_step(target: Target, drafter: Drafter, tokens: Tensor, bf16: bool) -> Callable[[], None]:
    def work() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
            with torch.no_grad():
                out = target.forward(tokens, taps=drafter.taps, logits=False)
            everything = torch.ones_like(tokens, dtype=torch.bool)
            drafter.loss(TargetBatch(target, tokens, everything, out.hidden, out.last)).mean.backward()
        drafter.zero_grad(set_to_none=True)

    return work


def probe_bytes(device: torch.device) -> int:
    """Return the bytes by which a bandwidth is measured in a part of a second: more than most caches hold."""
    return 2**30 if device.type == "cuda" else 2**28


@cache
def device_bandwidth(device: torch.device, num_threads: int) -> float:
    """Return the bytes per second at which `device` reads `probe_bytes`; measured once in a process."""
    with threads(num_threads):
        return read_bandwidth(torch.ones(probe_bytes(device) // 4, device=device))


def read_bandwidth(source: Tensor, repeats: int = 6) -> float:
    """Return the bytes per second at which a device reads numbers `[n]`, by the best of `repeats`: a ceiling.

    They are read by a sum and by a matrix times a vector; the faster one counts.
    """
    matrix, vector = source[: len(source) // 1024 * 1024].view(-1, 1024), source.new_ones(1024)
    by_sum = source.nbytes / least(source.sum, source.device, repeats)
    return max(by_sum, matrix.nbytes / least(lambda: matrix @ vector, source.device, repeats))
