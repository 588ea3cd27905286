"""Prompts, from whatever they come in: packaged sets, files, the Hub.

A row is either raw text, which the target continues, or a chat, which its template renders up to the place where the
assistant answers. Sources are read in turn, one row each, so that a limit leaves a mixture; the order is always the
same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from datasets import load_dataset
from transformers import PreTrainedTokenizerBase

from ..ground import BadInputError
from ..ground.foreign import (
    MEGABYTE,
    Limits,
    Unreadable,
    parse_json,
    read_json_lines,
    read_lines,
    read_text,
    require_regular,
)
from ..recipes import embedded_file
from ..targets.fingerprint import digest_json
from .templates import apply_template

EMBEDDED = "embedded:"
_LARGEST = Limits(num_bytes=128 * MEGABYTE, containers=4_000_000)  # of a list of rows in one .json file
_AT_ONCE = 256  # rows of a parquet file: what is compressed in one may be a megabyte
SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")

Row = dict[str, Any]
Message = dict[str, Any]

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_NONDESCRIPT = {"question", "questions", "train", "test", "validation", "dev", "data", "prompts"}


@dataclass(frozen=True)
class Prompt:
    """What a target is asked.

    Attributes:
        tokens: the ids it is given, chat template and BOS included.
        text: the same as text, before any truncation, for people.
        messages: the chat it was rendered from; None for raw text.
        later: what is said to the target after each of its answers (a user's next turn, the results of tools); () for
            one question.
        given: the answers that came with the row, one to each question, each as the assistant's messages; () for none.
        tools: what the chat template is told about tools.
        template: further arguments of the chat template, such as `enable_thinking`.
    """

    id: str
    suite: str
    tokens: tuple[int, ...]
    text: str = ""
    messages: tuple[Message, ...] | None = None
    later: tuple[tuple[Message, ...], ...] = ()
    given: tuple[tuple[Message, ...], ...] = ()
    tools: Any = None
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Collection:
    """Prompts, and what became of the rows that are not among them.

    Attributes:
        truncated: raw texts that lost their beginning.
        too_long: chats left out because they exceed the limit (a chat cannot be cut without breaking its template).
        unanswerable: rows without text, or without a turn to answer.
    """

    prompts: list[Prompt] = field(default_factory=list)
    truncated: int = 0
    too_long: int = 0
    unanswerable: int = 0

    def counts(self) -> dict[str, int]:
        return {
            "prompts": len(self.prompts),
            "truncated": self.truncated,
            "too_long": self.too_long,
            "unanswerable": self.unanswerable,
        }


def read_prompts(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    max_tokens: int | None = None,
) -> list[Prompt]:
    """Return the prompts from all `sources`; see `collect`."""
    return collect(sources, tokenizer, limit, max_tokens).prompts


def collect(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    max_tokens: int | None = None,
) -> Collection:
    """Read `sources` in turn, one row each, until they end or there are `limit` prompts.

    Args:
        sources: `embedded:NAME`, a .jsonl, .json, .parquet or .txt file (one prompt per line), or a Hub data set:
            `org/name`, `org/name/config`, either with `:split`. A row holds `text` or `prompt` (raw), `question` or
            `turns` (its first is asked), or `messages` / `conversations` (a final assistant turn is cut off: the target
            answers itself). Both `role`/`content` and ShareGPT's `from`/`value` are understood.
        max_tokens: longer raw texts lose their beginning; longer chats are left out.

    Raises:
        BadInputError: a source is missing, unreadable, or gives no prompt at all; a row has none of these keys.
    """
    reader = _Reader(tokenizer, max_tokens)
    streams = [reader.read(source) for source in sources]
    reader.found.prompts.extend(islice(_in_turn(streams), limit))
    return reader.found


def check_sources(sources: Sequence[str]) -> None:
    """Raise BadInputError for a source that cannot exist, before anything expensive is loaded."""
    for source in sources:
        if not _is_hub(source):
            locate(source)


def count_rows(source: str) -> int | None:
    """Return how many rows a source has, among them those that turn out to be no prompts.

    A Hub data set is not read for that; the answer is None.
    """
    return None if _is_hub(source) else sum(1 for _ in _rows(source))


def digest_prompts(prompts: Iterable[Prompt]) -> str:
    """Return the identity of a list of prompts: a digest of their ids, suites and tokens, in order."""
    return digest_json([[p.id, p.suite, list(p.tokens)] for p in prompts])


def locate(source: str) -> Path:
    """Return the file that an `embedded:` name or a path means."""
    if source.startswith(EMBEDDED):
        return embedded_file(f"prompts/{source.removeprefix(EMBEDDED)}.jsonl")
    file = Path(source).expanduser()
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise BadInputError(
            f"the prompt source {source!r} {what}; expected embedded:code, embedded:docs, embedded:prose, a file, or a "
            "Hub id like org/name."
        )
    if file.suffix not in SUFFIXES:
        raise BadInputError(
            f"the prompt source {source!r} is a {file.suffix or 'suffixless'} file; expected one of "
            f"{', '.join(SUFFIXES)}."
        )
    return file


def chat_messages(turns: Any, where: str) -> list[Message]:
    """Return messages with `role` and `content`, from either convention; entries without a value are dropped."""
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        raise BadInputError(f"{where}: expected a list of messages, found {str(turns)[:80]!r}.")
    return [_message(turn, where) for turn in turns]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    where: str,
    tools: Any = None,
    answer: bool = True,
    template: Mapping[str, Any] | None = None,
) -> str:
    """Return the chat as text; with `answer`, up to the place where the assistant's next turn begins.

    Args:
        template: further arguments of the chat template, such as `enable_thinking`.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise BadInputError(
            f"{where}: is a chat, but the target's tokenizer has no chat template; use raw text (`text`), or set "
            "tokenizer.chat_template."
        )
    try:
        return apply_template(tokenizer, messages, tools, answer, template or {})
    except Exception as error:  # templates raise what they like: TemplateError, UndefinedError, TypeError
        what = str(error) or type(error).__name__
        raise BadInputError(
            f"{where}: the target's chat template refuses this conversation: {what}. Its roles: "
            f"{[m['role'] for m in messages]}."
        ) from error


# ------------------------------------------------------------ rows to prompts


class _Reader:
    """A reader that turns the rows of each source into prompts, and counts the rest."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None):
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.found = Collection()
        self.ids: set[str] = set()

    def read(self, source: str) -> Iterator[Prompt]:
        """Yield the prompts of one source; it is an error if there are none."""
        name, num_rows, num_prompts = _suite_name(source), 0, 0
        for number, row in enumerate(_rows(source), 1):
            num_rows = number
            prompt = self.prompt(row, number, name, f"{source}, row {number}")
            if prompt is not None:
                num_prompts += 1
                yield prompt
        if not num_prompts:
            raise BadInputError(f"no prompts in {source!r}: {self._why_none(num_rows)}")

    def _why_none(self, num_rows: int) -> str:
        if not num_rows:
            return "it is empty."
        return (
            f"none of its {num_rows} rows can be used. Left out so far, all sources together: {self.found.too_long} "
            "chats longer than "
            f"{self.max_tokens} tokens (raise data.max_prompt_tokens), {self.found.unanswerable} rows with nothing to "
            "answer."
        )

    def prompt(self, row: Row, number: int, name: str, where: str) -> Prompt | None:
        """Return the prompt of one row; None (and a count) if it cannot be used."""
        text, messages = self._content(row, where)
        tokens = self._tokens(text, raw=messages is None)
        if not tokens:
            self.found.unanswerable += 1
            return None
        if self.max_tokens is not None and len(tokens) > self.max_tokens:
            if messages is not None:
                self.found.too_long += 1
                return None
            self.found.truncated += 1
            tokens = self._cut(tokens, self.max_tokens)
        suite = str(row.get("suite") or name)
        return Prompt(
            self._id(row, number, suite), suite, tuple(tokens), text, None if messages is None else tuple(messages)
        )

    def _content(self, row: Row, where: str) -> tuple[str, list[Message] | None]:
        """Return the text to continue and its messages (None for raw text). Without text there is nothing to answer."""
        kind, value = _field(row, where)
        if kind == "raw" or (kind == "question" and not getattr(self.tokenizer, "chat_template", None)):
            return value, None
        messages = [{"role": "user", "content": value}] if kind == "question" else _asked(chat_messages(value, where))
        if not messages:
            return "", None
        return render(self.tokenizer, messages, where, row.get("tools") or None), messages

    def _tokens(self, text: str, raw: bool) -> list[int]:
        # A template writes its own special tokens; raw text gets those the tokenizer puts around any text.
        return list(self.tokenizer(text, add_special_tokens=raw)["input_ids"]) if text else []

    def _cut(self, tokens: list[int], length: int) -> list[int]:
        """Return the last `length` tokens; a BOS in front stays in front."""
        first = tokens[:1] if tokens[0] == self.tokenizer.bos_token_id and length > 1 else []
        return first + tokens[len(tokens) - length + len(first) :]

    def _id(self, row: Row, number: int, suite: str) -> str:
        """Return the row's own id under its suite's name, or its number; a repeated one gets a number after it."""
        given = next((row[k] for k in ("id", "question_id", "task_id") if row.get(k) is not None), number)
        name = str(given) if str(given).startswith(f"{suite}/") else f"{suite}/{given}"
        unique, count = name, 1
        while unique in self.ids:
            count += 1
            unique = f"{name}#{count}"
        self.ids.add(unique)
        return unique


def _field(row: Row, where: str) -> tuple[str, Any]:
    """Return what a row asks, as (raw | question | chat, value)."""
    for key in ("messages", "conversations", "conversation"):
        if row.get(key) is not None:
            return "chat", row[key]
    if row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise BadInputError(f"{where}: `turns` must be a list that is not empty, found {turns!r}.")
        return ("chat", turns) if isinstance(turns[0], dict) else ("question", str(turns[0]))
    for key, kind in (("question", "question"), ("prompt", "raw"), ("text", "raw")):
        value = row.get(key)
        if isinstance(value, list):  # trl's conversational form of `prompt`
            return "chat", value
        if value is not None:
            return kind, str(value)
    raise BadInputError(
        f"{where}: expected one of text, prompt, question, messages, conversations, turns; found "
        f"{', '.join(map(str, row)) or 'no keys'}."
    )


def _message(turn: Message, where: str) -> Message:
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str):
        raise BadInputError(
            f"{where}: a message needs `role` and `content` (or `from` and `value`); found the keys {', '.join(turn)}."
        )
    rest = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
    return {"role": _ROLES.get(role, role), "content": "" if content is None else content, **rest}


def _asked(messages: list[Message]) -> list[Message]:
    """Return the conversation up to its last turn that is not the assistant's; [] if nobody asks anything."""
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return messages if any(m["role"] != "system" for m in messages) else []


# ------------------------------------------------------------ sources to rows


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


def _is_hub(source: str) -> bool:
    if source.startswith((EMBEDDED, ".", "/", "~")) or Path(source).exists():
        return False
    return Path(source).suffix not in SUFFIXES


def _suite_name(source: str) -> str:
    """Return the name of a source's prompts: the file's, or its folder's if the file's says nothing."""
    if source.startswith(EMBEDDED):
        return source.removeprefix(EMBEDDED)
    if _is_hub(source):
        return source.partition(":")[0].split("/")[-1]
    file = Path(source).expanduser().resolve()
    return file.parent.name if file.stem in _NONDESCRIPT else file.stem


def _rows(source: str) -> Iterator[Row]:
    if _is_hub(source):
        return _hub_rows(source)
    file = locate(source)
    return {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows, ".txt": _text_rows}[file.suffix](
        file
    )


def _jsonl_rows(file: Path) -> Iterator[Row]:
    for number, row in read_json_lines(file):
        if not isinstance(row, dict):
            raise BadInputError(
                f"{file}: line {number} is a {type(row).__name__}; expected an object with named fields."
            )
        yield row


def _json_rows(file: Path) -> Iterator[Row]:
    try:
        rows = parse_json(read_text(file, _LARGEST.num_bytes), str(file), _LARGEST)
    except Unreadable as error:
        raise BadInputError(f"{error} One object per line is a .jsonl file.") from error
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise BadInputError(f"{file}: expected a list of objects, found {str(rows)[:60]!r}.")
    yield from rows


def _text_rows(file: Path) -> Iterator[Row]:
    for line in read_lines(file):
        if line.strip():
            yield {"text": line.rstrip("\r\n")}


def _parquet_rows(file: Path) -> Iterator[Row]:
    try:
        require_regular(file)
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(_AT_ONCE):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInputError(f"{file}: not a readable parquet file ({error}).") from error


def _hub_rows(source: str) -> Iterator[Row]:
    """Yield the rows of a Hub data set, streamed: a limit then costs no more than it reads."""
    name, _, split = source.partition(":")
    organisation, _, rest = name.partition("/")
    repository, _, config = rest.partition("/")
    identifier = f"{organisation}/{repository}" if repository else organisation
    try:
        rows = load_dataset(identifier, config or None, split=split or "train", streaming=True)
    except Exception as error:  # the library raises many kinds; all mean that the rows cannot be had
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInputError(
            f"the prompt source {source!r} is no file here, and the Hub gives no data set for it: {what} Expected "
            "org/name[/config][:split]."
        ) from error
    yield from rows
