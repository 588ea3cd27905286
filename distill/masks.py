"""Which tokens of a whole conversation a drafter should learn: those of the assistant's turns.

Works for any chat template: a turn is what rendering it adds to the rendered prefix that ends where the assistant
answers. The boundaries are places in the text; the text is encoded once, as the target sees it, and a token counts only
if it lies inside a turn as a whole. Where a template has `{% generation %}` markers, what they leave out is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from .layouts import chat_messages
from .templates import marked_tokens, render

_MARKERS = re.compile(r"\{%-?\s*generation\b")

Span = tuple[int, int]  # characters of the rendered text, end excluded


def supervised_mask(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: Any = None,
    template: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a rendered conversation, and True at those of the assistant's turns, end markers included.

    Some templates write an earlier turn differently once later ones follow (they drop its reasoning). Such a turn is
    not what the target says at that place, so it stays unsupervised; the last one always counts.

    Args:
        template: further arguments of the chat template, such as `enable_thinking`.

    Raises:
        BadInputError: nothing, or everything, would be supervised; the message shows a sample of the text.
    """
    chat = _Chat(tokenizer, chat_messages(list(messages), "this conversation"), tools, template)
    return _masked(chat, [span for _, span in _assistant_spans(chat)])


def supervised_rows(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: Any = None,
    template: Mapping[str, Any] | None = None,
) -> list[tuple[list[int], list[bool]]]:
    """Return the rows in which every turn of the assistant is supervised once, each as tokens and mask.

    A turn that the template writes differently once later ones follow gets a row that ends with it; all others share
    the whole conversation.

    Raises:
        BadInputError: as `supervised_mask`.
    """
    chat = _Chat(tokenizer, chat_messages(list(messages), "this conversation"), tools, template)
    spans = dict(_assistant_spans(chat))
    rows = []
    for number in chat.answering():
        if number not in spans:
            early = replace(chat, messages=chat.messages[: number + 1])
            rows.append(_masked(early, [span for n, span in _assistant_spans(early) if n == number]))
    return [*rows, _masked(chat, list(spans.values()))]


@dataclass(frozen=True)
class _Chat:
    """A conversation, and how it is rendered."""

    tokenizer: PreTrainedTokenizerBase
    messages: list[dict[str, Any]]
    tools: Any
    template: Mapping[str, Any] | None

    def rendered(self, count: int, answer: bool = False) -> str:
        """Return the text of the first `count` messages."""
        where = "this conversation"
        return render(self.tokenizer, self.messages[:count], where, self.tools, answer, self.template)

    def answering(self) -> list[int]:
        """Return the places of the assistant's messages that answer something."""
        return [i for i, m in enumerate(self.messages) if m["role"] == "assistant" and i > 0]


def _masked(chat: _Chat, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    tokenizer = chat.tokenizer
    tokens, ends = _encode(tokenizer, chat.rendered(len(chat.messages)))
    mask = [any(begin <= b and e <= end for begin, end in spans) for b, e in zip([0, *ends[:-1]], ends, strict=True)]
    mask = _without_trailing_space(tokenizer, tokens, mask)
    if _MARKERS.search(str(tokenizer.chat_template)):
        mask = _marked(chat, tokens, mask)
    _check(tokenizer, tokens, mask, [message["role"] for message in chat.messages])
    return tokens, mask


def _assistant_spans(chat: _Chat) -> Iterator[tuple[int, Span]]:
    """Yield the places of the assistant's messages, and what each one adds to the text, where it is still there."""
    text = chat.rendered(len(chat.messages))
    for i in chat.answering():
        before, after = chat.rendered(i, answer=True), chat.rendered(i + 1)
        if text.startswith(before) and text.startswith(after) and len(before) < len(after):
            yield i, (len(before), len(after))


def _marked(chat: _Chat, tokens: list[int], mask: list[bool]) -> list[bool]:
    """Return the mask without what a template's own `{% generation %}` markers leave out of the assistant's turns."""
    theirs = marked_tokens(chat.tokenizer, chat.messages, chat.tools, chat.template or {})
    if theirs is None or theirs[0] != tokens:
        return mask
    return [own and marked for own, marked in zip(mask, theirs[1], strict=True)]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of `text`, and where in it each one ends. A token begins where the one before it ends."""
    if not tokenizer.is_fast:
        tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return tokens, [
            len(tokenizer.decode(tokens[: n + 1], clean_up_tokenization_spaces=False)) for n in range(len(tokens))
        ]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # Only the ends: tokenizers may leave the space in front of a word out of its offsets.
    return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]


def _without_trailing_space(tokenizer: PreTrainedTokenizerBase, tokens: list[int], mask: list[bool]) -> list[bool]:
    """Unmark white space that a template writes after its end marker: the target stops at the marker."""
    special, kept = set(tokenizer.all_special_ids), list(mask)
    for last in (i for i in range(len(mask)) if mask[i] and not (mask[i + 1 :] or [False])[0]):
        i = last
        while mask[i] and tokens[i] not in special and not str(tokenizer.decode([tokens[i]])).strip():
            i -= 1
        if mask[i] and tokens[i] in special:
            kept[i + 1 : last + 1] = [False] * (last - i)
    return kept


def _check(tokenizer: PreTrainedTokenizerBase, tokens: list[int], mask: list[bool], roles: list[str]) -> None:
    if any(mask) and not all(mask):
        return
    what = "every token" if any(mask) else "no token"
    sample = tokenizer.decode(tokens)
    sample = sample if len(sample) <= 300 else f"{sample[:150]} … {sample[-150:]}"
    raise BadInputError(
        f"{what} of this conversation would be supervised (roles: {', '.join(roles) or 'none'}). It needs a turn that "
        "asks and an assistant's turn "
        f"that answers, and a template that renders both. As rendered: {sample!r}"
    )
