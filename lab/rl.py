"""Rollouts of a policy in training, drafted without changing the run: for TRL's `GRPOTrainer`, and for other loops.

    rollouts = PolicyRollouts(model, tokenizer, Suffix(SuffixConfig(max_tokens=200_000)), max_new_tokens=256)
    GRPOTrainer(model, ..., rollout_func=rollouts.for_trl)

Tokens are drawn by the coupled rule, from noise that belongs to their places: completions do not depend on the drafter,
so rewards, losses and weights are those of a run without one. A `Suffix` with a history copies from earlier epochs'
rollouts, as SpecRL does. Log-probabilities are the policy's own, of a plain pass. With a `RefreshRule` a drafter that
is trained learns from the latest rollouts, as often as that pays.

Shapes: B rows, T tokens of the longest row.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import mean
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common import BadInputError
from ..common.machine import clock
from ..decode import Decoder, Plan, Sampling
from ..heads import Drafter
from ..heads.lookup.fusion import TwoDrafters
from ..targets import Target
from ..targets.layers import evaluating
from ..train.data import IGNORED, OnlineBatches, collate
from ..train.muon import MuonAdamW, split_parameters

_FORGET = 0.7  # of a depth's seconds a token, per rollout: a policy that moves is drafted for better or worse
_TRY_AGAIN = 12  # rollouts until a depth that was slower is tried again; doubled each time that it loses
_STEPS_APART = 2**32  # of a step's seed and the next one's
_ROWS = 2**32  # of a part of a step, at most: each has numbers of its own
_KEPT = 64  # rollouts that are remembered
_GAIN = 1.02  # below which a depth is not worth a change
_FRESH = 2  # rollouts after a refresh, which show how well a fresh drafter drafts
_LESSONS = 4  # rollouts that a refresh learns from, the latest ones
_UPDATES = 12  # of the drafter's weights in a refresh


@dataclass
class DepthChoice:
    """The depth that has been the fastest, by the seconds that a token took.

    Attributes:
        depths: what may be drafted; 0 is plain.
        paces: seconds a token by depth, of the latest rollouts.
        waits: rollouts until a slower depth is tried again.
    """

    depths: Sequence[int]
    paces: dict[int, float] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)
    due: dict[int, int] = field(default_factory=dict)  # of each depth, the rollout in which it is tried again
    warm: set[int] = field(default_factory=set)  # depths that have run once, which loads and allocates
    current: int = 0
    rollouts: int = 0

    def next(self) -> int:
        """Return the depth of the next rollout: one that is not known yet, one whose wait is over, or the fastest."""
        self.rollouts += 1
        for depth in self.depths:
            if depth not in self.paces:
                return depth
        self.current = min(self.paces, key=lambda depth: self.paces[depth] * (1 if depth == self.current else _GAIN))
        waiting = (depth for depth in self.depths if depth != self.current)
        return next((depth for depth in waiting if self.rollouts >= self.due[depth]), self.current)

    def observe(self, depth: int, seconds: float, tokens: int) -> None:
        """Take in what a rollout at `depth` took; the first one of each depth is not counted."""
        if depth not in self.warm:
            self.warm.add(depth)
            return
        pace = seconds / max(1, tokens)
        if depth == self.current and depth in self.paces:
            pace = _FORGET * self.paces[depth] + (1 - _FORGET) * pace
        self.paces[depth] = pace
        loses = pace > self.paces.get(self.current, pace)
        self.waits[depth] = 2 * self.waits.get(depth, _TRY_AGAIN) if loses else _TRY_AGAIN
        self.due[depth] = self.rollouts + self.waits[depth]

    def try_again(self) -> None:
        """Let every depth be tried soon: the drafter has changed."""
        self.waits.clear()
        self.due = dict.fromkeys(self.due, self.rollouts)


@dataclass
class RefreshRule:
    """The rule for when a refresh pays: once what was lost since the last one reaches what a refresh costs.

    A drafter loses more time the further the policy moves. Where that grows in proportion to the steps, this interval
    makes losses and refreshes together the least; however it grows, they are at most twice the least (it is the
    ski-rental rule). In the last steps a refresh must still save its cost.

    Attributes:
        steps: of the whole run; None if unknown.
        cost: seconds of a refresh; None before the first estimate.
        fresh: rounds a token of the first rollouts after a refresh, by depth.
        excess: share of a rollout's seconds that are lost. lost: seconds lost since the refresh.
    """

    steps: int | None = None
    cost: float | None = None
    fresh: dict[int, list[float]] = field(default_factory=dict)
    excess: float = 0.0
    lost: float = 0.0
    seconds: float = 0.0  # of the latest rollout

    def observe(self, tau: float, depth: int, seconds: float) -> None:
        """Take in a rollout; one without drafts tells nothing about them, and loses as much as the one before."""
        self.seconds = seconds
        fresh = self.fresh.setdefault(depth, [])
        if depth and len(fresh) < _FRESH:
            fresh.append(1 / tau)
            return
        if depth:
            self.excess = _FORGET * self.excess + (1 - _FORGET) * (1 - mean(fresh) * tau)
        self.lost += self.excess * seconds

    def is_due(self, step: int) -> bool:
        """Return whether the drafter should be refreshed before the rollout of `step`."""
        left = math.inf if self.steps is None else self.steps - step
        return self.cost is not None and self.cost <= min(self.lost, self.excess * self.seconds * left)

    def refreshed(self, seconds: float) -> None:
        """Begin anew after a refresh that took so many seconds."""
        self.cost, self.fresh = seconds, {}
        self.excess, self.lost = 0.0, 0.0


class Learner:
    """What trains a drafter on rollouts, with the hidden states of the policy's own pass; the policy stays as it is.

    Args:
        drafter: one that is trained, alone or beside one without weights.
        rate: of learning.

    Raises:
        BadInputError: the drafter has no weights.
    """

    def __init__(self, drafter: Drafter | None, target: Target, rate: float = 1e-3):
        model = drafter.model if isinstance(drafter, TwoDrafters) else drafter
        if model is None or not model.trainable:
            raise BadInputError("a refresh trains a drafter's weights, and this one has none; leave the rule out.")
        self.drafter: Drafter = model
        self.batches = OnlineBatches(target, model.taps)
        self.optimizer = MuonAdamW(*split_parameters(model), lr=rate)
        self.lessons = deque[dict[str, torch.Tensor]](maxlen=_LESSONS)

    def add(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
        """Keep a rollout to learn from."""
        both = zip(prompts, completions, strict=True)
        rows = [{"index": 0, "input_ids": [*p, *c], "labels": [IGNORED] * len(p) + [*c]} for p, c in both]
        device = self.batches.target.device
        self.lessons.append({name: tensor.to(device) for name, tensor in collate(rows).items()})

    def refresh(self, updates: int = _UPDATES) -> float:
        """Update the drafter so often, a rollout at a time, and return the seconds that it took."""
        target = self.batches.target
        began = clock(target.device)
        # The trainer draws from torch's generators, too: it must find them as they would be without drafts.
        with torch.enable_grad(), evaluating(target.model), _frozen(target.model), torch.random.fork_rng():
            self.drafter.train()
            states = [self.batches.of(lesson) for lesson in list(self.lessons)[-updates:]]
            for batch in islice(cycle(states), updates):
                self.optimizer.zero_grad()
                self.drafter.loss(batch).mean.backward()
                self.optimizer.step()
            self.drafter.eval()
        return clock(target.device) - began


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """Keep gradients away from a model inside: drafters read its embeddings."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@dataclass(frozen=True)
class Rollout:
    """Completions of one step: their tokens, and the policy's log-probabilities of each if they were asked for.

    Attributes:
        seconds: of decoding. refresh_seconds: of what the drafter learned before.
    """

    completions: list[list[int]]
    logprobs: list[list[float]] | None
    tau: float
    depth: int
    seconds: float = 0.0
    refresh_seconds: float = 0.0


