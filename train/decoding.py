"""Decoding during a training: the drafter's own responses in its batches, and τ measured at each evaluation.

On-policy training (DistillSpec, arXiv 2310.08461; GKD, arXiv 2306.13649): in some rows of every step the drafter's own
response replaces the target's. Which rows, and every token in them, are a function of the seed, the step, the row and
the weights: so a resumed run writes the same text, however rows are spread over processes and micro-batches.

Measured τ: at each evaluation the drafter, as it is then, drafts for a few prompts of the recipe's suites. Every
process takes its share of them; where the target's layers are split the first decodes alone, and the others take part
in its passes. (The τ of held-out rows is analytic.)

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..common import BadInputError
from ..decode import Decoder, Output, Plan, Round, Sampling
from ..decode.rng import uniforms
from ..distill.prompt_table import Prompt
from ..distill.sources import in_turn, some_of_each
from ..eval.measure import plan_of
from ..eval.suites import load_suites
from ..heads import Drafter
from ..heads.losses import Sum
from ..recipes import DataSpec, EvalSpec, Recipe
from ..targets import Target
from ..targets.layers import evaluating
from ..targets.sharding import follow, leading
from .data import EMPTY, Rows, collate
from .processes import Processes

_WHICH = 0  # a stream of randomness that the decoder draws nothing from


@dataclass
class OnPolicy:
    """A writer of the drafter's responses into batches, in `share` of the rows; `ends` are tokens that end one."""

    rows: Rows
    share: float
    temperature: float
    seed: int
    max_new_tokens: int
    ends: frozenset[int]

    @classmethod
    def of(cls, spec: DataSpec, rows: Rows, target: Target, drafter: Drafter, seed: int) -> OnPolicy | None:
        """Return the writer of a recipe's `data`, if rows are on-policy; refuse prompts that leave it no room."""
        if not spec.on_policy:
            return None
        lengths, limit = [len(rows.prompt(i)) for i in rows.indices], drafter.writer().max_context
        longest = max(lengths)
        if min(lengths) == 0:
            raise BadInputError(
                "data.on_policy: a row begins with its response, so the drafter has nothing to continue; give "
                "every row a prompt."
            )
        if limit is not None and longest + spec.max_new_tokens > limit:
            raise BadInputError(
                f"data.on_policy: the longest prompt has {longest} tokens; with data.max_new_tokens="
                f"{spec.max_new_tokens} it exceeds the drafter's context of {limit}. Lower data.max_new_tokens or "
                "data.max_prompt_tokens."
            )
        ends = frozenset(target.eos_ids)
        return cls(rows, spec.on_policy, spec.on_policy_temperature, seed, spec.max_new_tokens, ends)

    def chosen(self, indices: list[int], step: int) -> list[int]:
        """Return the rows among `indices` that the drafter answers in this step."""
        real = [i for i in indices if i != EMPTY]
        share = uniforms(self.seed, _WHICH, torch.tensor(step), torch.tensor(real, dtype=torch.long)).tolist()
        return [index for index, place in zip(real, share, strict=True) if place < self.share]

    def responses(self, writer: Target, indices: list[int], step: int) -> list[list[int]]:
        """Return the drafter's responses to the prompts of the rows `indices` in this step."""
        sampling = Sampling(temperature=self.temperature, seed=self.seed * 1_000_003 + step)
        with evaluating(writer.model):  # activation checkpointing goes without caches
            # Eager rounds: how many rows there are changes from step to step, and each number would be captured anew.
            out = Decoder(writer, static=False).generate(
                [self.rows.prompt(i) for i in indices],
                self.max_new_tokens,
                sampling,
                Plan(depth=0),
                stop=lambda new: new[-1] in self.ends,
                ignore_eos=True,
                sequence_ids=indices,
            )
        return out.tokens

    def rewritten(
        self, inputs: dict[str, Tensor], drafter: Drafter, step: int
    ) -> tuple[dict[str, Tensor], dict[str, Sum]]:
        """Return a batch with the drafter's responses in the chosen rows, and figures.

        These are `on_policy` (share of rows), `written_tokens` and `written_seconds` (both per batch of one process).
        """
        began = time.perf_counter()
        indices = inputs["index"].tolist()
        chosen = self.chosen(indices, step)
        written = dict(zip(chosen, self.responses(drafter.writer(), chosen, step), strict=True)) if chosen else {}
        if written:
            batch = collate([self._row(index, written.get(index)) for index in indices])
            inputs = {name: tensor.to(inputs[name].device) for name, tensor in batch.items()}
        tokens, seconds = sum(map(len, written.values())), time.perf_counter() - began
        num_real = sum(i != EMPTY for i in indices)
        values = {"on_policy": (len(chosen), num_real), "written_tokens": (tokens, 1), "written_seconds": (seconds, 1)}
        pairs = {n: torch.tensor(v, dtype=torch.float32, device=inputs["index"].device) for n, v in values.items()}
        return inputs, {name: (total, count) for name, (total, count) in pairs.items()}

    def _row(self, index: int, response: list[int] | None) -> dict[str, object]:
        if index == EMPTY:
            return self.rows[EMPTY]
        if response is None:
            row = self.rows.table[index]
            return self.rows.labelled(index, row["input_ids"], row["loss_mask"])
        prompt = self.rows.prompt(index)
        return self.rows.labelled(index, prompt + response, [0] * len(prompt) + [1] * len(response))


@dataclass(frozen=True)
class Sample:
    """The text after a prompt: the target's, and the same with the accepted drafts in brackets."""

    prompt: str
    target: str
    drafted: str
    tau: float


