"""Conversations through a chat template: rendered for the target, asked turn by turn, and supervised.

Every turn of the assistant is the target's own. The next question is rendered by the chat template from the target's
earlier answers, as an engine would render it. Learnt are the tokens that the target wrote, after those that it read.

A template is a stranger's program, which the library runs in a sandbox.

Shapes: T tokens of a row.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..targets.images import PromptImage, insert_images
from ..targets.tokenizers import Rendered, render_chat
from .dataset_formats import Message, content_text, num_images
from .prompt_table import Prompt

Tokens = Sequence[int]
Supervised = tuple[list[int], list[int]]  # input_ids `[T]`, and a loss mask `[T]`: 1 where the target wrote
Span = tuple[int, int]  # characters of the rendered text, end excluded

_EMPTY_THOUGHT = re.compile(  # <think></think>, [THINK][/THINK], <|START_THINKING|><|END_THINKING|>
    r"\s*(<([\w:]+)>|\[(\w+)\]|<\|START_(\w+)\|>)\s*(</\2>|\[/\3\]|<\|END_\4\|>)\s*"
)

_log = logging.getLogger(__name__)


class RefusedChatError(BadInputError):
    """A conversation that a chat template does not take; `reason` is the sentence without its place."""

    def __init__(self, where: str, what: str, roles: Sequence[str]):
        self.reason = f"{what}. Its roles: {list(roles)}."
        super().__init__(f"{where}: {self.reason}")


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    where: str,
    tools: Any = None,
    answer: bool = True,
    template: Mapping[str, Any] | None = None,
) -> str:
    """Return the chat as text; with `answer`, up to the beginning of the assistant's next turn.

    Args:
        where: the chat's place, for errors.
        template: further arguments of the chat template, such as `enable_thinking`.

    Raises:
        RefusedChatError: the template does not take this conversation.
        BadInputError: there is no template.
    """
    return _render(tokenizer, messages, where, tools, answer, template).text


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    where: str,
    tools: Any,
    answer: bool,
    template: Mapping[str, Any] | None,
) -> Rendered:
    """Return the chat as `render` does, with the places that the template marks as generated."""
    if not getattr(tokenizer, "chat_template", None):
        raise BadInputError(
            f"{where}: is a chat, but the target's tokenizer has no chat template; use raw text (`text`), or set "
            "tokenizer.chat_template."
        )
    if num_images(messages):  # templates of such models may take parts alone
        messages = [m if isinstance(m["content"], list) else m | {"content": _as_parts(m["content"])} for m in messages]
    try:
        return render_chat(tokenizer, messages, tools, answer, template or {})
    except Exception as error:  # templates raise what they like: TemplateError, UndefinedError, TypeError
        what = str(error) or type(error).__name__
        roles = [m["role"] for m in messages]
        raise RefusedChatError(where, f"the target's chat template refuses this conversation: {what}", roles) from error


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def supervised_rows(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: Any = None,
    template: Mapping[str, Any] | None = None,
    images: Sequence[PromptImage] = (),
) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens of rows, and True at those of the assistant's turns, each of which is supervised once.

    Works for any chat template: a turn is what rendering it adds to the rendered prefix that ends where the assistant
    answers, end markers included. The text is encoded once, as the target sees it, and a token counts only if it lies
    inside a turn as a whole, and inside the template's `{% generation %}` markers if it has any.

    A turn that the template writes differently once later ones follow (without its reasoning) gets a row that ends with
    it; all others share the whole conversation. A turn that the template never writes after its question is in no row,
    and what the template refuses ends the conversation.

    Args:
        template: further arguments of the chat template, such as `enable_thinking`.
        images: those in the messages, in order.

    Raises:
        BadInputError: nothing, or everything, would be supervised; the message shows a sample of the text.
    """
    chat = _Chat(tokenizer, list(messages), tools, template, images).as_far_as_taken()
    spans = dict(_assistant_spans(chat))
    rows = []
    for number in chat.answering():
        early = replace(chat, messages=chat.messages[: number + 1])
        own = [] if number in spans else [span for n, span in _assistant_spans(early) if n == number]
        rows += [_masked(early, own)] if own else []
    return [*rows, *([] if rows and not spans else [_masked(chat, list(spans.values()))])]


