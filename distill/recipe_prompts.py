"""Prompts of a recipe, from its sources in one deterministic order; every row that is dropped is counted.

A row is either raw text, which the target continues, or a chat, which its template renders up to the place where the
assistant answers. Sources are read in turn, one row each or by their weights, so that a limit leaves a mixture. Prompts
that a recipe measures are never learnt: a drafter that saw one looks better than it is.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..common.progress import announce
from ..recipes import Recipe, SourceSpec
from ..recipes.suite_names import find_suites
from ..targets.images import ImageReader, PromptImage, insert_images
from .conversation import RefusedChatError, render
from .dataset_formats import LONGEST_TEXT, Row, RowError, RowPrompt, num_images, question_digests, understand
from .prompt_table import Prompt, PromptTable
from .sources import EMBEDDED, Reservoir, as_specs, images_folder, in_turn, rows_of, some_of_each, title

MOST_SHOWN = 100  # malformed rows of a source
ACCEPTABLE = 0.02  # share of a source's rows that may be dropped without a warning
_IDS = ("id", "question_id", "task_id", "prompt_id", "conversation_id")

# Why a row of prompts is dropped, after a number of rows. Later `responses` leaves answers out, `train.data.split` rows
# without a token to learn.
DROPPED = {
    "too_long": "too long",
    "unanswerable": "with nothing to answer",
    "unanswered": "without an answer of their own",
    "duplicate": "duplicates",
    "malformed": "malformed",
}
NumberedRows = Iterable[tuple[int, Row | RowError]]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SuitePrompts:
    """The places of suites' prompts, by the digest of the user's texts; if `allowed`, rows that ask them count."""

    places: dict[bytes, str] = field(default_factory=dict)
    allowed: bool = False

    @classmethod
    def of(cls, suites: Sequence[str], limit: int | None = None, allowed: bool = False) -> SuitePrompts:
        """Return the prompts of suites, at most `limit` of each. BadInputError: no such suite, or a malformed row."""
        places: dict[bytes, str] = {}
        for name, (_, source) in zip(suites, find_suites(suites), strict=True):
            spec = SourceSpec(path=source)
            for number, row in _suite_rows(spec, limit):
                if isinstance(row, RowError):
                    raise row
                where = f"the suite {name}, row {number}"
                asked = understand(row, where, folder=images_folder(spec)).last_question()
                *_, whole = [b"", *question_digests(asked.users_texts())]
                places.setdefault(whole, where)
        return cls(places, allowed)

    def leak(self, asked: RowPrompt, where: str) -> str | None:
        """Return a sentence about the suite that measures this row, if that is allowed; None if none measures it."""
        texts = asked.users_texts() if self.places else []
        place = next((self.places[digest] for digest in question_digests(texts) if digest in self.places), None)
        if place is None:
            return None
        sentence = f"{where} asks what {place}, measures: {texts[0][:60]!r}."
        if self.allowed:
            return sentence
        raise BadInputError(
            f"{sentence} A drafter that learns what it is measured on looks better than it is: take the row out of one "
            "of them, or go on with data.allow_leaks=true."
        )


@dataclass(frozen=True)
class PromptReading:
    """The rules by which rows become prompts.

    Attributes:
        max_tokens: longer raw texts lose their beginning; longer chats are dropped.
        template: arguments of the chat template.
        whole: ask a chat from its first question on, the others later, with the target's own answers; otherwise the
            last question is asked, after the row's own answers (and of `turns` the first).
        given: rows without an answer of their own are dropped.
        drop_malformed: count a row that cannot be read, and drop it; otherwise it is an error.
        once: drop rows that ask what another has asked.
        measured: prompts that must not be learnt.
        suite: the rows are a suite's, which are measured: of `turns` every one is asked, an empty one is an error, and
            so is an id that occurs twice.
        images: reads those of rows; None where rows have none, and one that has some cannot be read.
        sample: seed of the draw of rows where there are more than the limit; None for the first ones.
    """

    max_tokens: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False
    given: bool = False
    drop_malformed: bool = False
    once: bool = False
    measured: SuitePrompts = field(default_factory=SuitePrompts)
    suite: bool = False
    images: ImageReader | None = None
    sample: int | None = None


@dataclass
class RowCounts:
    """The numbers of rows of one source, by what became of them.

    Attributes:
        revision: the commit of a Hub data set.
        drawn_from: rows of the source, of which `rows` are a sample; 0 for the first ones, or all.
        layouts: rows by the layout that was recognised, such as "question (key question)".
        truncated: raw texts that lost their beginning.
        raw_texts: those that a target with a chat template is to continue, though the recipe does not ask for it.
        dropped: rows by the reason: `too_long` chats (a chat cannot be cut without breaking its template),
            `unanswerable`, `unanswered` (with `answers: given`), `duplicate` and `malformed` ones.
        leaked: rows that are measured, too, and were allowed.
        unasked: later turns that a target without a chat template is not asked.
        with_images: of the rows that are kept.
        examples: a sentence about the first row of each reason, and about the first one that is leaked.
        malformed: a sentence about each malformed row, and no more than `MOST_SHOWN`.
    """

    source: str
    rows: int = 0
    kept: int = 0
    truncated: int = 0
    raw_texts: int = 0
    leaked: int = 0
    unasked: int = 0
    with_images: int = 0
    revision: str = ""
    drawn_from: int = 0
    layouts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    malformed: list[str] = field(default_factory=list)

    def drop(self, reason: str, example: str) -> None:
        self.dropped[reason] += 1
        if reason == "malformed" and len(self.malformed) < MOST_SHOWN:
            self.malformed.append(example)
        self.examples.setdefault(reason, example)

    def summary(self) -> str:
        """Return the numbers as one line."""
        layouts = ", ".join(name for name, _ in self.layouts.most_common())
        parts = [f"{self.source}: {layouts}; {self.kept:,} of {self.rows:,} rows"]
        parts += [f"drawn from {self.drawn_from:,}"] if self.drawn_from else []
        parts += [f"{self.with_images:,} with images"] if self.with_images else []
        parts += [f"dropped: {self.reasons()}"] if self.dropped else []
        parts += [f"{self.truncated:,} texts lost their beginning"] if self.truncated else []
        parts += [f"{self.leaked:,} are measured, too (data.allow_leaks)"] if self.leaked else []
        return "; ".join(parts)

    def reasons(self) -> str:
        """Return the numbers of dropped rows, by reason."""
        return ", ".join(f"{number:,} {DROPPED[reason]}" for reason, number in self.dropped.most_common())

    def example(self) -> str:
        """Return a sentence about a row that was dropped for the most frequent reason; "" if none was."""
        return "".join(f" For example, {self.examples[name].rstrip('.')}." for name, _ in self.dropped.most_common(1))

    def raw_text_warning(self) -> str:
        """Return a sentence about raw texts for a target with a chat template; "" if there are none."""
        if not self.raw_texts:
            return ""
        return (
            f"{self.source}: {self.raw_texts:,} rows are raw text, at which a target with a chat template may end at "
            'once: write {"messages": [{"role": "user", "content": …}]} instead, or set layout: question (layout: text '
            "where raw text is meant)."
        )


@dataclass
class Collection:
    """Prompts, and the counts of all rows, source by source."""

    prompts: Sequence[Prompt] = ()
    sources: list[RowCounts] = field(default_factory=list)

    @property
    def has_images(self) -> bool:
        return any(source.with_images for source in self.sources)

    def counts(self) -> dict[str, int]:
        """Return the numbers of all sources together."""
        sums = {name: sum(getattr(s, name) for s in self.sources) for name in ("rows", "truncated", "leaked")}
        dropped = {reason: sum(s.dropped[reason] for s in self.sources) for reason in DROPPED}
        return {"prompts": len(self.prompts), **sums, **dropped}

    def by_source(self) -> list[dict[str, Any]]:
        """Return the counts of each source as plain values."""
        return [{k: dict(v) if isinstance(v, dict) else v for k, v in vars(s).items()} for s in self.sources]


def recipe_prompts(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    console: Console | None = None,
    folder: Path | None = None,
    warn: bool = True,
    images: ImageReader | None = None,
) -> Collection:
    """Return the prompts that a recipe's target is to answer, and report the counts of each source.

    Args:
        console: gets one line for each source.
        folder: of the prompts' file until they were read; None for the system's place for temporary files.
        warn: also of sources that lose more than a few rows, or hold raw text for a target with a chat template.
        images: the target's reader of them; None for a target that sees none.

    Raises:
        BadInputError: as `collect`; a prompt of `eval.suites` is among them, and `data.allow_leaks` is not set.
    """
    spec = recipe.data
    reading = PromptReading(
        max_tokens=spec.max_prompt_tokens,
        template=recipe.template,
        whole=True,
        given=spec.answers == "given",
        drop_malformed=spec.malformed == "drop",
        once=True,
        measured=SuitePrompts.of(recipe.eval.suites, recipe.eval.limit, spec.allow_leaks),
        images=images,
        sample=spec.sample,
    )
    collection = collect(spec.prompts, tokenizer, spec.limit, reading, folder)
    for counts in collection.sources:
        announce(console, counts.summary())
        dropped = counts.dropped.total()
        if warn and dropped > ACCEPTABLE * counts.rows:
            share = f"{100 * dropped / counts.rows:.1f}%"
            why = f"({counts.reasons()}).{counts.example()} `outrider data check` shows more."
            _log.warning("%s: %s of the rows were dropped %s", counts.source, share, why)
        if warn and counts.raw_texts:
            _log.warning("%s", counts.raw_text_warning())
    return collection


def collect(
    sources: Sequence[str | SourceSpec],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    reading: PromptReading | None = None,
    folder: Path | None = None,
) -> Collection:
    """Read `sources` by turns, until they end or there are `limit` prompts.

    With `reading.sample`, rows are drawn where there are more than the limit, of all sources or of one (its `limit`);
    more of them than are needed, and more again if too many are dropped.

    Args:
        folder: of the prompts' file until they were read; None for the system's place for temporary files.

    Raises:
        BadInputError: a source is missing, unreadable, or gives no prompt at all; a row is malformed, or is measured.
    """
    reading, specs = reading or PromptReading(), as_specs(sources)
    size = None if limit is None or reading.sample is None else limit + limit // 4 + 16
    while True:
        counts = [RowCounts(spec.path) for spec in specs]
        rows, cut = _numbered_rows(specs, counts, limit, size, reading, folder)
        reader = _Reader(tokenizer, reading)
        streams = [reader.read(*source) for source in zip(rows, specs, counts, strict=True)]
        weighted = any(spec.weight is not None for spec in specs)
        mixture = _weighted(streams, [spec.weight or 1.0 for spec in specs]) if weighted else in_turn(streams)
        found = Collection(PromptTable(islice(mixture, limit), reading.template, folder), counts)
        if size is None or limit is None or len(found.prompts) == limit or not any(r.is_spent for r in cut):
            return found
        size *= 4


def _numbered_rows(
    specs: Sequence[SourceSpec],
    counts: Sequence[RowCounts],
    limit: int | None,
    size: int | None,
    reading: PromptReading,
    folder: Path | None,
) -> tuple[list[NumberedRows], list[Reservoir]]:
    """Return the rows of each source with their numbers, and the samples among them that `size` cut."""
    if reading.suite:
        return [_suite_rows(spec, limit) for spec in specs], []
    samples: list[Reservoir | None] = []
    for number, (spec, count) in enumerate(zip(specs, counts, strict=True)):
        sizes = [n for n in (size, spec.limit) if n is not None and reading.sample is not None]
        chance = random.Random(f"{reading.sample} {number}")
        found = partial(setattr, count, "revision")
        samples.append(Reservoir(spec, min(sizes), chance, found, folder) if sizes else None)
    shuffled = limit is not None and sum(len(s) for s in samples if s) > limit
    rows: list[NumberedRows] = []
    for sample, spec, count in zip(samples, specs, counts, strict=True):
        if sample is None:
            rows.append(enumerate(rows_of(spec, partial(setattr, count, "revision")), 1))
        else:
            rows.append(sample.rows(shuffled))
            count.drawn_from = sample.seen if sample.is_sample else 0
    return rows, [s for s in samples if s is not None and s.is_sample and s.size == size]


def _suite_rows(source: SourceSpec, limit: int | None) -> list[tuple[int, Row | RowError]]:
    """Return the rows of a suite with their numbers, at most `limit`: of each category some."""
    return some_of_each(list(enumerate(rows_of(source), 1)), limit, lambda numbered: _category(numbered[1]))


def _category(row: Row | RowError) -> str:
    category = row.get("category") if isinstance(row, dict) else None
    return category if isinstance(category, str) else ""


def _is_new(known: set[int], text: str) -> bool:
    """Return whether a text is not among the `known` ones yet, of which 64 bits are kept, and add it.

    Two of ten million different texts share a digest with a chance of 1 in 370,000.
    """
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    is_new = digest not in known
    known.add(digest)
    return is_new


class _DroppedRowError(Exception):
    """A row that is dropped for one of the reasons of `DROPPED`, which a sentence explains."""

    def __init__(self, reason: str, sentence: str):
        super().__init__(sentence)
        self.reason = reason


class _Reader:
    """A reader that turns the rows of each source into prompts, and counts the rest."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reading: PromptReading):
        self.tokenizer, self.reading = tokenizer, reading
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.ids = set[int]()
        self.asked = set[int]()
        self.repeated: dict[str, int] = {}

    def read(self, rows: NumberedRows, source: SourceSpec, counts: RowCounts) -> Iterator[Prompt]:
        """Yield the prompts of one source's `rows`.

        BadInputError if there are none, except where unweighted sources have them already.
        """
        name, folder = title(source.path), images_folder(source)
        for number, row in rows:
            counts.rows += 1
            where = f"{source.path}, row {number}"
            try:
                if isinstance(row, RowError):
                    raise row
                asked = self._asked(row, where, source, folder, counts)
                text, tokens, images = self._rendered(asked, where, counts)
            except _DroppedRowError as dropped:
                counts.drop(dropped.reason, f"{where}: {dropped}")
                continue
            except (RowError, RefusedChatError) as error:
                if not self.reading.drop_malformed:
                    raise
                counts.drop("malformed", str(error))
                continue
            counts.kept += 1
            counts.with_images += bool(asked.images)
            is_meant = source.layout == "text" or source.path.startswith(EMBEDDED)
            counts.raw_texts += asked.text is not None and self.has_template and not is_meant
            suite = str(row.get("suite") or name)
            yield Prompt(
                id=self._id(row, suite, number, where),
                suite=suite,
                tokens=tuple(tokens),
                text=text,
                messages=None if asked.text is not None else asked.messages,
                later=asked.later,
                given=asked.given,
                tools=asked.tools,
                category=_category(row),
                images=images,
            )
        if not counts.kept and (source.weight is not None or not counts.dropped["duplicate"]):
            why = f"none of its {counts.rows} rows can be used. Dropped: {counts.reasons()}."
            why = f"{why}{counts.example()}" if counts.rows else "it is empty."
            raise BadInputError(f"no prompts in {source.path!r}: {why}")

    def _asked(self, row: Row, where: str, source: SourceSpec, folder: Path | None, counts: RowCounts) -> RowPrompt:
        """Return what a row asks of this target, by the rules of the reading."""
        asked = understand(row, where, source.layout, source.column, folder)
        is_text = asked.layout in ("question", "turns") and not self.has_template
        how = ", as raw text: no chat template" if is_text else ""
        counts.layouts[f"{asked.layout} (key {asked.key}){how}"] += 1
        if self.reading.suite and asked.layout == "turns":
            if empty := [n for n, turn in enumerate(row[asked.key], 1) if not turn.strip()]:
                raise RowError(where, f"turn {empty[0]} of `{asked.key}` is empty; write what is asked there.")
        elif not self.reading.whole:
            asked = asked.last_question()
        if is_text:
            counts.unasked += len(asked.later)
            asked = asked.as_text()
        return asked

    def _rendered(
        self, asked: RowPrompt, where: str, counts: RowCounts
    ) -> tuple[str, list[int], tuple[PromptImage, ...]]:
        """Return the text of a question, its tokens, and the images of its conversation."""
        text = asked.text or ""
        is_raw = asked.text is not None
        limit = self.reading.max_tokens
        if not is_raw and asked.messages:
            text = render(self.tokenizer, asked.messages, where, asked.tools, template=self.reading.template)
        if len(text) > LONGEST_TEXT:
            if not is_raw or limit is None:
                raise RowError(where, f"a text of {len(text):,} letters; at most {LONGEST_TEXT:,} are read as tokens.")
            text = text[-LONGEST_TEXT:]  # it would lose its beginning as tokens
        whole, images = self._with_images(text, asked, where) if text and asked.images else (text, ())
        # A template writes its own special tokens; raw text gets those the tokenizer puts around any text.
        tokens = list(self.tokenizer(whole, add_special_tokens=is_raw)["input_ids"]) if text else []
        is_long = limit is not None and len(tokens) > limit
        if not tokens or (is_raw and not text.strip()):
            raise _DroppedRowError("unanswerable", "nothing to answer")
        if self.reading.given and not asked.given:
            raise _DroppedRowError("unanswered", "no answer of its own (data.answers: given)")
        if is_long and not is_raw:
            raise _DroppedRowError("too_long", f"a chat of {len(tokens)} tokens (data.max_prompt_tokens={limit})")
        if self.reading.once and not _is_new(self.asked, asked.canonical(with_answers=self.reading.given)):
            raise _DroppedRowError("duplicate", "asks what another row asks")
        leak = self.reading.measured.leak(asked, where)
        if leak is not None:
            counts.leaked += 1
            counts.examples.setdefault("leaked", leak)
        if is_long:
            counts.truncated += 1
            tokens = self._cut(tokens, limit or len(tokens))
        return text, tokens, images

    def _with_images(self, text: str, asked: RowPrompt, where: str) -> tuple[str, tuple[PromptImage, ...]]:
        """Return a rendered question with its images' texts in it, and all images of the conversation."""
        if (reader := self.reading.images) is None:
            raise RowError(where, "an image, and what was asked for reads none, or the target sees none; leave it out.")
        try:
            images = tuple(reader.show(image, where) for image in asked.images)
            return insert_images(text, images[: num_images(asked.messages)])[0], images
        except BadInputError as error:
            raise RowError(where, str(error).removeprefix(f"{where}: ")) from error

    def _cut(self, tokens: list[int], length: int) -> list[int]:
        """Return the last `length` tokens; a BOS in front stays in front."""
        first = tokens[:1] if tokens[0] == self.tokenizer.bos_token_id and length > 1 else []
        return first + tokens[len(tokens) - length + len(first) :]

    def _id(self, row: Row, suite: str, number: int, where: str) -> str:
        """Return the row's own id under its suite's name, or its number; a repeated one is numbered."""
        given = next((row[key] for key in _IDS if row.get(key) is not None), number)
        first = str(given) if str(given).startswith(f"{suite}/") else f"{suite}/{given}"
        unique = first
        while not _is_new(self.ids, unique):
            if self.reading.suite:
                raise BadInputError(
                    f"{where}: the id {given!r} stands in an earlier row, too; reports are compared prompt by prompt, "
                    "so give each row an id of its own."
                )
            self.repeated[first] = self.repeated.get(first, 1) + 1
            unique = f"{first}#{self.repeated[first]}"
        return unique


def _weighted(streams: Sequence[Iterator[Prompt]], weights: Sequence[float]) -> Iterator[Prompt]:
    """Yield from the streams in the proportion of their weights, until the first has ended: so it holds to the last."""
    owed = [0.0] * len(weights)
    while True:
        owed = [debt + weight for debt, weight in zip(owed, weights, strict=True)]
        number = owed.index(max(owed))
        owed[number] -= sum(weights)
        prompt = next(streams[number], None)
        if prompt is None:
            return
        yield prompt
