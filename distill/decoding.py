"""Answers by our own decoder, on as many processes as there are.

Work is handed out a batch at a time, to any process that is free, so that a slow one delays no other. A batch belongs
to the process that holds its claim; the batch of one that dies is free again. A prompt's text does not depend on the
process: its draws are keyed by its index.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common import BadInputError
from ..common.file_process_group import LaunchGroup
from ..common.progress import Advance
from ..decode import Decoder, Output, Plan, Sampling
from ..heads import load_drafter
from ..recipes import DataSpec
from ..targets import Target
from ..targets.images import ImageInputs
from .conversation import next_question
from .journal import Answer, Journal, RemainingWork, Tokens, claim_of
from .prompt_table import Prompt

Questions = dict[int, tuple[int, ...]]  # tokens, by the index of their prompt


@dataclass(frozen=True)
class Responder:
    """A decoder that answers batches of indices of all `prompts`."""

    decoder: Decoder
    prompts: Sequence[Prompt]
    spec: DataSpec

    @classmethod
    def of(cls, target: Target, prompts: Sequence[Prompt], spec: DataSpec) -> Responder:
        """Return a responder with the drafter that the recipe names."""
        drafter = None if spec.drafter is None else load_drafter(Path(spec.drafter).expanduser(), target)
        return cls(Decoder(target, drafter), prompts, spec)

    def batch(self, indices: Sequence[int]) -> list[Answer]:
        """Return the answers to the prompts with these indices, turn by turn, until nothing more is asked."""
        turns: dict[int, list[Tokens]] = {index: [] for index in indices}
        target = self.decoder.target
        tokenizer, longest = target.require_tokenizer(), longest_question(self.spec, target.max_context)
        prompts = {index: self.prompts[index] for index in indices}
        asked = {index: prompt.tokens for index, prompt in prompts.items()}
        while asked:
            for index, answer in self._answers(asked, prompts).items():
                turns[index].append(answer)
            following = {i: next_question(prompts[i], turns[i], tokenizer, longest) for i in asked}
            asked = {i: question for i, question in following.items() if question is not None}
        return [Answer(i, tuple(turns[i])) for i in indices]

    def _answers(self, asked: Questions, prompts: dict[int, Prompt]) -> dict[int, Tokens]:
        """Return an answer to each question; with images one at a time."""
        images = {i: self.decoder.target.image_inputs(tokens, prompts[i].images) for i, tokens in asked.items()}
        together = {i: tokens for i, tokens in asked.items() if images[i] is None}
        found: dict[int, Tokens] = {}
        for part in [together, *({i: tokens} for i, tokens in asked.items() if i not in together)]:
            if part:
                out = self._generate(part, [images[i] for i in part if i not in together])
                found |= zip(part, out.tokens, strict=True)
        return found

    def _generate(self, asked: Questions, images: Sequence[ImageInputs | None]) -> Output:
        """Return an answer to each question; each draws by its prompt's index, whatever the batch."""
        # The one rule under which what is drawn does not depend on the drafter, nor on whether there is one.
        rule = "auto" if self.spec.sampling.temperature == 0 else "coupled"
        try:
            return self.decoder.generate(
                list(asked.values()),
                self.spec.max_new_tokens,
                Sampling(**self.spec.sampling.model_dump()),
                Plan(0 if self.decoder.drafter is None else self.spec.draft_depth, verify=rule),
                sequence_ids=list(asked),
                images=images,
            )
        except torch.OutOfMemoryError as error:
            raise BadInputError(
                f"the device has too little memory for data.batch_size={self.spec.batch_size}. Finished responses are "
                "kept; run again with a smaller one."
            ) from error


def longest_question(spec: DataSpec, max_context: int | None) -> int:
    """Return the longest later question of a conversation, in tokens: it and its answer have room in the context."""
    room = spec.max_prompt_tokens if max_context is None else max_context - spec.max_new_tokens
    return min(spec.max_prompt_tokens, room)


def batches(indices: Sequence[int], size: int, processes: int) -> list[list[int]]:
    """Return `indices` in batches of `size`, for several processes smaller ones towards the end.

    None waits long for the last one (guided self-scheduling; Polychronopoulos and Kuck 1987).
    """
    parts = []
    begin = 0
    least = max(1, size // 4)
    while left := len(indices) - begin:
        share = size if processes == 1 else -(-left // (2 * processes))
        count = min(size, max(least, share), left)
        parts.append(list(indices[begin : begin + count]))
        begin += count
    return parts


def answer_all(
    responder: Responder, work: RemainingWork, journal: Journal, group: LaunchGroup, advance: Advance
) -> None:
    """Answer batches that no other process answers, until all are finished."""
    tokens = 0
    started = time.perf_counter()
    unfinished = set(range(len(work.batches)))
    for number in group.take(
        range(len(work.batches)),
        lambda number: journal.has(work.begin + number),
        lambda number: claim_of(journal.folder, work.begin + number),
    ):
        answers = responder.batch(work.batches[number])
        journal.add(work.begin + number, answers)
        tokens += sum(len(turn) for answer in answers for turn in answer.turns)
        if group.is_main:  # it shows the progress of all
            ended = {n for n in unfinished if journal.has(work.begin + n)} if group.size > 1 else {number}
            unfinished -= ended
            rate = f"{tokens / (time.perf_counter() - started):,.0f} tokens/s"
            note = rate if group.size == 1 else f"{rate} in each of {group.size} processes"
            advance(sum(len(work.batches[n]) for n in ended), note)
