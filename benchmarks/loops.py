"""Our loop and transformers' own, timed alike: whole requests, and the steady part after the first step.

All are greedy and write exactly as many tokens as they are told, past any end token. A step is a round, or one token
where nothing is drafted. The first of them is left out of the steady part, since there every loop still reads the
prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from outrider.common.machine import clock
from outrider.decode import Decoder, Plan
from outrider.targets import Target
from outrider.targets.split_attention import steady_kernels

Texts = list[list[int]]
Mark = Callable[[int], None]


@dataclass(frozen=True)
class Timed:
    """One batch by one loop.

    Attributes:
        tokens: new tokens of each prompt. seconds: of the whole request.
        steady_seconds, steady_tokens, steady_rounds: of all steps but the first, of all rows together; rounds are
            passes of the batch.
        rounds: all of them, the first included. tau: mean tokens per row and round in the steady part.
        accepted: per row and round, where the loop tells.
    """

    tokens: Texts
    seconds: float
    steady_seconds: float
    steady_tokens: int
    steady_rounds: int
    rounds: int
    tau: float
    accepted: list[list[int]] | None = None


class Loop(Protocol):
    """A loop that takes turns in a cell."""

    name: str

    def release(self) -> None:
        """Free what is kept from call to call."""

    def __call__(self, prompts: Sequence[Sequence[int]], mark: Mark = lambda _: None) -> Timed:
        """Complete `prompts`, telling `mark` the first row's number of new tokens: first when the prompts were read."""


@dataclass
class Ours:
    """The decoder of this package."""

    name: str
    decoder: Decoder
    plan: Plan
    new_tokens: int

    def release(self) -> None:
        self.decoder.static_batches.kept.clear()

    def __call__(self, prompts: Sequence[Sequence[int]], mark: Mark = lambda _: None) -> Timed:
        device = self.decoder.target.device
        watch = _FirstRow(mark)
        began = clock(device)
        out = self.decoder.generate(prompts, self.new_tokens, plan=self.plan, stop=watch, ignore_eos=True)
        ended = clock(device)
        first = sum(1 + rounds[0].emitted for rounds in out.rounds if rounds)
        count = sum(map(len, out.tokens)) - first
        steady = [1 + r.accepted for rounds in out.rounds for r in rounds[1:]]
        return Timed(
            tokens=out.tokens,
            seconds=ended - began,
            steady_seconds=ended - watch.steady,
            steady_tokens=count,
            steady_rounds=max(map(len, out.rounds)) - 1,
            rounds=max(map(len, out.rounds)),
            tau=sum(steady) / max(1, len(steady)),
            accepted=[[r.accepted for r in rounds] for rounds in out.rounds],
        )


class _FirstRow:
    """A stop rule that stops nothing: it sees when the first row's first round has been read back."""

    def __init__(self, mark: Mark):
        self.mark, self.steady = mark, float("nan")
        self.row: list[int] | None = None

    def __call__(self, tokens: list[int]) -> bool:
        if self.row is None:
            self.row = tokens
        if tokens is self.row:
            if len(tokens) == 2:
                self.steady = time.perf_counter()
            self.mark(len(tokens))
        return False


@dataclass
class Theirs:
    """`transformers.generate`, also with an assistant or with prompt lookup: these take one row.

    Attributes:
        assistant: a causal LM that drafts; see `assist`.
        lookup: tokens that prompt lookup proposes.
    """

    name: str
    target: Target
    new_tokens: int
    assistant: Any = None
    lookup: int | None = None

    def release(self) -> None:
        """Nothing is kept."""

    def __call__(self, prompts: Sequence[Sequence[int]], mark: Mark = lambda _: None) -> Timed:
        tokens, mask = _padded(prompts, self.target.device)
        steps = _steps(mark, tokens.shape[1], self.target.device)
        options = {} if self.assistant is None else {"assistant_model": self.assistant}
        passes = self.target.model.register_forward_hook(steps.see)
        with torch.inference_mode(), steady_kernels(), library_attention(self.target), passes:
            began = clock(self.target.device)
            out = self.target.model.generate(  # type: ignore[operator]
                tokens,
                attention_mask=mask,
                generation_config=self._config(),
                stopping_criteria=StoppingCriteriaList([steps]),
                **options,
            )
            ended = clock(self.target.device)
        new = out[:, tokens.shape[1] :].tolist()
        rows, calls = len(new), len(steps.lengths)
        count = tokens.shape[1] + self.new_tokens - steps.lengths[0]
        return Timed(
            tokens=new,
            seconds=ended - began,
            steady_seconds=ended - steps.first,
            steady_tokens=rows * count,
            steady_rounds=calls - 1,
            rounds=calls,
            tau=count / max(1, calls - 1),
        )

    def _config(self) -> Any:
        lookup = {"prompt_lookup_num_tokens": self.lookup} if self.lookup else {}
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=self.new_tokens,
            repetition_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
            **lookup,
        )


@contextmanager
def library_attention(target: Target) -> Iterator[None]:
    """Give a target with attention of ours the library's again inside: that is what users have today."""
    used = getattr(target.config, "_attn_implementation", None)
    if used != "outrider":
        yield
        return
    target.model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        target.model.set_attn_implementation(used)


def _steps(mark: Mark, prompt: int, device: torch.device) -> Any:
    """Return a stopping rule that stops nothing, and notes the time of its first call and the length at each.

    Only calls after a pass of the target count: older transformers (5.17) ask about drafts, too, before verifying.
    """

    class Steps(StoppingCriteria):
        def __init__(self) -> None:
            self.lengths: list[int] = []
            self.first = float("nan")
            self.passed = False

        def see(self, *_: Any) -> None:
            self.passed = True

        def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            if self.passed:
                if not self.lengths:
                    self.first = clock(device)
                self.lengths.append(input_ids.shape[1])
                mark(input_ids.shape[1] - prompt)
            self.passed = False
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    return Steps()


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and mask, `[B, T]` each, padded on the left."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return tokens, mask


def assist(model: Any, depth: int) -> Any:
    """Return `model` as an assistant that drafts a fixed number of tokens: no schedule, no stop at low confidence."""
    config = model.generation_config
    config.num_assistant_tokens = depth
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return model
