"""Prompt lookup as engines do it, which make other choices of what to copy than ours.

Ours copies from the latest place where the last tokens stood, since texts resemble most what was just written, and goes
on with what it copied itself. vLLM (0.32) copies from the first place, and no further than the text goes. llama.cpp's
`ngram-simple` copies from the latest place, no further than the text goes, and only what is long enough.
"""

from __future__ import annotations

from torch import Tensor

from ..heads import Ngram, NgramConfig
from ..heads.lookup.ngram import NgramSession
from ..targets import RaggedCache, RowLengths, Target


class FirstPlace(Ngram):
    """A drafter that copies from the first place where the last tokens stood."""

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> NgramSession:
        return _FirstPlaceSession(self.config, batch_size)


class _FirstPlaceSession(NgramSession):
    """A session that keeps the texts `texts` and searches them from their beginnings."""

    def __init__(self, config: NgramConfig, batch_size: int):
        super().__init__(config, batch_size)
        self.texts: list[list[int]] = [[] for _ in range(batch_size)]

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        for text, new, count in zip(self.texts, tokens.tolist(), counts.values, strict=True):
            text += new[:count]

    def continuations(self, tails: list[list[int]], depth: int) -> list[list[int]]:
        return [self._copied([*text, *tail], depth) for text, tail in zip(self.texts, tails, strict=True)]

    def _copied(self, text: list[int], depth: int) -> list[int]:
        for n in range(min(self.config.max_match, len(text) - 1), self.config.min_match - 1, -1):
            ends = (i + n for i in range(len(text) - n) if text[i : i + n] == text[-n:])
            if (end := next(ends, None)) is not None:
                return text[end : end + depth]
        return []

    def select(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]


class WholeCopy(Ngram):
    """A drafter that copies as llama.cpp's `ngram-simple` does: runs of one length, `max_match`."""

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> NgramSession:
        return _WholeCopySession(self.config, batch_size)


class _WholeCopySession(_FirstPlaceSession):
    """A session that searches its texts from their ends."""

    def _copied(self, text: list[int], depth: int) -> list[int]:
        size, known = self.config.max_match, len(text) - 1  # without the last token, as it counts them
        if known <= size + depth + 1:
            return []
        places = (at for at in range(known - size - 1, 0, -1) if text[at : at + size] == text[-size:])
        at = next(places, None)
        found = [] if at is None else text[at + size : min(at + size + depth, known)]
        return found if len(found) >= size else []
