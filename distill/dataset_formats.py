"""The schema of a row of data: raw text, one question, several turns, or a chat, with or without answers.

| layout | keys | what it is |
|---|---|---|
| text | text, prompt | raw text, which the target continues |
| question | question, instruction (with `input`) | one user's message |
| turns | turns | a user's messages, one after the other |
| messages | messages, conversations, conversation, or a list in `prompt` | a chat, in either convention |

A row may bring its own answers: the assistant's turns of a chat, or `answer`, `response`, `completion`, `output` or
`reference` beside the question. `system` and `tools` (or `functions`) are given to the chat template.

The content of a message with images is a list of parts: texts, and images by the digests of their files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from ..common import BadInputError
from ..common.digests import canonical_json
from ..common.untrusted_files import Unreadable, parse_json
from ..targets.images import ImageSource, check_pixels

Row = dict[str, Any]
Message = dict[str, Any]
Turn = tuple[Message, ...]

CHATS = ("messages", "conversations", "conversation")
KEYS = {  # in the order in which a row is recognised
    "messages": CHATS,
    "turns": ("turns",),
    "question": ("question", "instruction"),
    "text": ("prompt", "text"),
}
_FORCED = {
    "messages": (*CHATS, "prompt", "turns"),
    "turns": ("turns", *CHATS),
    "question": ("question", "instruction", "prompt", "text"),
    "text": ("text", "prompt", "question", "instruction"),
}
_EXPECTED = "text, prompt, question, messages, conversations, turns"
_ANSWERS = ("answer", "response", "completion", "output", "reference")

_NAMES = {"human": "user", "observation": "tool", "function_response": "tool"}
_NAMES |= dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant")
# Fields of a message that chat templates read beside role and content: those in which an assistant without content says
# something, and all. Any other field is a note of the data's authors.
_SPEAKING = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "tool_plan")
_READ = (*_SPEAKING, "thoughts", "tool_call_id", "name", "tools", "functions")
_CUT = "length"  # the `finish_reason` of an answer that its server cut
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

_IMAGES = ("image", "image_url")  # kinds of parts
_MOST_TURNS = 1000
LONGEST_TEXT = 1_000_000  # letters: a tokenizer may take half a kilobyte for each


class RowError(BadInputError):
    """A row that does not fit its layout; `reason` is the sentence without its place."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


@dataclass(frozen=True)
class RowPrompt:
    """The question of a row.

    Attributes:
        layout, key: the layout that was recognised, and the key that showed it.
        text: raw text; None for a chat.
        messages: the chat before the first answer; () if nothing is asked.
        later: the messages after each answer.
        given: the row's own answers, one after each question.
        tools: those that the chat template lists.
        images: of the whole conversation, in order.
    """

    layout: str
    key: str
    text: str | None = None
    messages: Turn = ()
    later: tuple[Turn, ...] = ()
    given: tuple[Turn, ...] = ()
    tools: list[Any] | None = None
    images: tuple[ImageSource, ...] = ()

    def canonical(self, with_answers: bool = False) -> str:
        """Return the question as one text: equal for rows that ask the same."""
        asked = self.text if self.text is not None else [self.messages, self.later, self.tools]
        return canonical_json([asked, self.given] if with_answers else asked)

    def users_texts(self) -> list[str]:
        """Return the texts of the user, turn by turn; of raw text the text."""
        return users_texts((self.messages, *self.later)) if self.text is None else [self.text]

    def as_text(self) -> RowPrompt:
        """Return a single question as raw text, for a target without a chat template."""
        text = self.messages[-1]["content"] if self.messages else ""
        return replace(self, text=text, messages=(), later=(), given=self.given[:1])

    def last_question(self) -> RowPrompt:
        """Return one question alone: of a chat the last one, after the row's own answers; of `turns` the first."""
        if self.layout == "turns" or not self.later or not self.given:
            return replace(self, later=(), given=self.given[:1])
        messages = list(self.messages)
        for answer, following in zip(self.given, self.later, strict=False):
            messages += [*answer, *following]
        return replace(self, messages=tuple(messages), later=(), given=self.given[len(self.later) :])


def users_texts(turns: Iterable[Turn]) -> list[str]:
    """Return the texts of the user in all turns."""
    return [content_text(message) for turn in turns for message in turn if message["role"] == "user"]


def content_text(message: Message) -> str:
    """Return a message's content as text, in which an image is its digest."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text") or part["image"] for part in content)


def num_images(messages: Iterable[Message]) -> int:
    """Return the number of images in messages."""
    return sum(part["type"] == "image" for m in messages if not isinstance(m["content"], str) for part in m["content"])


def question_digests(texts: Iterable[str]) -> Iterator[bytes]:
    """Yield a digest of the first text, of the first two, …: a longer conversation has asked these, too."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(" ".join(text.split()).encode() + b"\0")
        yield digest.digest()


