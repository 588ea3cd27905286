"""Answers by our own decoder, on as many processes as there are.

Work is handed out a batch at a time, to whoever is free, so that a slow process holds nobody up. A batch belongs to the
process that holds its claim; the batch of one that dies is free again. A prompt's text depends on nobody: its draws are
keyed by its index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from ..common import BadInputError
from ..common.process_group import LaunchGroup
from ..decode import Decoder, Output, Plan, Sampling
from ..heads import load_drafter
from ..recipes import DataSpec
from ..targets import Target
from .conversation import next_question
from .resume_store import Answer, RemainingWork, Tokens, Unfinished
from .table import Prompt

Advance = Callable[[int, str], None]


@dataclass(frozen=True)
class Answering:
    """A process that answers prompts by its decoder.

    Attributes:
        prompts: all of them, of which batches are indices.
    """

    decoder: Decoder
    prompts: Sequence[Prompt]
    spec: DataSpec

    @classmethod
    def of(cls, target: Target, prompts: Sequence[Prompt], spec: DataSpec) -> Answering:
        """Return one with the drafter that the recipe names."""
        drafter = None if spec.drafter is None else load_drafter(Path(spec.drafter).expanduser(), target)
        return cls(Decoder(target, drafter), prompts, spec)

    def batch(self, indices: Sequence[int]) -> list[Answer]:
        """Return the answers to the prompts with these indices, turn by turn, as long as there is something to ask."""
        turns: dict[int, list[Tokens]] = {index: [] for index in indices}
        rounds: dict[int, list[list[int]]] = {index: [] for index in indices}
        asked = {index: self.prompts[index].tokens for index in indices}
        while asked:
            out = self._generate(asked)
            for number, (index, answer) in enumerate(zip(asked, out.tokens, strict=True)):
                turns[index].append(answer)
                if self.drafter:
                    rounds[index].append([one.emitted for one in out.rounds[number]])
            asked = {i: question for i in asked if (question := self._next(i, turns[i])) is not None}
        return [Answer(i, tuple(turns[i]), "", tuple(rounds[i]), self.drafter) for i in indices]

    @cached_property
    def drafter(self) -> str:
        """Who drafts, in words: its kind and the beginning of its digest; "" for nobody."""
        found = self.decoder.drafter
        return "" if found is None else f"{found.name} {found.digest()[:16]}"

    def _generate(self, asked: dict[int, tuple[int, ...]]) -> Output:
        """Return an answer to each question; each draws by its prompt's index, whatever the batch."""
        try:
            out = self.decoder.generate(
                list(asked.values()),
                self.spec.max_new_tokens,
                Sampling(**self.spec.sampling.model_dump()),
                self._plan(),
                sequence_ids=list(asked),
            )
        except torch.OutOfMemoryError as error:
            raise BadInputError(
                f"the device has too little memory for data.batch_size={self.spec.batch_size}. Finished responses are "
                "kept; run again with a smaller one."
            ) from error
        return out

    def _plan(self) -> Plan:
        # The one rule under which what is drawn does not depend on who drafts, nor on whether anybody does.
        rule = "auto" if self.spec.sampling.temperature == 0 else "coupled"
        return Plan(0 if self.decoder.drafter is None else self.spec.draft_depth, verify=rule)

    def _next(self, index: int, turns: Sequence[Tokens]) -> tuple[int, ...] | None:
        if len(turns) > len(self.prompts[index].later):
            return None
        tokenizer, limit = self.decoder.target.require_tokenizer(), self.decoder.target.max_context
        question = next_question(self.prompts[index], turns, tokenizer, self.spec.max_prompt_tokens)
        return question if question is None or fits(question, self.spec.max_new_tokens, limit) else None


def fits(question: Sequence[int], max_new_tokens: int, limit: int | None) -> bool:
    """Tell whether a question and its answer have room in a context of `limit` tokens."""
    return limit is None or len(question) + max_new_tokens <= limit


# ------------------------------------------------------------ who does what


def batches(indices: Sequence[int], size: int, processes: int) -> list[list[int]]:
    """Return `indices` in batches of `size`, for several processes smaller ones towards the end.

    So nobody waits long for the last one (guided self-scheduling; Polychronopoulos and Kuck 1987).
    """
    found, begin, least = [], 0, max(1, size // 4)
    while left := len(indices) - begin:
        share = size if processes == 1 else -(-left // (2 * processes))
        count = min(size, max(least, share), left)
        found.append(list(indices[begin : begin + count]))
        begin += count
    return found


def answer_all(
    answering: Answering, work: RemainingWork, partial: Unfinished, group: LaunchGroup, advance: Advance
) -> None:
    """Answer batches that nobody else answers, until all are finished."""
    tokens, started, unfinished = 0, time.perf_counter(), set(range(len(work.batches)))
    for number in group.take(
        range(len(work.batches)),
        lambda number: partial.has(work.begin + number),
        lambda number: partial.claiming(work.begin + number),
    ):
        answers = answering.batch(work.batches[number])
        partial.keep(work.begin + number, answers)
        tokens += sum(len(turn) for answer in answers for turn in answer.turns)
        if group.is_main:  # who shows what all have done
            ended = {n for n in unfinished if partial.has(work.begin + n)} if group.size > 1 else {number}
            unfinished -= ended
            rate = f"{tokens / (time.perf_counter() - started):,.0f} tokens/s"
            advance(
                sum(len(work.batches[n]) for n in ended),
                rate if group.size == 1 else f"{rate} in each of {group.size} processes",
            )
