"""Rollouts of a policy in training, drafted without changing the run: for TRL's `GRPOTrainer`, and for other loops.

    rollouts = Rollouts(model, tokenizer, Suffix(SuffixConfig(max_tokens=200_000)), max_new_tokens=256)
    GRPOTrainer(model, ..., rollout_func=rollouts.for_trl)

Tokens are drawn by the coupled rule, from noise that belongs to their places: completions do not depend on the drafter,
so rewards, losses and weights are those of a run without one. A `Suffix` with a history copies from earlier epochs'
rollouts, as SpecRL does. Log-probabilities are the policy's own, of a plain pass.

Shapes: B rows, T tokens of the longest row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common import BadInputError
from ..decode import Decoder, Plan, Sampling
from ..heads import Drafter
from ..targets import Target

_FORGET = 0.7  # of a depth's seconds a token, per rollout: a policy that moves is drafted for better or worse
_TRY_AGAIN = 12  # rollouts until a depth that was slower is tried again; doubled each time that it loses
_GAIN = 1.02  # below which a depth is not worth a change


@dataclass
class DepthChoice:
    """The depth that has been the fastest, by the seconds that a token took.

    Attributes:
        depths: what may be drafted; 0 is plain.
        paces: seconds a token by depth, of the latest rollouts.
        waits: rollouts until a slower depth is tried again, and how long it waits after that.
    """

    depths: Sequence[int]
    paces: dict[int, float] = field(default_factory=dict)
    waits: dict[int, list[int]] = field(default_factory=dict)
    current: int = 0

    def next(self) -> int:
        """Return the depth of the next rollout: one that is not known yet, one whose wait is over, or the fastest."""
        for depth in self.depths:
            if depth not in self.paces:
                return depth
        self.current = min(self.paces, key=lambda depth: self.paces[depth] * (1 if depth == self.current else _GAIN))
        for depth in self.depths:
            wait = self.waits.setdefault(depth, [_TRY_AGAIN, _TRY_AGAIN])
            if depth == self.current:
                continue
            wait[0] -= 1
            if wait[0] <= 0:
                wait[1] *= 2
                wait[0] = wait[1]
                return depth
        return self.current

    def observe(self, depth: int, seconds: float, tokens: int) -> None:
        """Take in what a rollout at `depth` took."""
        pace = seconds / max(1, tokens)
        known = self.paces.get(depth, pace)
        self.paces[depth] = _FORGET * known + (1 - _FORGET) * pace


@dataclass(frozen=True)
class Rollout:
    """Completions of one step: their tokens, and the policy's log-probabilities of each if they were asked for."""

    completions: list[list[int]]
    logprobs: list[list[float]] | None
    tau: float
    depth: int


class Rollouts:
    """Completions of a policy whose weights change between calls.

    Args:
        model: the policy itself, with its adapters if it has any; it is not copied.
        drafter: None decodes plainly.
        depths: chains that are tried, and plain decoding (0) beside them; a single one is kept to.
        sampling: temperature and cuts. Its seed, the step and a prompt's place in the step decide each token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int = 256,
        depths: Sequence[int] = (0, 4),
    ):
        unwrapped = getattr(model, "get_base_model", lambda: model)()
        self.target = Target(unwrapped, tokenizer)
        # The library's own pass: others keep copies of weights, which training would leave behind.
        self.decoder = Decoder(self.target, drafter, static=False, fast=False)
        self.sampling = sampling or Sampling(temperature=1.0)
        self.max_new_tokens = max_new_tokens
        self.choice = DepthChoice(depths if drafter is not None else (0,))
        self.history: list[Rollout] = []

    def rollout(self, prompts: Sequence[Sequence[int]], step: int, logprobs: bool = True) -> Rollout:
        """Complete `prompts` (token ids; each as often as it is given) with the policy's present weights."""
        if not prompts:
            raise BadInputError("rollout: there are no prompts.")
        depth = self.choice.next()
        sampling = _seeded(self.sampling, step)
        rule = "auto" if sampling.greedy else "coupled"
        began = time.perf_counter()
        with _evaluating(self.target.model):
            output = self.decoder.generate(prompts, self.max_new_tokens, sampling, Plan(depth, verify=rule))
            self.choice.observe(depth, time.perf_counter() - began, output.stats.num_tokens)
            values = self.log_probabilities(prompts, output.tokens) if logprobs else None
        found = Rollout(output.tokens, values, output.stats.tau, depth)
        self.history.append(found)
        return found

    @torch.no_grad()
    def log_probabilities(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return the policy's log-probability of each completion's tokens, at the temperature of the rollouts."""
        rows = [torch.tensor([*p, *c], device=self.target.device) for p, c in zip(prompts, completions, strict=True)]
        tokens = pad_sequence(rows, batch_first=True)  # [B, T]
        last = self.target.forward(tokens, logits=False).last[:, :-1]
        logits = self.target.lm_head(last).float() / (self.sampling.temperature or 1.0)
        chosen = _chosen(logits, tokens[:, 1:])  # [B, T − 1]
        ends = [len(prompt) - 1 for prompt in prompts]
        return [
            row[end : end + len(completion)].tolist()
            for row, end, completion in zip(chosen, ends, completions, strict=True)
        ]

    def for_trl(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return what TRL's `rollout_func` returns; log-probabilities are left to the trainer's own pass."""
        tokens = [self._tokens(prompt) for prompt in prompts]
        found = self.rollout(tokens, trainer.state.global_step, logprobs=False)
        return {"prompt_ids": tokens, "completion_ids": found.completions, "logprobs": None}

    def _tokens(self, prompt: Any) -> list[int]:
        tokenizer = self.target.require_tokenizer()
        if isinstance(prompt, str):
            return list(tokenizer(prompt)["input_ids"])
        return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))


def _chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def _seeded(sampling: Sampling, step: int) -> Sampling:
    """Return the sampling of a step: other noise than every other step's."""
    return replace(sampling, seed=sampling.seed + (step << 32))


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Leave out dropout inside, and give the mode back after."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
