"""Prompts, from whatever they come in, in one deterministic order; every row that is not used is counted.

A row is either raw text, which the target continues, or a chat, which its template renders up to the place where the
assistant answers. Sources are read in turn, one row each or by their weights, so that a limit leaves a mixture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..common.digests import canonical_json
from ..recipes import SourceSpec
from .layouts import Row, RowError, RowPrompt, understand
from .leaks import NO_LEAKS, SuitePrompts
from .seen import Seen
from .sources import as_specs, rows_of, title
from .table import Prompt, PromptTable
from .templates import RefusedChatError, render

_IDS = ("id", "question_id", "task_id", "prompt_id", "conversation_id")
DROPPED = ("too_long", "unanswerable", "unanswered", "duplicate", "malformed")


@dataclass(frozen=True)
class PromptReading:
    """How rows become prompts.

    Attributes:
        max_tokens: longer raw texts lose their beginning; longer chats are left out.
        template: arguments of the chat template.
        whole: ask a chat from its first question on, the others later, with the target's own answers; otherwise the
            last question is asked, after the row's own answers (and of `turns` the first).
        given: rows without an answer of their own are left out.
        drop_malformed: count a row that cannot be read, and leave it out; otherwise it is an error.
        once: leave out rows that ask what another has asked.
        measured: what must not be learnt from.
    """

    max_tokens: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False
    given: bool = False
    drop_malformed: bool = False
    once: bool = False
    measured: SuitePrompts = NO_LEAKS


@dataclass
class RowCounts:
    """What became of the rows of one source.

    Attributes:
        layouts: rows by what they were recognised as, such as "question (key question)".
        truncated: raw texts that lost their beginning.
        dropped: rows that were left out, by reason: `too_long` chats (a chat cannot be cut without breaking its
            template), `unanswerable` rows without anything to answer, `unanswered` rows without the answer that is to
            be learnt, `duplicate` and `malformed` ones.
        leaked: rows that are measured, too, and were allowed.
        examples: a sentence about the first row of each reason, and about the first one that is leaked.
    """

    source: str
    rows: int = 0
    kept: int = 0
    truncated: int = 0
    leaked: int = 0
    layouts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, example: str) -> None:
        self.dropped[reason] += 1
        self.examples.setdefault(reason, example)


@dataclass
class Collection:
    """Prompts, and what became of the rows that are not among them, source by source."""

    prompts: Sequence[Prompt] = ()
    sources: list[RowCounts] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the numbers of all sources together."""
        sums = {name: sum(getattr(s, name) for s in self.sources) for name in ("rows", "truncated", "leaked")}
        dropped = {reason: sum(s.dropped[reason] for s in self.sources) for reason in DROPPED}
        return {"prompts": len(self.prompts), **sums, **dropped}

    def by_source(self) -> list[dict[str, Any]]:
        """Return what became of the rows of each source, as plain values."""
        plain = ({k: dict(v) if isinstance(v, dict) else v for k, v in vars(s).items()} for s in self.sources)
        return list(plain)