@dataclass
class MeasuredTau:
    """A measurement of τ by the decoder; `samples` are those of the last one, by this process."""

    target: Target
    prompts: Sequence[Prompt]
    plan: Plan
    sampling: Sampling
    max_new_tokens: int
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def of(cls, recipe: Recipe, target: Target) -> MeasuredTau | None:
        """Return the measurement of a recipe's `eval.training_prompts`; None for no prompts."""
        spec = recipe.eval
        if not spec.training_prompts:
            return None
        sampling = Sampling(temperature=spec.temperatures[0], seed=spec.seed)
        return cls(target, _prompts(spec, target), plan_of(spec), sampling, spec.max_new_tokens)

    def tau(self, drafter: Drafter, processes: Processes, is_copy: bool = False) -> float:
        """Return τ over all prompts; 1 where every text ended with its first token. All processes call this.

        `is_copy`: whether the drafter was made for this, and may be changed.
        """
        sums = torch.zeros(2, dtype=torch.double, device=self.target.device)
        rank, count = processes.args.process_index, processes.args.world_size
        if not self.target.sharded:
            sums += self._sums(drafter, range(rank, len(self.prompts), count), is_copy).to(sums)
        elif rank == 0:
            with leading(self.target) if count > 1 else nullcontext():
                sums += self._sums(drafter, range(len(self.prompts)), is_copy).to(sums)
        else:
            follow(self.target)
        emitted, rounds = processes.sum(sums).tolist()
        return float(emitted / rounds) if rounds else 1.0

    def _sums(self, drafter: Drafter, places: Sequence[int], is_copy: bool) -> Tensor:
        """Return the tokens and the rounds of these prompts, `[2]`."""
        self.samples = []
        if not places:
            return torch.zeros(2)
        own = self.ready(drafter, is_copy)
        decoder, rounds = Decoder(self.target, own, static=False), list[Round]()
        alone = any(self.prompts[i].images for i in places)  # as the decoder reads images
        for part in [[place] for place in places] if alone else [places]:
            prompts = [self.prompts[i] for i in part]
            tokens = [prompt.tokens for prompt in prompts]
            images = [self.target.image_inputs(prompt.tokens, prompt.images) for prompt in prompts] if alone else ()
            out = decoder.generate(
                tokens, self.max_new_tokens, self.sampling, self.plan, sequence_ids=list(part), images=images
            )
            self.samples += [self._sample(prompt, out, row) for row, prompt in enumerate(tokens)]
            rounds += [r for sequence in out.rounds for r in sequence]
        return torch.tensor([float(sum(r.emitted for r in rounds)), float(len(rounds))])

    def ready(self, drafter: Drafter, is_copy: bool = False) -> Drafter:
        """Return the drafter as it is served, in the target's dtype: a copy made in it at once, or `is_copy` itself."""
        device = self.target.device
        dtype = self.target.dtype
        own = drafter
        if not is_copy:
            weights: dict[int, Any] = {
                id(p): nn.Parameter(p.detach().to(device, dtype, copy=True), False) for p in drafter.parameters()
            }
            own = copy.deepcopy(drafter, weights)
        vars(own).pop("forward", None)  # of mixed precision
        return own.to(device).cast(dtype).eval().requires_grad_(False)

    def _sample(self, prompt: Sequence[int], out: Output, row: int) -> Sample:
        def text(part: Sequence[int]) -> str:
            return str(self.target.require_tokenizer().decode(list(part)))

        tokens, rounds = out.tokens[row], out.rounds[row]
        tau = sum(r.emitted for r in rounds) / len(rounds) if rounds else float("nan")
        parts = drafted_parts(tokens, rounds)
        marked = "".join(f"[{text(part)}]" if was_drafted else text(part) for part, was_drafted in parts)
        return Sample(text(prompt), text(tokens), marked, tau)


def _prompts(spec: EvalSpec, target: Target) -> list[Prompt]:
    """Return prompts of the suites, as many of each as of any other, taken from them in turn."""
    suites = load_suites(spec.suites, target.require_tokenizer(), spec.training_prompts, images=target.images)
    named = [replace(prompt, suite=suite.name) for suite in suites for prompt in suite.prompts]
    shares = Counter(p.suite for p in some_of_each(named, spec.training_prompts, lambda prompt: prompt.suite))
    taken = [suite.some(shares[suite.name]) for suite in suites]
    prompts = list(in_turn(taken))
    longest, limit = max(len(prompt.tokens) for prompt in prompts), target.max_context
    if limit is not None and longest + spec.max_new_tokens > limit:
        raise BadInputError(
            f"eval.training_prompts: the longest prompt of the suites has {longest} tokens; with eval.max_new_tokens="
            f"{spec.max_new_tokens} it exceeds the target's context of {limit}. Lower eval.max_new_tokens."
        )
    return prompts


def drafted_parts(tokens: Sequence[int], rounds: Sequence[Round]) -> list[tuple[list[int], bool]]:
    """Return a text in parts, each with whether the drafter had proposed it; the first token comes from the prefill."""
    place = len(tokens) - sum(r.emitted for r in rounds)
    parts = [(list(tokens[:place]), False)]
    for r in rounds:
        kept = min(r.accepted, r.emitted)
        parts += [(list(tokens[place : place + kept]), True), (list(tokens[place + kept : place + r.emitted]), False)]
        place += r.emitted
    return [(part, was_drafted) for part, was_drafted in parts if part]
