"""The question of a row of data, whatever its layout: raw text, one question, several turns, or a chat.

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
from ..common.safe_load import JSON, Unreadable, parse_json
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
        if self.text is not None:
            return [self.text]
        return users_texts((self.messages, *self.later))

    def as_text(self) -> RowPrompt:
        """Return a single question as raw text, for a target without a chat template."""
        [message] = self.messages[-1:] or [{"content": ""}]
        return replace(self, text=message["content"], messages=(), later=(), given=self.given[:1])

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
    kind, key = _recognised(row, where, layout, (column,) if column else None)
    if kind == "text":
        return _limited(RowPrompt(kind, key, _text(row[key], key, where), given=_given(row, where)), where)
    chat = {"messages": _chat, "turns": _turns, "question": _question}[kind](row, key, where)
    system, messages = "" if row.get("system") is None else _text(row["system"], "system", where), chat.messages
    if system and messages and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return _with_images(_limited(replace(chat, messages=messages, tools=_tools(row, where)), where), folder, where)


def _with_images(asked: RowPrompt, folder: Path | None, where: str) -> RowPrompt:
    """Return a chat whose images were found, and are named by their digests."""
    turns = (asked.messages, *asked.later)
    if not num_images(chain.from_iterable(turns)):
        return asked
    found: list[ImageSource] = []

    def named(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        try:
            found.append(ImageSource.find(part["image"], folder, where))
            check_pixels(sum(image.pixels for image in found), where)
        except BadInputError as error:
            raise RowError(where, str(error).removeprefix(f"{where}: ")) from error
        return {"type": "image", "image": found[-1].digest}

    def of_message(message: Message) -> Message:
        content = message["content"]
        return message if isinstance(content, str) else message | {"content": [named(part) for part in content]}

    messages, *later = (tuple(of_message(message) for message in turn) for turn in turns)
    return replace(asked, messages=messages, later=tuple(later), images=tuple(found))


def _limited(asked: RowPrompt, where: str) -> RowPrompt:
    """Return a prompt whose turns can be read as tokens; a raw text loses its beginning elsewhere."""
    said = chain(asked.messages, *asked.later, *asked.given)
    parts = chain.from_iterable(m["content"] if isinstance(m["content"], list) else [m["content"]] for m in said)
    letters = sum(len(part if isinstance(part, str) else part.get("text", "")) for part in parts)
    if letters > LONGEST_TEXT:
        raise RowError(where, f"a chat of {letters:,} letters; at most {LONGEST_TEXT:,} are read as tokens.")
    return asked


def chat_messages(turns: Any, where: str) -> list[Message]:
    """Return messages with `role` and `content`, from either convention. RowError: there is none of these."""
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        raise RowError(where, f"expected a list of messages, found {_shown(turns)}.")
    return [_message(turn, where) for turn in turns]


def _recognised(row: Row, where: str, layout: str | None, columns: tuple[str, ...] | None) -> tuple[str, str]:
    """Return the layout of a row and the key that shows it; a recipe may name both."""
    asked = None if layout is None and columns is None else columns or _FORCED[layout or "text"]
    for kind, keys in KEYS.items() if asked is None else [(layout or "text", asked)]:
        for key in keys:
            if (value := row.get(key)) is not None:
                # The key alone does not show everything: trl's conversational `prompt` holds messages.
                holds_messages = isinstance(value, list) and value and isinstance(value[0], dict)
                return "messages" if layout is None and holds_messages else kind, key
    setting = f"layout: {layout}" if columns is None else f"column: {columns[0]}"
    expected = _EXPECTED if asked is None else f"{', '.join(asked)} (data.prompts says {setting})"
    present = ", ".join(f"{key} (null)" if value is None else str(key) for key, value in row.items())
    present = present if len(present) <= 1000 else f"{present[:997]}..."
    raise RowError(where, f"expected one of {expected}; found {present or 'no keys'}.")


def _question(row: Row, key: str, where: str) -> RowPrompt:
    asked = _text(row[key], key, where)
    if key == "instruction" and row.get("input"):
        asked = f"{asked}\n\n{_text(row['input'], 'input', where)}"
    return RowPrompt("question", key, messages=_user_turn(asked), given=_given(row, where))


def _turns(row: Row, key: str, where: str) -> RowPrompt:
    turns = row[key]
    if not isinstance(turns, list) or not turns:
        raise RowError(where, f"`{key}` must be a list that is not empty, found {_shown(turns)}.")
    if len(turns) > _MOST_TURNS:
        raise RowError(where, f"`{key}` holds {len(turns):,} turns; at most {_MOST_TURNS:,} are asked.")
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, str):
            raise RowError(where, f"`{key}` must hold text; its entry {number} is {_shown(turn)}.")
    answers = row.get("reference")
    known = answers if isinstance(answers, list) and all(isinstance(a, str) for a in answers) else []
    given = tuple(({"role": "assistant", "content": answer},) for answer in known[: len(turns)])
    asked = [_user_turn(turn) for turn in turns]
    if not all(asked):  # an empty turn is not asked, and it is not known to which turns the answers belong
        asked, given = [turn for turn in asked if turn] or [()], ()
    return RowPrompt("turns", key, messages=asked[0], later=tuple(asked[1:]), given=given)


def _chat(row: Row, key: str, where: str) -> RowPrompt:
    messages = chat_messages(row[key], where)
    if key == "prompt":
        messages += _answer(row, where)
    asking = [n for n, message in enumerate(messages) if message["role"] == "user" and content_text(message).strip()]
    first = asking[0] if asking else len(messages)
    # An assistant's turn before any question is no answer, and many templates refuse it.
    spoken = [m for n, m in enumerate(messages) if n > first or m["role"] != "assistant"]
    turns = [tuple(group) for _, group in groupby(spoken, lambda message: message["role"] == "assistant")]
    if not asking:
        return RowPrompt("messages", key)
    return RowPrompt("messages", key, messages=turns[0], later=tuple(turns[2::2]), given=tuple(turns[1::2]))


def _user_turn(text: str) -> Turn:
    """Return a user's turn; () if it is empty."""
    return ({"role": "user", "content": text},) if text.strip() else ()


