"""Which tokens of a whole conversation a drafter should learn: those of the assistant's turns.

Works for any chat template, with or without `{% generation %}` markers: a turn is what rendering it adds to the
rendered prefix that ends where the assistant answers. The boundaries are places in the text; the text is encoded once,
as the target sees it, and a token counts only if it lies inside a turn as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..ground import BadInputError
from .layouts import chat_messages
from .templates import render

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
    where = "this conversation"
    turns = chat_messages(list(messages), where)
    text = render(tokenizer, turns, where, tools, answer=False, template=template)
    tokens, ends = _encode(tokenizer, text)
    spans = _assistant_spans(tokenizer, turns, text, tools, template)
    mask = [any(begin <= b and e <= end for begin, end in spans) for b, e in zip([0, *ends[:-1]], ends, strict=True)]
    mask = _without_trailing_space(tokenizer, tokens, mask)
    _check(tokenizer, tokens, mask, [turn["role"] for turn in turns])
    return tokens, mask


def _assistant_spans(
    tokenizer: PreTrainedTokenizerBase,
    turns: list[dict[str, Any]],
    text: str,
    tools: Any,
    template: Mapping[str, Any] | None,
) -> list[Span]:
    spans = []
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant" or i == 0:
            continue
        before = render(tokenizer, turns[:i], "this conversation", tools, template=template)
        after = render(tokenizer, turns[: i + 1], "this conversation", tools, answer=False, template=template)
        if text.startswith(before) and text.startswith(after) and len(before) < len(after):
            spans.append((len(before), len(after)))
    return spans


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
