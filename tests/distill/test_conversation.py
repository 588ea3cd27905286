"""Every turn is the target's own answer to what it was really asked, and what is learnt is what it really wrote."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.distill.conversation import given_sequences, next_question, render, sequences, why_ended
from outrider.distill.layouts import Message
from outrider.distill.prompts import Prompt

SYSTEM = {"role": "system", "content": "be brief"}
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ask(tokenizer: PreTrainedTokenizerFast, first: str, *later: str, **rest: Any) -> Prompt:
    messages = (SYSTEM, user(first))
    text = render(tokenizer, messages, "here", template=rest.get("template"))
    tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return Prompt("p", "s", tokens, text, messages, tuple((user(t),) for t in later), **rest)


def said(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def learnt(tokenizer: PreTrainedTokenizerFast, row: tuple[list[int], list[int]]) -> str:
    """The row's text, with what is supervised in brackets."""
    text, before = "", 0
    for token, now in [*zip(*row, strict=True), (None, 0)]:
        text += ("[" if now else "]") if now != before else ""
        text, before = text + (tokenizer.decode([token]) if token is not None else ""), now
    return text


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=template,
    )


def test_questions_follow_one_another_with_the_targets_own_answers(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = ask(tiny_tokenizer, "one", "two", "three")
    answers: list[list[int]] = []
    texts = []
    while (question := next_question(prompt, answers, tiny_tokenizer)) is not None:
        texts.append(tiny_tokenizer.decode(question))
        answers.append(said(tiny_tokenizer, f"answer {len(answers)}"))
    start = "<|system|>be brief<|end|><|user|>one<|end|><|assistant|>"
    second = start + "answer 0<|end|><|user|>two<|end|><|assistant|>"
    assert texts == [start, second, second + "answer 1<|end|><|user|>three<|end|><|assistant|>"]
    [row] = sequences(prompt, answers, tiny_tokenizer)
    assert learnt(tiny_tokenizer, row) == (
        "<|system|>be brief<|end|><|user|>one<|end|><|assistant|>[answer 0<|end|>]<|user|>two<|end|><|assistant|>"
        "[answer 1<|end|>]<|user|>three<|end|><|assistant|>[answer 2<|end|>]"
    )


def test_raw_text_and_a_single_question_ask_once(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    for prompt in (Prompt("p", "s", (5, 6, 7), "abc"), ask(tiny_tokenizer, "one")):
        assert next_question(prompt, [], tiny_tokenizer) == prompt.tokens
        assert next_question(prompt, [[9]], tiny_tokenizer) is None
        assert sequences(prompt, [[9, 1]], tiny_tokenizer) == [
            ([*prompt.tokens, 9, 1], [0] * len(prompt.tokens) + [1, 1])
        ]


def test_an_answer_that_was_cut_short_is_followed_by_the_templates_end_marker(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = ask(tiny_tokenizer, "one", "two")
    answers = [said(tiny_tokenizer, "unfinished")[:-1], said(tiny_tokenizer, "b")]
    [row] = sequences(prompt, answers, tiny_tokenizer)
    assert "[unfinished]<|end|><|user|>two" in learnt(tiny_tokenizer, row)


def test_a_conversation_that_stopped_early_is_learnt_as_far_as_it_went(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = ask(tiny_tokenizer, "one", "two", "three")
    [row] = sequences(prompt, [said(tiny_tokenizer, "a"), said(tiny_tokenizer, "b")], tiny_tokenizer)
    assert learnt(tiny_tokenizer, row).endswith("<|user|>two<|end|><|assistant|>[b<|end|>]")
    assert sequences(prompt, [], tiny_tokenizer) == []
    with pytest.raises(ValueError, match="asks 3 questions, found 4 answers"):
        sequences(prompt, [[1]] * 4, tiny_tokenizer)


def test_a_conversation_ends_before_a_question_that_is_too_long(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, answers = ask(tiny_tokenizer, "one", "two"), [said(tiny_tokenizer, "a")]
    second = next_question(prompt, answers, tiny_tokenizer)
    assert second is not None
    assert next_question(prompt, answers, tiny_tokenizer, len(second)) == second
    assert next_question(prompt, answers, tiny_tokenizer, len(second) - 1) is None
    assert next_question(prompt, [], tiny_tokenizer, 1) == prompt.tokens, "the first one was measured when it was read"


def test_a_template_that_drops_thoughts_gives_a_row_for_each_turn(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(tiny_tokenizer, THINKING)
    prompt = ask(tokenizer, "one", "two")
    answers = [said(tokenizer, "<think>hm</think>a"), said(tokenizer, "<think>ha</think>b")]
    first, second = sequences(prompt, answers, tokenizer)
    assert learnt(tokenizer, first).endswith("<|assistant|>[<think>hm</think>a<|end|>]")
    assert learnt(tokenizer, second).endswith(
        "<|assistant|>a<|end|><|user|>two<|end|><|assistant|>[<think>ha</think>b<|end|>]"
    )


def test_the_templates_arguments_hold_for_every_turn(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(tiny_tokenizer, THINKING)
    prompt = ask(tokenizer, "one", "two", template={"enable_thinking": False})
    second = next_question(prompt, [said(tokenizer, "a")], tokenizer)
    assert second is not None
    assert tokenizer.decode(second).endswith("<|user|>two<|end|><|assistant|><think></think>")


def test_an_answer_that_reads_back_as_other_tokens_begins_a_new_row(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = ask(tiny_tokenizer, "one", "two")
    letters = [tiny_tokenizer.convert_tokens_to_ids(letter) for letter in "for"]
    assert len(tiny_tokenizer("for")["input_ids"]) == 1
    rows = sequences(prompt, [[*letters, tiny_tokenizer.eos_token_id], said(tiny_tokenizer, "b")], tiny_tokenizer)
    assert [learnt(tiny_tokenizer, row).partition("<|assistant|>")[2] for row in rows] == [
        "[for<|end|>]",
        "for<|end|><|user|>two<|end|><|assistant|>[b<|end|>]",
    ]
    assert letters == rows[0][0][-4:-1], "what the target wrote is learnt as it wrote it"


def test_a_tokenizer_that_knows_its_models_answers_tells_thoughts_from_text(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = with_template(tiny_tokenizer, template)
    tokenizer.response_template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "(", "close": ")"},
            "content": {"close": ["<|end|>"]},
        },
    }
    question = next_question(ask(tokenizer, "one", "two"), [said(tokenizer, "(hm)a")], tokenizer)
    assert question is not None
    assert "<|assistant|>a<|end|><|user|>two" in tokenizer.decode(question)


def test_given_answers_are_learnt_in_their_places(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    given = tuple(({"role": "assistant", "content": text},) for text in "ab")
    [row] = given_sequences(ask(tiny_tokenizer, "one", "two", given=given), tiny_tokenizer)
    assert learnt(tiny_tokenizer, row).endswith("<|assistant|>[a<|end|>]<|user|>two<|end|><|assistant|>[b<|end|>]")


def test_given_thoughts_that_the_template_drops_later_are_learnt_where_they_stand(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = with_template(tiny_tokenizer, THINKING)
    given = tuple(({"role": "assistant", "content": f"<think>{text}</think>{text}"},) for text in "ab")
    first, second = given_sequences(ask(tokenizer, "one", "two", given=given), tokenizer)
    assert learnt(tokenizer, first).endswith("<|assistant|>[<think>a</think>a<|end|>]")
    assert learnt(tokenizer, second).endswith(
        "<|assistant|>a<|end|><|user|>two<|end|><|assistant|>[<think>b</think>b<|end|>]"
    )


def test_given_answers_that_are_too_long_lose_their_end(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    given = tuple(({"role": "assistant", "content": text},) for text in ("abc", "xyz"))
    prompt = ask(tiny_tokenizer, "one", "two", given=given)
    [(tokens, mask)] = given_sequences(prompt, tiny_tokenizer)
    last = len(mask) - 1 - mask[::-1].index(1)
    [(cut, cut_mask)] = given_sequences(prompt, tiny_tokenizer, last)
    assert (cut, cut_mask) == (tokens[:last], mask[:last])
    assert given_sequences(prompt, tiny_tokenizer, mask.index(1)) == []


def test_a_given_completion_of_raw_text_ends_where_it_ends(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tuple(tiny_tokenizer("def f():", add_special_tokens=False)["input_ids"])
    prompt = Prompt("p", "s", tokens, "def f():", given=(({"role": "assistant", "content": " pass"},),))
    [row] = given_sequences(prompt, tiny_tokenizer)
    assert learnt(tiny_tokenizer, row) == "def f():[ pass<|end|>]"
    with pytest.raises(ValueError, match="came without answers"):
        given_sequences(Prompt("p", "s", (1,)), tiny_tokenizer)


DISLIKING = (
    "{% for m in messages %}{% if m.role == 'assistant' and 'no' in m.content %}{{ raise_exception('I dislike it') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_conversation_ends_at_an_answer_that_the_template_dislikes_and_says_so(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = with_template(tiny_tokenizer, DISLIKING)
    prompt = ask(tokenizer, "one", "two", "three")
    answers = [said(tokenizer, "a"), said(tokenizer, "no")]
    assert next_question(prompt, answers[:1], tokenizer) is not None
    assert next_question(prompt, answers, tokenizer) is None
    assert why_ended(prompt, answers, tokenizer) == "template"
    assert why_ended(prompt, answers[:1], tokenizer) == "length"
    assert why_ended(prompt, [*answers, answers[0]], tokenizer) == ""
    [row] = sequences(prompt, answers, tokenizer)
    assert learnt(tokenizer, row).endswith("[a<|end|>]<|user|>two<|end|><|assistant|>[no<|end|>]"), "its turns stay"


def test_an_answer_that_cannot_be_taken_apart_is_text(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a call of a tool that was cut off in the middle of its JSON."""
    tokenizer = with_template(tiny_tokenizer, DISLIKING)
    tokenizer.response_template = {
        "start_anchor": "<|assistant|>",
        "fields": {"content": {"close": ["<|end|>"], "content": "json"}},
    }
    cut = said(tokenizer, '{"name": ')[:-1]
    with pytest.raises(Exception, match=r"."):
        tokenizer.parse_response(cut, prefix="<|assistant|>")
    question = next_question(ask(tokenizer, "one", "two"), [cut], tokenizer)
    assert question is not None
    assert '<|assistant|>{"name":' in tokenizer.decode(question)