@dataclass(frozen=True)
class _Chat:
    """A conversation, and how it is rendered."""

    tokenizer: PreTrainedTokenizerBase
    messages: list[dict[str, Any]]
    tools: Any
    template: Mapping[str, Any] | None
    images: Sequence[PromptImage] = ()

    def rendered(self, count: int, answer: bool = False) -> Rendered:
        messages = self.messages[:count]
        made = _render(self.tokenizer, messages, "this conversation", self.tools, answer, self.template)
        text, moved = insert_images(made.text, self.images[: num_images(messages)])
        return Rendered(text, [(moved(begin), moved(end)) for begin, end in made.generated])

    def answering(self) -> list[int]:
        """Return the places of the assistant's messages that answer something."""
        return [i for i, m in enumerate(self.messages) if m["role"] == "assistant" and i > 0]

    def as_far_as_taken(self) -> _Chat:
        """Return the conversation up to the last answer with which the template takes it; itself, if that is none."""
        for last in [len(self.messages) - 1, *reversed(self.answering())]:
            with suppress(RefusedChatError):
                self.rendered(last + 1)
                return replace(self, messages=self.messages[: last + 1])
        return self


def _assistant_spans(chat: _Chat) -> Iterator[tuple[int, Span]]:
    """Yield the places of the assistant's messages, and the spans of those that the whole text still holds."""
    text = chat.rendered(len(chat.messages)).text
    for i in chat.answering():
        before, after = chat.rendered(i, answer=True).text, chat.rendered(i + 1).text
        if text.startswith(before) and text.startswith(after) and len(before) < len(after):
            yield i, (len(before) + _empty_thought(after[len(before) :], chat.messages[i]), len(after))


def _empty_thought(answer: str, message: Message) -> int:
    """Return the length of the empty thought that a template writes before an answer which came without one."""
    found = _EMPTY_THOUGHT.match(answer)
    return 0 if found is None or found[5] in content_text(message) else found.end()


def _masked(chat: _Chat, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and a mask of those in `spans`. BadInputError: none of them, or all."""
    tokenizer = chat.tokenizer
    rendered = chat.rendered(len(chat.messages))
    tokens, ends = _encode(tokenizer, rendered.text)
    places = list(zip([0, *ends[:-1]], ends, strict=True))
    mask = [any(begin <= b and e <= end for begin, end in spans) for b, e in places]
    mask = _without_trailing_space(tokenizer, tokens, mask)
    if rendered.generated:  # as the library marks them: a token counts that lies inside in part
        mask = [
            m and any(begin < e and b < end for begin, end in rendered.generated)
            for m, (b, e) in zip(mask, places, strict=True)
        ]
    if any(mask) and not all(mask):
        return tokens, mask
    sample = tokenizer.decode(tokens)
    sample = sample if len(sample) <= 300 else f"{sample[:150]} … {sample[-150:]}"
    roles = ", ".join(message["role"] for message in chat.messages) or "none"
    raise BadInputError(
        f"{'every token' if any(mask) else 'no token'} of this conversation would be supervised (roles: {roles}). It "
        "needs a turn that asks and an assistant's turn that answers, and a template that renders both. As rendered: "
        f"{sample!r}"
    )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of `text`, and the place in it where each one ends, and the next one begins."""
    if not tokenizer.is_fast:
        tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        prefixes = (tokens[: n + 1] for n in range(len(tokens)))
        return tokens, [len(tokenizer.decode(prefix, clean_up_tokenization_spaces=False)) for prefix in prefixes]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # Only the ends: tokenizers may leave the space in front of a word out of its offsets.
    return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]


def _without_trailing_space(tokenizer: PreTrainedTokenizerBase, tokens: list[int], mask: list[bool]) -> list[bool]:
    """Unmark white space that a template writes after its end marker: the target stops at the marker."""
    kept = list(mask)
    for last in (i for i in range(len(mask)) if mask[i] and not (mask[i + 1 :] or [False])[0]):
        i = last
        while mask[i] and not str(tokenizer.decode([tokens[i]])).strip():
            i -= 1
        if mask[i] and _is_special(tokenizer, tokens[i]):
            kept[i + 1 : last + 1] = [False] * (last - i)
    return kept


