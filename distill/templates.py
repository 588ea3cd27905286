"""A chat template, rendered within limits: it came with a target, and whoever wrote it wrote a program.

The library runs it in a sandbox, which keeps it from everything outside; a sandbox does not keep it from running for
ever or from filling the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment
from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..common.safe_load import MEGABYTE, limited

SECONDS, MEMORY, _LONGEST = 3.0, 512 * MEGABYTE, MEGABYTE
_COMPILED = "<template>"  # what jinja calls the code that it makes of one


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: Any,
    answer: bool,
    arguments: Mapping[str, Any],
) -> str:
    """Return what the tokenizer's chat template makes of a conversation, given further `arguments`.

    Raises:
        Exception: whatever the template raises; OverBudgetError, MemoryError or ValueError where it asks for too much.
    """
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template]:
        _require_plain(str(text))
    with limited(SECONDS, MEMORY, _COMPILED):
        return str(
            tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=answer, **arguments
            )
        )


def marked_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: Any, arguments: Mapping[str, Any]
) -> tuple[list[int], list[bool]] | None:
    """Return the tokens of a whole chat and what the template's `{% generation %}` markers hold; None without any."""
    if not tokenizer.is_fast:
        return None
    with limited(SECONDS, MEMORY, _COMPILED):
        found: Any = tokenizer.apply_chat_template(
            list(messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True, **arguments
        )
    mask = [bool(marked) for marked in found["assistant_masks"]]
    return (list(found["input_ids"]), mask) if any(mask) else None


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    where: str,
    tools: Any = None,
    answer: bool = True,
    template: Mapping[str, Any] | None = None,
) -> str:
    """Return the chat as text; with `answer`, up to the place where the assistant's next turn begins.

    Args:
        where: the chat's place, for errors.
        template: further arguments of the chat template, such as `enable_thinking`.

    Raises:
        RefusedChatError: the template does not take this conversation.
        BadInputError: there is no template.
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
        roles = [m["role"] for m in messages]
        raise RefusedChatError(where, f"the target's chat template refuses this conversation: {what}", roles) from error


class RefusedChatError(BadInputError):
    """A conversation that a chat template does not take; `reason` is the sentence without its place."""

    def __init__(self, where: str, what: str, roles: Sequence[str]):
        self.reason = f"{what}. Its roles: {list(roles)}."
        super().__init__(f"{where}: {self.reason}")


@lru_cache(maxsize=16)
def _require_plain(template: str) -> None:
    """Raise ValueError for a template that is too long, or has powers: 9 ** 9 ** 9 takes hours in a single step."""
    if len(template) > _LONGEST:
        raise ValueError(f"it is longer than {_LONGEST // MEGABYTE} MB")
    before = ""
    for _, kind, text in Environment().lex(template):
        if kind == "operator" and text == "**" and before not in ("(", ","):  # not the ** of a call
            raise ValueError("it computes powers (**), which no conversation needs")
        before = before if kind == "whitespace" else text
