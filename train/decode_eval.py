"""τ as the decoder measures it, while training: the figure that held-out rows only stand in for.

At each evaluation the drafter, as it is then, drafts for a few prompts of the recipe's suites. Every process takes its
share of them; where the target's layers are split the first decodes alone, and the others take part in its passes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..common import BadInputError
from ..decode import Decoder, Output, Plan, Round, Sampling
from ..eval.measure import plan_of
from ..eval.suites import load_suites
from ..heads import Drafter
from ..recipes import EvalSpec, Recipe
from ..targets import Target
from ..targets.sharding import follow, leading
from .launch import Together


@dataclass(frozen=True)
class Sample:
    """What was written after a prompt: the target's text, and in it, in brackets, what the drafter had proposed."""

    prompt: str
    target: str
    drafted: str
    tau: float


@dataclass
class MeasuredTau:
    """A measurement of τ by the decoder.

    Attributes:
        prompts: token ids; places: of each, its number among all.
        samples: of the last measurement, by this process.
    """

    target: Target
    prompts: Sequence[tuple[int, ...]]
    plan: Plan
    sampling: Sampling
    max_new_tokens: int
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def of(cls, recipe: Recipe, target: Target) -> MeasuredTau | None:
        """Return what a recipe's `eval.training_prompts` asks for; None for no prompts.

        Raises:
            BadInputError: the target has no tokenizer, or there are no such suites.
        """
        spec = recipe.eval
        if not spec.training_prompts:
            return None
        return cls(
            target,
            _prompts(spec, target),
            plan_of(spec),
            Sampling(temperature=spec.temperatures[0], seed=spec.seed),
            spec.max_new_tokens,
        )

    def tau(self, drafter: Drafter, together: Together, is_copy: bool = False) -> float:
        """Return τ over all prompts; 1 where every text ended with its first token. All processes call this.

        Args:
            is_copy: whether the drafter was made for this, and may be changed.
        """
        sums = torch.zeros(2, dtype=torch.double, device=self.target.device)
        rank, count = together.args.process_index, together.args.world_size
        if not self.target.sharded:
            sums += self._sums(drafter, range(rank, len(self.prompts), count), is_copy).to(sums)
        elif rank == 0:
            with leading(self.target) if count > 1 else nullcontext():
                sums += self._sums(drafter, range(len(self.prompts)), is_copy).to(sums)
        else:
            follow(self.target)
        emitted, rounds = together.sum(sums).tolist()
        return float(emitted / rounds) if rounds else 1.0

    def _sums(self, drafter: Drafter, places: Sequence[int], is_copy: bool) -> Tensor:
        """Return the tokens and the rounds of these prompts, `[2]`."""
        self.samples = []
        if not places:
            return torch.zeros(2)
        own = self.ready(drafter, is_copy)
        out = Decoder(self.target, own, static=False).generate(
            [self.prompts[i] for i in places], self.max_new_tokens, self.sampling, self.plan, sequence_ids=list(places)
        )
        self.samples = [self._sample(self.prompts[i], out, row) for row, i in enumerate(places)]
        rounds = [r for sequence in out.rounds for r in sequence]
        return torch.tensor([float(sum(1 + r.accepted for r in rounds)), float(len(rounds))])

    def ready(self, drafter: Drafter, is_copy: bool = False) -> Drafter:
        """Return the drafter as it will be served: in the target's dtype, without what training put on it.

        It is a copy, whose weights are made in that dtype at once; one that `is_copy` already is changed in place.
        """
        device, dtype = self.target.device, self.target.dtype
        own = drafter
        if not is_copy:
            weights = {
                id(p): nn.Parameter(p.detach().to(device, dtype, copy=True), False) for p in drafter.parameters()
            }
            memory: dict[int, Any] = {**weights}
            own = copy.deepcopy(drafter, memory)
        vars(own).pop("forward", None)  # of mixed precision
        return own.to(device).cast(dtype).eval().requires_grad_(False)

    def _sample(self, prompt: Sequence[int], out: Output, row: int) -> Sample:
        text, tokens, rounds = self._text, out.tokens[row], out.rounds[row]
        tau = sum(1 + r.accepted for r in rounds) / len(rounds) if rounds else float("nan")
        marked = "".join(
            f"[{text(part)}]" if was_drafted else text(part) for part, was_drafted in drafted_parts(tokens, rounds)
        )
        return Sample(text(prompt), text(tokens), marked, tau)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.target.require_tokenizer().decode(list(tokens)))


def _prompts(spec: EvalSpec, target: Target) -> list[tuple[int, ...]]:
    """Return the first prompts of the suites, taken from them in turn."""
    suites = load_suites(spec.suites, target.require_tokenizer(), spec.training_prompts)
    turns = max(len(suite.prompts) for suite in suites)
    found = [tuple(s.prompts[i].tokens) for i in range(turns) for s in suites if i < len(s.prompts)]
    longest, limit = max(map(len, found)), target.max_context
    if limit is not None and longest + spec.max_new_tokens > limit:
        raise BadInputError(
            f"eval.training_prompts: the longest prompt of the suites has {longest} tokens; with eval.max_new_tokens="
            f"{spec.max_new_tokens} it exceeds the target's context of {limit}. Lower eval.max_new_tokens."
        )
    return found[: spec.training_prompts]


def drafted_parts(tokens: Sequence[int], rounds: Sequence[Round]) -> list[tuple[list[int], bool]]:
    """Return a text in parts, each with whether the drafter had proposed it; the first token comes from the prefill."""
    place = len(tokens) - sum(r.emitted for r in rounds)
    parts = [(list(tokens[:place]), False)]
    for r in rounds:
        kept = min(r.accepted, r.emitted)
        parts += [(list(tokens[place : place + kept]), True), (list(tokens[place + kept : place + r.emitted]), False)]
        place += r.emitted
    return [(part, was_drafted) for part, was_drafted in parts if part]