def read_prompts(
    sources: Sequence[str | SourceSpec],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    max_tokens: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Return the prompts from all `sources`, one question of each row; see `collect`."""
    return list(collect(sources, tokenizer, limit, PromptReading(max_tokens, template or {})).prompts)


def collect(
    sources: Sequence[str | SourceSpec],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    reading: PromptReading | None = None,
    folder: Path | None = None,
) -> Collection:
    """Read `sources` by turns, until they end or there are `limit` prompts.

    Args:
        sources: see `outrider.distill.sources` for what they are, and `outrider.distill.layouts` for their rows.
        folder: where the prompts lie until they were read; None for the system's place for temporary files.

    Raises:
        BadInputError: a source is missing, unreadable, or gives no prompt at all; a row is malformed, or is measured.
    """
    reading, specs = reading or PromptReading(), as_specs(sources)
    found = [RowCounts(spec.path) for spec in specs]
    reader = _Reader(tokenizer, reading)
    streams = [reader.read(spec, counts) for spec, counts in zip(specs, found, strict=True)]
    weighted = any(spec.weight is not None for spec in specs)
    mixture = _weighted(streams, [spec.weight or 1.0 for spec in specs]) if weighted else _in_turn(streams)
    return Collection(PromptTable(islice(mixture, limit), reading.template, folder), found)


def digest_prompts(prompts: Iterable[Prompt], given: bool = False) -> str:
    """Return the identity of a list of prompts: a digest of their ids, suites, tokens and later turns, in order.

    Args:
        given: also of the answers that came with them.
    """
    digest = sha256(b"[")
    for number, p in enumerate(prompts):
        asked: list[Any] = [p.id, p.suite, list(p.tokens)]
        asked += [[p.later, p.tools, dict(p.template)]] if p.later else []  # of one question the tokens say it all
        asked += [p.given] if given else []
        digest.update((b", " if number else b"") + canonical_json(asked).encode())
    digest.update(b"]")
    return digest.hexdigest()


# ------------------------------------------------------------ rows to prompts


class _Reader:
    """A reader that turns the rows of each source into prompts, and counts the rest."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reading: PromptReading):
        self.tokenizer, self.reading = tokenizer, reading
        self.ids, self.seen = Seen(), Seen()
        self.repeated: dict[str, int] = {}

    def read(self, source: SourceSpec, counts: RowCounts) -> Iterator[Prompt]:
        """Yield the prompts of one source.

        It is an error if there are none, except where the other sources have them; by weights nothing is mixed with
        nothing, so that is one, too.
        """
        name = title(source.path)
        for number, row in enumerate(rows_of(source), 1):
            counts.rows = number
            prompt = self._used(row, f"{source.path}, row {number}", source, counts)
            if prompt is not None:
                counts.kept += 1
                yield self._named(prompt, row, number, name)
        if not counts.kept and (source.weight is not None or not counts.dropped["duplicate"]):
            raise BadInputError(f"no prompts in {source.path!r}: {_why_none(counts, self.reading.max_tokens)}")

    def _used(self, row: Row | RowError, where: str, source: SourceSpec, counts: RowCounts) -> Prompt | None:
        """Return the prompt of one row, not named yet; None (and a count) if it is left out."""
        try:
            if isinstance(row, RowError):
                raise row
            asked = understand(row, where, source.layout, source.column)
            counts.layouts[f"{asked.layout} (key {asked.key})"] += 1
            return self._prompt(asked if self.reading.whole else asked.last_question(), where, counts)
        except (RowError, RefusedChatError) as error:
            if not self.reading.drop_malformed:
                raise
            counts.drop("malformed", str(error))
            return None

    def _prompt(self, asked: RowPrompt, where: str, counts: RowCounts) -> Prompt | None:
        if asked.layout in ("question", "turns") and not getattr(self.tokenizer, "chat_template", None):
            asked = asked.as_text()
        text = asked.text
        if text is None and asked.messages:
            template = self.reading.template
            text = render(self.tokenizer, asked.messages, where, asked.tools, template=template)
        tokens = self._tokens(text or "", raw=asked.text is not None)
        reason = self._why_dropped(asked, tokens)
        if reason is not None:
            counts.drop(reason, f"{where}: {_DROPPED[reason].format(len(tokens))}")
            return None
        leak = self.reading.measured.found(asked, where)
        if leak is not None:
            counts.leaked += 1
            counts.examples.setdefault("leaked", leak)
        if asked.text is not None and self._is_long(tokens):
            counts.truncated += 1
            tokens = self._cut(tokens)
        messages = asked.messages if asked.text is None else None
        return Prompt("", "", tuple(tokens), text or "", messages, asked.later, asked.given, asked.tools)

    def _why_dropped(self, asked: RowPrompt, tokens: list[int]) -> str | None:
        """Return the reason for which a row is left out; None if it is used."""
        if not tokens or (asked.text is not None and not asked.text.strip()):
            return "unanswerable"
        if self.reading.given and not asked.given:
            return "unanswered"
        if asked.text is None and self._is_long(tokens):
            return "too_long"
        if self.reading.once and not self.seen.add(asked.canonical(with_answers=self.reading.given)):
            return "duplicate"
        return None

    def _is_long(self, tokens: list[int]) -> bool:
        return self.reading.max_tokens is not None and len(tokens) > self.reading.max_tokens

    def _tokens(self, text: str, raw: bool) -> list[int]:
        # A template writes its own special tokens; raw text gets those the tokenizer puts around any text.
        return list(self.tokenizer(text, add_special_tokens=raw)["input_ids"]) if text else []

    def _cut(self, tokens: list[int]) -> list[int]:
        """Return the last tokens, as many as may be; a BOS in front stays in front."""
        length = self.reading.max_tokens or len(tokens)
        first = tokens[:1] if tokens[0] == self.tokenizer.bos_token_id and length > 1 else []
        return first + tokens[len(tokens) - length + len(first) :]

    def _named(self, prompt: Prompt, row: Row | RowError, number: int, name: str) -> Prompt:
        """Return a prompt with the row's own id under its suite's name, or its number; a repeated one is numbered."""
        own = row if isinstance(row, dict) else {}
        suite = str(own.get("suite") or name)
        given = next((own[key] for key in _IDS if own.get(key) is not None), number)
        first = str(given) if str(given).startswith(f"{suite}/") else f"{suite}/{given}"
        unique = first
        while not self.ids.add(unique):
            self.repeated[first] = self.repeated.get(first, 1) + 1
            unique = f"{first}#{self.repeated[first]}"
        return replace(prompt, id=unique, suite=suite)


_DROPPED = {
    "too_long": "a chat of {} tokens",
    "unanswerable": "nothing to answer",
    "unanswered": "no answer of its own",
    "duplicate": "asks what another row asks",
}


def _why_none(counts: RowCounts, max_tokens: int | None) -> str:
    if not counts.rows:
        return "it is empty."
    left = {
        "too_long": f"chats longer than {max_tokens} tokens (raise data.max_prompt_tokens)",
        "unanswerable": "rows with nothing to answer",
        "unanswered": "rows without an answer of their own (leave out data.answers: given)",
        "duplicate": "rows that ask what another row asks",
        "malformed": "malformed rows",
    }
    found = ", ".join(f"{counts.dropped[reason]} {words}" for reason, words in left.items() if counts.dropped[reason])
    return f"none of its {counts.rows} rows can be used. Left out: {found}."


def _in_turn(streams: Sequence[Iterator[Prompt]]) -> Iterator[Prompt]:
    """Yield one from each stream, again and again, until all have ended."""
    alive = list(streams)
    while alive:
        for stream in list(alive):
            prompt = next(stream, None)
            if prompt is None:
                alive.remove(stream)
            else:
                yield prompt


def _weighted(streams: Sequence[Iterator[Prompt]], weights: Sequence[float]) -> Iterator[Prompt]:
    """Yield from the streams in the proportion of their weights, until the first has ended.

    It ends there so that the proportion holds to the last prompt.
    """
    owed = [0.0] * len(weights)
    while True:
        owed = [debt + weight for debt, weight in zip(owed, weights, strict=True)]
        number = owed.index(max(owed))
        owed[number] -= sum(weights)
        prompt = next(streams[number], None)
        if prompt is None:
            return
        yield prompt
