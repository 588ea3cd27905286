"""Conversations of several turns: what the target is asked next, and what is learnt from what it said.

Every turn of the assistant is the target's own. The next question is rendered by the chat template from the target's
earlier answers, as an engine would render it; so a thought that the template drops from earlier turns is dropped here,
too. What is learnt are always the tokens that the target wrote, after the tokens that it read.

Shapes: T tokens of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from .layouts import Message
from .masks import supervised_rows
from .prompts import Prompt
from .templates import RefusedChatError, render

Tokens = Sequence[int]
Supervised = tuple[list[int], list[int]]  # input_ids `[T]`, and a loss mask `[T]`: 1 where the target wrote

_log = logging.getLogger(__name__)


def next_question(
    prompt: Prompt,
    answers: Sequence[Tokens],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
) -> tuple[int, ...] | None:
    """Return the tokens after which the target writes its next answer; None if the prompt asks nothing more.

    The first question is `prompt.tokens`; later ones begin with the conversation so far. A conversation that the chat
    template refuses with the target's answers in it ends there (see `why_ended`).

    Args:
        answers: token ids of the answers so far, in order, with or without the end token.
        max_tokens: a conversation ends before a later question that is longer (`data.max_prompt_tokens`).
    """
    if not answers or len(answers) > len(prompt.later):
        return None if answers else prompt.tokens
    try:
        [*_, messages] = _conversations(prompt, answers, tokenizer)
        question = _tokens(prompt, messages, tokenizer)
    except RefusedChatError as error:
        _log.debug("%s ends after %d answers: %s", prompt.id, len(answers), error)
        return None
    return None if max_tokens is not None and len(question) > max_tokens else question


def why_ended(prompt: Prompt, answers: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return why a conversation has fewer answers than questions: "template" refused one, or "length"; else ""."""
    if not answers or len(answers) > len(prompt.later):
        return ""
    return "template" if next_question(prompt, answers, tokenizer) is None else "length"


def next_messages(
    prompt: Prompt, answers: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase
) -> tuple[Message, ...] | None:
    """Return the chat whose rendering is the next question, for servers that render it; None for raw text.

    Args:
        answers: token ids of the answers so far; no more than `next_question` takes.
    """
    if prompt.messages is None:
        return None
    messages = prompt.messages
    for conversation in _conversations(prompt, answers, tokenizer):
        messages = tuple(conversation)
    return messages


def sequences(prompt: Prompt, answers: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase) -> list[Supervised]:
    """Return the rows that a drafter learns from, each as (input_ids, loss_mask).

    It is one row with all answers supervised where each question begins with the tokens so far. Where the template
    writes an earlier turn differently (it drops a thought), or an answer's text has other tokens when it is read again,
    a new row begins, in which what was answered from there on is supervised.

    Raises:
        ValueError: there are more answers than questions.
    """
    if len(answers) > 1 + len(prompt.later):
        raise ValueError(f"{prompt.id} asks {1 + len(prompt.later)} questions, found {len(answers)} answers.")
    rows: list[Supervised] = []
    # The answers come first: after the last one, no further question is rendered.
    for answer, question in zip(answers, _questions(prompt, answers, tokenizer), strict=False):
        tokens, mask = rows.pop() if rows and list(question[: len(rows[-1][0])]) == rows[-1][0] else ([], [])
        unlearnt = [0] * (len(question) - len(tokens))
        rows.append(([*question, *answer], [*mask, *unlearnt, *[1] * len(answer)]))
    return rows


def given_sequences(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None
) -> list[Supervised]:
    """Return the rows that a drafter learns from the answers that came with the prompt (`prompt.given`).

    Args:
        max_tokens: longer rows lose their end; those that lose all of their answers are left out.

    Raises:
        ValueError: there are none.
        BadInputError: the chat template refuses the conversation, or writes nothing that can be learnt.
    """
    if not prompt.given:
        raise ValueError(f"{prompt.id} came without answers.")
    rows = [(tokens[:max_tokens], mask[:max_tokens]) for tokens, mask in _given_rows(prompt, tokenizer)]
    return [(tokens, mask) for tokens, mask in rows if any(mask)]


def _given_rows(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[Supervised]:
    if prompt.messages is None:
        text = "".join(str(message["content"]) for message in prompt.given[0])
        end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        return sequences(prompt, [[*tokenizer(text, add_special_tokens=False)["input_ids"], *end]], tokenizer)
    messages = list(prompt.messages)
    for number, answer in enumerate(prompt.given):
        messages += [*(prompt.later[number - 1] if number else ()), *answer]
    rows = supervised_rows(tokenizer, messages, prompt.tools, prompt.template)
    return [(tokens, [int(m) for m in mask]) for tokens, mask in rows]


def _questions(
    prompt: Prompt, answers: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, ...]]:
    """Yield the first question, and the one after each answer."""
    yield prompt.tokens
    for messages in _conversations(prompt, answers, tokenizer):
        yield _tokens(prompt, messages, tokenizer)


def _conversations(
    prompt: Prompt, answers: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[Message]]:
    """Yield the conversation after each answer that is followed by something, with what follows."""
    messages = list(prompt.messages or ())
    for answer, said in zip(answers, prompt.later, strict=False):
        messages = [*messages, _answer(prompt, messages, answer, tokenizer), *said]
        yield messages


def _tokens(prompt: Prompt, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    text = _rendered(prompt, messages, tokenizer)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rendered(prompt: Prompt, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    return render(tokenizer, messages, f"prompt {prompt.id}", prompt.tools, template=prompt.template)


def _answer(prompt: Prompt, messages: Sequence[Message], answer: Tokens, tokenizer: PreTrainedTokenizerBase) -> Message:
    """Return an answer's tokens as a message for the chat template.

    A tokenizer that knows how its model's answers are built (`response_template` in transformers) tells thoughts and
    tool calls from the text. Otherwise, and where it cannot read an answer (one that was cut off in a call of a tool,
    for example), all of it is the text, up to the end token, which the template writes itself.
    """
    if getattr(tokenizer, "response_template", None):
        before = _rendered(prompt, messages, tokenizer)
        try:
            return {"role": "assistant", **tokenizer.parse_response(list(answer), prefix=before)}
        except Exception as error:  # parsers raise what they like: ValueError, JSONDecodeError, KeyError
            _log.debug("an answer to %s cannot be taken apart (%s)", prompt.id, error)
    kept, special = list(answer), set(tokenizer.all_special_ids)
    while kept and kept[-1] in special:
        kept.pop()
    return {"role": "assistant", "content": str(tokenizer.decode(kept, clean_up_tokenization_spaces=False))}