def _is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether a token is left out of texts; of those that end a turn, many have no name in the tokenizer."""
    return bool(tokenizer.decode([token])) and not tokenizer.decode([token], skip_special_tokens=True)


def next_question(
    prompt: Prompt, answers: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None
) -> tuple[int, ...] | None:
    """Return the tokens before the target's next answer; None if the prompt asks nothing more.

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
    """Return "template" or "length" if that ended a conversation before its last question; else ""."""
    if not answers or len(answers) > len(prompt.later):
        return ""
    return "template" if next_question(prompt, answers, tokenizer) is None else "length"


def next_messages(
    prompt: Prompt, answers: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase
) -> tuple[Message, ...] | None:
    """Return the chat that renders as `next_question`, for servers that render it; None for raw text."""
    if prompt.messages is None:
        return None
    [*_, messages] = [prompt.messages, *_conversations(prompt, answers, tokenizer)]
    return tuple(messages)


def template_answer(
    prompt: Prompt,
    messages: Sequence[Message],
    answer: Message,
    tokenizer: PreTrainedTokenizerBase,
    ending: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Return the tokens that the chat template writes for an answer to `messages`, and the one that ends its turn.

    The second is empty where none of the `ending` tokens follows. Both are where the template refuses the
    conversation, or writes what stands before the answer differently.
    """
    where = f"prompt {prompt.id}"
    try:
        before = render(tokenizer, messages, where, prompt.tools, template=prompt.template)
        whole = render(tokenizer, [*messages, answer], where, prompt.tools, False, prompt.template)
    except RefusedChatError:
        return [], []
    if not whole.startswith(before):
        return [], []
    context = tokenizer(before, add_special_tokens=False)["input_ids"]
    tokens = tokenizer(whole, add_special_tokens=False)["input_ids"]
    if tokens[: len(context)] != context:
        context, tokens = [], tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]
    written = list(tokens[len(context) :])
    end = next((place for place, token in enumerate(written) if token in ending), len(written))
    return written[:end], written[end : end + 1]


def sequences(prompt: Prompt, answers: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase) -> list[Supervised]:
    """Return the rows that a drafter learns from, each as (input_ids, loss_mask).

    It is one row with all answers supervised where each question begins with the tokens so far. Where the template
    writes an earlier turn differently (it drops a thought), or an answer's text has other tokens when it is read again,
    a new row begins, in which the answers from there on are supervised.
    """
    if len(answers) > 1 + len(prompt.later):
        raise ValueError(f"{prompt.id} asks {1 + len(prompt.later)} questions, found {len(answers)} answers.")
    rows: list[Supervised] = []
    later = (_tokens(prompt, messages, tokenizer) for messages in _conversations(prompt, answers, tokenizer))
    # The answers come first: after the last one, no further question is rendered.
    for answer, question in zip(answers, chain([prompt.tokens], later), strict=False):
        tokens, mask = rows.pop() if rows and list(question[: len(rows[-1][0])]) == rows[-1][0] else ([], [])
        unlearnt = [0] * (len(question) - len(tokens))
        rows.append(([*question, *answer], [*mask, *unlearnt, *[1] * len(answer)]))
    return rows


def given_sequences(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None = None,
    ending: Sequence[int] = (),
    counts: Counter[str] | None = None,
) -> list[Supervised]:
    """Return the rows that a drafter learns from the answers that came with the prompt (`prompt.given`).

    A last answer whose `finish_reason` is "length" was cut: the end that the template writes after it is not learnt.

    Args:
        max_tokens: longer rows lose their end; those that lose all of their answers are dropped.
        ending: the target's end tokens; one that is the only one ends an answer of raw text.
        counts: gets the numbers of answers, of those that lose their end, of those without a known one, and of those
            that the template does not write: "answers", "answers_cut", "ends_unknown" and "answers_unlearnable".

    Raises:
        BadInputError: the chat template refuses the conversation, or writes nothing that can be learnt.
    """
    if not prompt.given:
        raise ValueError(f"{prompt.id} came without answers.")
    whole = _given_rows(prompt, tokenizer, ending)
    there = sum(_num_answers(mask) for _, mask in whole)
    is_last = there == sum(map(len, prompt.given))  # the last supervised answer is the last given one
    cut = is_last and prompt.given[-1][-1].get("finish_reason") == "length"
    if cut:
        whole = [*whole[:-1], _without_end(*whole[-1], ending)]
    if counts is not None:
        counts["answers"] += there
        counts["answers_cut"] += cut + there - sum(_num_answers(mask[:max_tokens], mask) for _, mask in whole)
        counts["ends_unknown"] += prompt.messages is None and not end_of_text(ending)
        counts["answers_unlearnable"] += max(0, sum(map(len, prompt.given)) - there)
    rows = [(tokens[:max_tokens], mask[:max_tokens]) for tokens, mask in whole]
    return [(tokens, mask) for tokens, mask in rows if any(mask)]


def _given_rows(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, ending: Sequence[int]) -> list[Supervised]:
    if prompt.messages is None:
        text = "".join(str(message["content"]) for message in prompt.given[0])
        written = [*tokenizer(text, add_special_tokens=False)["input_ids"], *end_of_text(ending)]
        return sequences(prompt, [written], tokenizer)
    messages = list(prompt.messages)
    for number, answer in enumerate(prompt.given):
        messages += [*(prompt.later[number - 1] if number else ()), *answer]
    rows = supervised_rows(tokenizer, messages, prompt.tools, prompt.template, prompt.images)
    return [(tokens, [int(m) for m in mask]) for tokens, mask in rows]


def _without_end(tokens: list[int], mask: list[int], ending: Sequence[int]) -> Supervised:
    """Return a row whose last answer ends before its end tokens."""
    end = max((i + 1 for i, learnt in enumerate(mask) if learnt and tokens[i] not in ending), default=0)
    return tokens[:end], mask[:end]


def _num_answers(mask: Sequence[int], whole: Sequence[int] = ()) -> int:
    """Return the number of answers in a row, without one that goes on in the `whole` of it."""
    goes_on = bool(mask and mask[-1] and any(whole[len(mask) : len(mask) + 1]))
    return sum(bool(learnt) for learnt, _ in groupby(mask)) - goes_on


def end_of_text(ending: Sequence[int]) -> list[int]:
    """Return the token that ends raw text, a target's only end token; [] of several, of which some end turns."""
    return list(ending) if len(ending) == 1 else []


def _conversations(
    prompt: Prompt, answers: Sequence[Tokens], tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[Message]]:
    """Yield the conversation up to the next question, after each answer that one follows."""
    messages = list(prompt.messages or ())
    for answer, following in zip(answers, prompt.later, strict=False):
        messages = [*messages, _answer(prompt, messages, answer, tokenizer), *following]
        yield messages


def _tokens(prompt: Prompt, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return tuple(tokenizer(_rendered(prompt, messages, tokenizer), add_special_tokens=False)["input_ids"])


def _rendered(prompt: Prompt, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    where = f"prompt {prompt.id}"
    text = render(tokenizer, messages, where, prompt.tools, template=prompt.template)
    try:
        return insert_images(text, prompt.images[: num_images(messages)])[0]
    except BadInputError as error:  # an answer holds a marker
        raise RefusedChatError(where, str(error).rstrip("."), [m["role"] for m in messages]) from error


def _answer(prompt: Prompt, messages: Sequence[Message], answer: Tokens, tokenizer: PreTrainedTokenizerBase) -> Message:
    """Return an answer's tokens as a message for the chat template.

    A tokenizer with a `response_template` (of transformers) separates thoughts and tool calls from the text. Otherwise,
    and where it cannot read an answer (cut off in a call of a tool, for example), all of it is the text, up to the end
    token, which the template writes itself.
    """
    if getattr(tokenizer, "response_template", None):
        before = _rendered(prompt, messages, tokenizer)
        try:
            parsed: Any = tokenizer.parse_response(str(tokenizer.decode(list(answer))), prefix=before)
            return {"role": "assistant", **parsed}
        except Exception as error:  # parsers raise what they like: ValueError, JSONDecodeError, KeyError
            _log.debug("an answer to %s cannot be parsed (%s)", prompt.id, error)
    kept = list(answer)
    while kept and _is_special(tokenizer, kept[-1]):
        kept.pop()
    return {"role": "assistant", "content": str(tokenizer.decode(kept, clean_up_tokenization_spaces=False))}