def understand(
    row: Row, where: str, layout: str | None = None, column: str | None = None, folder: Path | None = None
) -> RowPrompt:
    """Return the question of a row.

    Args:
        where: the row's place, for errors.
        layout: one of the table above, by which it is read; None recognises it by its keys.
        column: the key of the question; None for those of the table.
        folder: below which images are looked for; None where there is none.

    Raises:
        RowError: none of the keys, a value of another kind than its key says, or an image that cannot be read.
    """
    reader = _RowReader(row, where, folder)
    kind, key = reader.recognised(layout, column)
    read = {"messages": reader.chat, "turns": reader.turns, "question": reader.question, "text": reader.raw_text}[kind]
    asked = read(key)
    if kind == "text":
        return asked
    messages = asked.messages
    if row.get("system") is not None:
        system = reader.text("system")
        if system and messages and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": system}, *messages)
    return replace(asked, messages=messages, tools=reader.tools(), images=tuple(reader.images))


class _RowReader:
    """A reader of one row, which finds its images in the order in which they are shown."""

    def __init__(self, row: Row, where: str, folder: Path | None):
        self.row = row
        self.where = where
        self.folder = folder
        self.images: list[ImageSource] = []

    def fault(self, reason: str) -> RowError:
        return RowError(self.where, reason)

    def recognised(self, layout: str | None, column: str | None) -> tuple[str, str]:
        """Return the layout of the row and the key that shows it; a recipe may name both."""
        forced = None if layout is None else _FORCED[layout]
        forced = (column,) if column else forced
        candidates = KEYS.items() if forced is None else [(layout or "text", forced)]
        for kind, keys in candidates:
            for key in keys:
                if (value := self.row.get(key)) is not None:
                    # The key alone does not show everything: trl's conversational `prompt` holds messages.
                    holds_messages = isinstance(value, list) and value and isinstance(value[0], dict)
                    return "messages" if layout is None and holds_messages else kind, key
        setting = f"column: {column}" if column else f"layout: {layout}"
        expected = _EXPECTED if forced is None else f"{', '.join(forced)} (data.prompts says {setting})"
        present = ", ".join(f"{key} (null)" if value is None else str(key) for key, value in self.row.items())
        present = present if len(present) <= 1000 else f"{present[:997]}..."
        raise self.fault(f"expected one of {expected}; found {present or 'no keys'}.")

    def text(self, key: str) -> str:
        value = self.row[key]
        if not isinstance(value, str):
            raise self.fault(f"`{key}` must be text, found {_shown(value)}.")
        return value

    def raw_text(self, key: str) -> RowPrompt:
        return self._limited(RowPrompt("text", key, self.text(key), given=self._answers()))

    def question(self, key: str) -> RowPrompt:
        asked = self.text(key)
        if key == "instruction" and self.row.get("input"):
            asked = f"{asked}\n\n{self.text('input')}"
        return self._limited(RowPrompt("question", key, messages=_user_turn(asked), given=self._answers()))

    def turns(self, key: str) -> RowPrompt:
        turns = self.row[key]
        if not isinstance(turns, list) or not turns:
            raise self.fault(f"`{key}` must be a list that is not empty, found {_shown(turns)}.")
        if len(turns) > _MOST_TURNS:
            raise self.fault(f"`{key}` holds {len(turns):,} turns; at most {_MOST_TURNS:,} are asked.")
        for number, turn in enumerate(turns, 1):
            if not isinstance(turn, str):
                raise self.fault(f"`{key}` must hold text; its entry {number} is {_shown(turn)}.")
        answers = self.row.get("reference")
        known = answers if isinstance(answers, list) and all(isinstance(a, str) for a in answers) else []
        given = tuple(({"role": "assistant", "content": answer},) for answer in known[: len(turns)])
        asked = [_user_turn(turn) for turn in turns]
        if not all(asked):  # an empty turn is not asked, and it is not known to which turns the answers belong
            asked = [turn for turn in asked if turn] or [()]
            given = ()
        return self._limited(RowPrompt("turns", key, messages=asked[0], later=tuple(asked[1:]), given=given))

    def chat(self, key: str) -> RowPrompt:
        messages = self._messages(self.row[key])
        if key == "prompt":
            messages += self._answer()
        users = [n for n, message in enumerate(messages) if message["role"] == "user" and content_text(message).strip()]
        first = users[0] if users else len(messages)
        # An assistant's turn before any question is no answer, and many templates refuse it.
        spoken = [m for n, m in enumerate(messages) if n > first or m["role"] != "assistant"]
        turns = [tuple(group) for _, group in groupby(spoken, lambda message: message["role"] == "assistant")]
        if not users:
            return RowPrompt("messages", key)
        return self._limited(
            RowPrompt("messages", key, messages=turns[0], later=tuple(turns[2::2]), given=tuple(turns[1::2]))
        )

    def _limited(self, asked: RowPrompt) -> RowPrompt:
        """Return a prompt whose turns can be read as tokens; a raw text loses its beginning elsewhere."""
        letters = 0
        for message in chain(asked.messages, *asked.later, *asked.given):
            content = message["content"]
            letters += len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)
        if letters > LONGEST_TEXT:
            raise self.fault(f"a chat of {letters:,} letters; at most {LONGEST_TEXT:,} are read as tokens.")
        return asked

    def _answer(self) -> Turn:
        """Return the answer beside the question; () for none."""
        for key in _ANSWERS:
            value = self.row.get(key)
            if isinstance(value, str) and value.strip():
                return ({"role": "assistant", "content": value},)
            if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
                return tuple(self._messages(value))
        return ()

    def _answers(self) -> tuple[Turn, ...]:
        answer = self._answer()
        return (answer,) if answer else ()

    def tools(self) -> list[Any] | None:
        """Return the row's tools: a list, or JSON text of one."""
        tools = self.row.get("tools") or self.row.get("functions")
        if isinstance(tools, str):
            try:
                tools = parse_json(tools, "tools")
            except Unreadable as error:
                raise self.fault(f"`tools` must be a list, or JSON of one: {error.reason}.") from error
        if tools is not None and not isinstance(tools, list):
            raise self.fault(f"`tools` must be a list, or JSON of one; found {_shown(tools)}.")
        for number, tool in enumerate(tools or [], 1):
            if not isinstance(tool, dict):
                raise self.fault(f"`tools` must hold objects; its entry {number} is {_shown(tool)}.")
        return _without_nulls(tools) or None

    def _messages(self, turns: Any) -> list[Message]:
        """Return messages with `role` and `content`, from either convention."""
        if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
            raise self.fault(f"expected a list of messages, found {_shown(turns)}.")
        return [self._message(turn) for turn in turns]

    def _message(self, turn: Message) -> Message:
        role = turn.get("role", turn.get("from"))
        if not isinstance(role, str):
            found = ", ".join(turn)
            raise self.fault(f"a message needs `role` and `content` (or `from` and `value`); found the keys {found}.")
        role = _NAMES.get(role, role)
        if role not in _ROLES:
            raise self.fault(f"a message has the role {role!r}; expected one of {', '.join(_ROLES)}, human, gpt.")
        rest = {key: _without_nulls(turn[key]) for key in _READ if turn.get(key) is not None}
        if turn.get("finish_reason") == _CUT:
            rest["finish_reason"] = _CUT
        if calls := rest.get("tool_calls"):
            if not isinstance(calls, list):
                raise self.fault(f"`tool_calls` must be a list, found {_shown(calls)}.")
            rest["tool_calls"] = [self._call(call) for call in calls]
        content = turn.get("content", turn.get("value"))
        if content is None and role == "assistant" and any(rest.get(key) for key in _SPEAKING):
            content = ""  # it calls tools or only thinks
        return {"role": role, "content": self._content(content, role), **rest}

    def _content(self, content: Any, role: str) -> str | list[dict[str, Any]]:
        """Return the text of a message, or its parts if some are images."""
        if isinstance(content, list):  # parts, as the OpenAI API has them
            texts = [part.get("text") if isinstance(part, dict) else part for part in content]
            if all(isinstance(text, str) for text in texts):
                return "".join(map(str, texts))
            if any(isinstance(part, dict) and part.get("type") in _IMAGES for part in content):
                if role == "assistant":
                    raise self.fault("an assistant's message holds an image, and targets write text alone.")
                return [self._part(part) for part in content]
        if not isinstance(content, str):
            raise self.fault(f"the content of a message ({role}) must be text, found {_shown(content)}.")
        return content

    def _part(self, part: Any) -> dict[str, Any]:
        """Return a part of a message with images: a text, or an image by its digest."""
        if isinstance(part, str):
            return {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _IMAGES:
            place = next(
                (part[key] for key in ("image_url", "image", "url", "path") if part.get(key) is not None), None
            )
            place = place.get("url") if isinstance(place, dict) else place
            if isinstance(place, str) and place:
                return {"type": "image", "image": self._image(place).digest}
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        raise self.fault(
            f"a part of a message must be a text, or an image by its path or data: URL; found {_shown(part)}."
        )

    def _image(self, place: str) -> ImageSource:
        try:
            self.images.append(ImageSource.find(place, self.folder, self.where))
            check_pixels(sum(image.pixels for image in self.images), self.where)
        except BadInputError as error:
            raise self.fault(str(error).removeprefix(f"{self.where}: ")) from error
        return self.images[-1]

    def _call(self, call: Any) -> Any:
        """Return a tool call with its arguments as an object, as templates expect them; engines do the same."""
        if not isinstance(call, dict):
            raise self.fault(f"a tool call must be an object, found {_shown(call)}.")
        function = call.get("function")
        holder = function if isinstance(function, dict) else call
        if not isinstance(holder.get("name"), str):
            raise self.fault(f"a tool call must name its function, found {_shown(call)}.")
        if isinstance(holder.get("arguments"), str):
            try:
                holder = {**holder, "arguments": parse_json(holder["arguments"], "arguments")}
            except Unreadable:
                return call  # as the model wrote it: a template that takes text takes this text
        return {**call, "function": holder} if function is not None else holder


def _user_turn(text: str) -> Turn:
    return ({"role": "user", "content": text},) if text.strip() else ()


def _without_nulls(value: Any) -> Any:
    """Return a value without the entries that are null, which tables put into every row that lacks them."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