def _answer(row: Row, where: str) -> Turn:
    """Return the answer beside the question of a row; () for none."""
    for key in _ANSWERS:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return ({"role": "assistant", "content": value},)
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            return tuple(chat_messages(value, where))
    return ()


def _given(row: Row, where: str) -> tuple[Turn, ...]:
    answer = _answer(row, where)
    return (answer,) if answer else ()


def _tools(row: Row, where: str) -> list[Any] | None:
    """Return the tools of a row: a list, or JSON text of one."""
    tools = row.get("tools") or row.get("functions")
    if isinstance(tools, str):
        try:
            tools = parse_json(tools, "tools")
        except Unreadable as error:
            raise RowError(where, f"`tools` must be a list, or JSON of one: {error.reason}.") from error
    if tools is not None and not isinstance(tools, list):
        raise RowError(where, f"`tools` must be a list, or JSON of one; found {_shown(tools)}.")
    for number, tool in enumerate(tools or [], 1):
        if not isinstance(tool, dict):
            raise RowError(where, f"`tools` must hold objects; its entry {number} is {_shown(tool)}.")
    return _without_nulls(tools) or None


def _message(turn: Message, where: str) -> Message:
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str):
        raise RowError(
            where, f"a message needs `role` and `content` (or `from` and `value`); found the keys {', '.join(turn)}."
        )
    role = _NAMES.get(role, role)
    if role not in _ROLES:
        raise RowError(where, f"a message has the role {role!r}; expected one of {', '.join(_ROLES)}, human, gpt.")
    rest = {k: _without_nulls(turn[k]) for k in _READ if turn.get(k) is not None}
    if calls := rest.get("tool_calls"):
        if not isinstance(calls, list):
            raise RowError(where, f"`tool_calls` must be a list, found {_shown(calls)}.")
        rest["tool_calls"] = [_call(call, where) for call in calls]
    return {"role": role, "content": _content(content, role, rest, where), **rest}


def _content(content: Any, role: str, rest: Message, where: str) -> str | list[dict[str, Any]]:
    """Return the text of a message, or its parts if some are images.

    The text of an assistant that calls tools or only thinks may be empty.
    """
    if content is None and role == "assistant" and any(rest.get(k) for k in _SPEAKING):
        return ""
    if isinstance(content, list):  # parts, as the OpenAI API has them
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
        if any(isinstance(part, dict) and part.get("type") in _IMAGES for part in content):
            if role == "assistant":
                raise RowError(where, "an assistant's message holds an image, and targets write text alone.")
            return [_part(part, where) for part in content]
    if not isinstance(content, str):
        raise RowError(where, f"the content of a message ({role}) must be text, found {_shown(content)}.")
    return content


def _part(part: Any, where: str) -> dict[str, Any]:
    """Return a part of a message with images: a text, or an image with the place where it is."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _IMAGES:
        place = next((part[key] for key in ("image_url", "image", "url", "path") if part.get(key) is not None), None)
        place = place.get("url") if isinstance(place, dict) else place
        if isinstance(place, str) and place:
            return {"type": "image", "image": place}
    elif isinstance(part, dict) and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise RowError(
        where, f"a part of a message must be a text, or an image by its path or data: URL; found {_shown(part)}."
    )


def _call(call: Any, where: str) -> Any:
    """Return a tool call with its arguments as an object, as templates expect them; engines do the same."""
    if not isinstance(call, dict):
        raise RowError(where, f"a tool call must be an object, found {_shown(call)}.")
    function = call.get("function")
    holder = function if isinstance(function, dict) else call
    if not isinstance(holder.get("name"), str):
        raise RowError(where, f"a tool call must name its function, found {_shown(call)}.")
    arguments = holder.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = parse_json(arguments, "arguments", JSON)
        except Unreadable:
            return call  # as the model wrote it: a template that takes text takes this text
        holder = {**holder, "arguments": parsed}
    return {**call, "function": holder} if function is not None else holder


def _without_nulls(value: Any) -> Any:
    """Return a value without the entries that are null, which tables put into every row that lacks them."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise RowError(where, f"`{key}` must be text, found {_shown(value)}.")
    return value


def _shown(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
