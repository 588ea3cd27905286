"""How fast this machine is, in a few seconds, and how much of the quickstart's story fits its time on it.

What is measured is the work itself in small: answers of the target in one batch, a step of training, a pass of the
target for one row. Nothing is concluded from what a processor says of itself: bfloat16 is used where it was faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..common.machine import clock
from ..decode import Decoder, Plan
from ..distill.collect import PromptReading, collect
from ..distill.prompts import Prompt
from ..eval.costs import verify_times
from ..eval.turns import threads
from ..heads import Drafter, TargetBatch, drafter_config
from ..recipes import Recipe
from ..targets import Target

_REALLY_FASTER = 0.95  # bfloat16 must take less than this part of what float32 takes
_ROUNDS, _WIDTHS, _REPEATS = 6, (0, 4), 7
_OPTIMIZER = 1.25  # of a step: what the optimizer and the trainer around it add


@dataclass(frozen=True)
class Pace:
    """Seconds that this machine takes, in the precision that is faster on it.

    Attributes:
        dtype: of the target's weights. bf16: whether training multiplies in bfloat16.
        prefill: of one prompt's token in a large batch. answer: of one more token of each row of that batch.
        step: of training. token: of a pass of the target for one row.
    """

    dtype: str
    bf16: bool
    prefill: float
    answer: float
    step: float
    token: float

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON holds them."""
        return {k: round(v, 7) if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class QuickstartWork:
    """How often the story does what a `Pace` tells the seconds of; see `seconds`."""

    prefills: float = 0.0
    answers: float = 0.0
    steps: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: QuickstartWork) -> QuickstartWork:
        return QuickstartWork(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def times(self, count: float) -> QuickstartWork:
        """Return so many times this work."""
        return QuickstartWork(*(count * part for part in asdict(self).values()))

    def seconds(self, pace: Pace) -> float:
        """Return what it takes at this pace."""
        parts = (self.prefills, pace.prefill), (self.answers, pace.answer), (self.steps, pace.step)
        return sum(count * each for count, each in (*parts, (self.tokens, pace.token)))


def measure_pace(recipe: Recipe) -> Pace:
    """Measure how fast this machine answers, trains and decodes what `recipe` asks for, in float32 and in bfloat16.

    bfloat16 is taken where it is really faster: for training, where a step is; for the target's weights, where a
    step, a pass for one row and a batch of answers all are.
    """
    target = _loaded(recipe, "float32")
    prompts = collect(
        recipe.data.prompts,
        target.require_tokenizer(),
        recipe.data.batch_size,
        PromptReading(recipe.data.max_prompt_tokens, recipe.template, whole=True),
    ).prompts
    full = _measured(recipe, target, prompts, bf16=False)
    step = _step_seconds(recipe, target, prompts, bf16=True)
    if step >= _REALLY_FASTER * full.step:
        return full
    mixed = replace(full, bf16=True, step=step)
    half = _measured(recipe, _loaded(recipe, "bfloat16"), prompts, bf16=True)
    better = all(
        getattr(half, name) < _REALLY_FASTER * getattr(full, name) for name in ("prefill", "answer", "token", "step")
    )
    return half if better else mixed


def _loaded(recipe: Recipe, dtype: str) -> Target:
    return Target.load(**recipe.target.model_dump() | {"dtype": dtype})


def _measured(recipe: Recipe, target: Target, prompts: Sequence[Prompt], bf16: bool) -> Pace:
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
    """Return what a step of training takes, by the median of three on prompts as long as the rows will be."""
    head, config = drafter_config(recipe.drafter)
    counts = torch.ones(target.vocab_size, dtype=torch.long)
    drafter = head.build(config, target, counts).float().to(target.device).train()
    rows = int(recipe.training.get("per_device_train_batch_size", 8))
    length = min(
        target.max_context or 1024, recipe.data.max_new_tokens + int(statistics.mean(len(p.tokens) for p in prompts))
    )
    tokens = torch.randint(target.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    step = _step(target, drafter, tokens.to(target.device), bf16)
    return _OPTIMIZER * statistics.median([_timed(step, target) for _ in range(4)][1:])


def _step(target: Target, drafter: Drafter, tokens: torch.Tensor, bf16: bool) -> Callable[[], None]:
    def work() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
            with torch.no_grad():
                out = target.forward(tokens, taps=drafter.taps, logits=False)
            everything = torch.ones_like(tokens, dtype=torch.bool)
            drafter.loss(TargetBatch(target, tokens, everything, out.hidden, out.last)).mean.backward()
        drafter.zero_grad(set_to_none=True)

    return work


def _timed(work: Callable[[], None], target: Target) -> float:
    began = clock(target.device)
    work()
    return clock(target.device) - began