class PolicyRollouts:
    """Completions of a policy whose weights change between calls.

    Args:
        model: the policy itself, with its adapters if it has any; it is not copied.
        drafter: None decodes plainly.
        depths: chains that are tried, and plain decoding (0) beside them; a single one is kept to.
        sampling: temperature and cuts. Its seed, the step and a prompt's place in the step decide each token.
        refreshing: says when the drafter learns from the rollouts; None leaves it as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int = 256,
        depths: Sequence[int] = (0, 4),
        refreshing: RefreshRule | None = None,
    ):
        unwrapped = getattr(model, "get_base_model", lambda: model)()
        self.target = Target(unwrapped, tokenizer)
        # The library's own pass: others keep copies of weights, which training would leave behind.
        self.decoder = Decoder(self.target, drafter, static=False, fast=False)
        self.sampling = sampling or Sampling(temperature=1.0)
        self.max_new_tokens = max_new_tokens
        self.choice = DepthChoice(depths if drafter is not None else (0,))
        self.refreshing = refreshing
        self.learner = None if refreshing is None else Learner(drafter, self.target)
        self.history: deque[Rollout] = deque(maxlen=_KEPT)
        self._last = (-1, 0)  # the trainer's latest step, and how often it asked in it

    def rollout(self, prompts: Sequence[Sequence[int]], step: int, logprobs: bool = True, part: int = 0) -> Rollout:
        """Return completions of `prompts` (token ids; each as often as it is given) by the policy's present weights.

        Args:
            part: of the step: a number of its own for each process, and each call, that completes others.
        """
        if not prompts:
            raise BadInputError("rollout: there are no prompts.")
        refresh_seconds = self._refresh(step)
        depth = self.choice.next()
        sampling = replace(self.sampling, seed=self.sampling.seed + step * _STEPS_APART)
        rule = "auto" if sampling.greedy else "coupled"
        began = time.perf_counter()
        with evaluating(self.target.model):
            ids = [part * _ROWS + row for row in range(len(prompts))]
            plan = Plan(depth, verify=rule)
            output = self.decoder.generate(prompts, self.max_new_tokens, sampling, plan, sequence_ids=ids)
            seconds = time.perf_counter() - began
            values = self.log_probabilities(prompts, output.tokens) if logprobs else None
        self.choice.observe(depth, seconds, output.stats.num_tokens)
        if self.learner is not None and self.refreshing is not None:
            self.refreshing.observe(output.stats.tau, depth, seconds)
            self.learner.add(prompts, output.tokens)
        found = Rollout(output.tokens, values, output.stats.tau, depth, seconds, refresh_seconds)
        self.history.append(found)
        return found

    def _refresh(self, step: int) -> float:
        """Refresh the drafter if that pays by now, and return the seconds that it took."""
        rule, seconds = self.refreshing, 0.0
        if rule is None or self.learner is None:
            return seconds
        if rule.cost is None and rule.lost > 0:
            seconds = self.learner.refresh(updates=1)  # a first look at what a refresh costs
            rule.cost = _UPDATES * seconds
        if rule.is_due(step):
            spent = self.learner.refresh()
            rule.refreshed(spent)
            self.choice.try_again()
            seconds += spent
        return seconds

    @torch.no_grad()
    def log_probabilities(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return the policy's log-probability of each completion's tokens, at the temperature of the rollouts."""
        rows = [torch.tensor([*p, *c], device=self.target.device) for p, c in zip(prompts, completions, strict=True)]
        tokens = pad_sequence(rows, batch_first=True)  # [B, T]
        last = self.target.forward(tokens, logits=False).last[:, :-1]
        logits = self.target.lm_head(last).float() / (self.sampling.temperature or 1.0)
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]  # [B, T − 1]
        ends = [len(prompt) - 1 for prompt in prompts]
        return [
            row[end : end + len(completion)].tolist()
            for row, end, completion in zip(chosen, ends, completions, strict=True)
        ]

    def for_trl(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return what TRL's `rollout_func` returns; log-probabilities are left to the trainer's own pass."""
        self._require_same_settings(trainer)
        template = dict(trainer.args.chat_template_kwargs or {})
        tokens = [self._tokens(prompt, template) for prompt in prompts]
        step = trainer.state.global_step
        if self.refreshing is not None:
            self.refreshing.steps = trainer.state.max_steps
        calls = self._last[1] + 1 if self._last[0] == step else 0
        self._last = (step, calls)
        part = calls * trainer.accelerator.num_processes + trainer.accelerator.process_index
        found = self.rollout(tokens, step, logprobs=False, part=part)
        return {"prompt_ids": tokens, "completion_ids": found.completions, "logprobs": None}

    def _require_same_settings(self, trainer: Any) -> None:
        """Raise BadInputError where the trainer's settings would draw other completions than these rollouts do."""
        args, mine = trainer.args, self.sampling
        if getattr(trainer, "tools", None):
            raise BadInputError("rollouts call no tools; leave `tools` out of the trainer.")
        pairs = {
            "temperature": (args.temperature, mine.temperature),
            "top_p": (args.top_p, 1.0 if mine.top_p is None else mine.top_p),
            "top_k": (args.top_k or 0, mine.top_k or 0),
            "min_p": (args.min_p or 0.0, mine.min_p or 0.0),
            "repetition_penalty": (args.repetition_penalty, mine.repetition_penalty),
            "max_completion_length": (args.max_completion_length, self.max_new_tokens),
        }
        for name, (asked, drawn) in pairs.items():
            if asked != drawn:
                raise BadInputError(f"GRPOConfig has {name}={asked}, the rollouts {drawn}; give both the same.")

    def _tokens(self, prompt: Any, template: dict[str, Any]) -> list[int]:
        tokenizer = self.target.require_tokenizer()
        if isinstance(prompt, str):
            return list(tokenizer(prompt)["input_ids"])
        return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **template))
