"""On-policy training: in some rows of every step the drafter's own response stands in the place of the target's.

(DistillSpec, arXiv 2310.08461; GKD, arXiv 2306.13649.)

What the target makes of that text, and so the loss, is computed as for any other. Which rows, and every token in them,
are a function of the seed, the step, the row and the weights: so a resumed run writes the same text, and it does not
matter how rows are spread over processes and micro-batches.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..common import BadInputError
from ..decode import Decoder, Plan, Sampling
from ..decode.hashing import uniforms
from ..heads import Drafter
from ..heads.base import Sum
from ..recipes import DataSpec
from ..targets import Target
from .data import EMPTY, Rows, collate

_WHICH = 0  # a stream of randomness that the decoder draws nothing from


@dataclass
class OnPolicy:
    """A writer of the drafter's responses into batches.

    Attributes:
        share: of the rows, on average.
        seed: of the training.
        max_new_tokens: longest response.
        ends: tokens that end one; the target's.
    """

    rows: Rows
    share: float
    temperature: float
    seed: int
    max_new_tokens: int
    ends: frozenset[int]

    @classmethod
    def of(cls, spec: DataSpec, rows: Rows, target: Target, drafter: Drafter, seed: int) -> OnPolicy | None:
        """Return what a recipe's `data` asks for; None if no row is on-policy.

        Raises:
            BadInputError: a prompt is empty, or leaves the drafter no room for `max_new_tokens`.
        """
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
                f"data.on_policy: the longest prompt has {longest} tokens; with "
                f"data.max_new_tokens={spec.max_new_tokens} it exceeds the drafter's context "
                f"of {limit}. Lower data.max_new_tokens or data.max_prompt_tokens."
            )
        return cls(
            rows, spec.on_policy, spec.on_policy_temperature, seed, spec.max_new_tokens, frozenset(target.eos_ids)
        )

    def chosen(self, indices: list[int], step: int) -> list[int]:
        """Return those of the rows `indices` that the drafter answers in this step."""
        real = [i for i in indices if i != EMPTY]
        share = uniforms(self.seed, _WHICH, torch.tensor(step), torch.tensor(real, dtype=torch.long)).tolist()
        return [index for index, place in zip(real, share, strict=True) if place < self.share]

    def responses(self, writer: Target, indices: list[int], step: int) -> list[list[int]]:
        """Return what the drafter writes after the prompts of the rows `indices` in this step."""
        sampling = Sampling(temperature=self.temperature, seed=self.seed * 1_000_003 + step)
        with _evaluating(writer.model):
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
        real, one = len([i for i in indices if i != EMPTY]), 1
        return inputs, _sums(
            {"on_policy": (len(chosen), real), "written_tokens": (tokens, one), "written_seconds": (seconds, one)},
            inputs["index"].device,
        )

    def _row(self, index: int, response: list[int] | None) -> dict[str, object]:
        if index == EMPTY:
            return self.rows[EMPTY]
        if response is None:
            row = self.rows.table[index]
            return self.rows.labelled(index, row["input_ids"], row["loss_mask"])
        prompt = self.rows.prompt(index)
        return self.rows.labelled(index, prompt + response, [0] * len(prompt) + [1] * len(response))


def _sums(values: dict[str, tuple[float, float]], device: torch.device) -> dict[str, Sum]:
    return {
        name: (torch.tensor(float(total), device=device), torch.tensor(float(count), device=device))
        for name, (total, count) in values.items()
    }


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Work without dropout inside, and with what generation needs (activation checkpointing goes without caches)."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
