"""Every turn is the target's own answer to the question that was really asked; learnt is what it really wrote.

A mask covers the assistant's turns, end marker included, whatever the template; a token that straddles a boundary is
out. A template runs within limits of time and memory, and renders what the library renders.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import tokenizers
import tokenizers.processors

from outrider.common import BadInputError
from outrider.distill.conversation import given_sequences, next_question, render, sequences, supervised_rows, why_ended
from outrider.distill.dataset_formats import Message
from outrider.distill.prompt_table import Prompt

from .conftest import Tokenizer, user
from .conftest import assistant as answer

SYSTEM = {"role": "system", "content": "be brief"}
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)


def ask(tokenizer: Tokenizer, first: str, *later: str, **rest: Any) -> Prompt:
    messages = (SYSTEM, user(first))
    text = render(tokenizer, messages, "here", template=rest.get("template"))
    tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return Prompt("p", "s", tokens, text, messages, tuple((user(t),) for t in later), **rest)


def said(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def learnt(tokenizer: Tokenizer, row: tuple[list[int], list[int]]) -> str:
    """The row's text, with what is supervised in brackets."""
    text, before = "", 0
    for token, now in [*zip(*row, strict=True), (None, 0)]:
        text += ("[" if now else "]") if now != before else ""
        text, before = text + (tokenizer.decode([token]) if token is not None else ""), now
    return text


def with_template(tokenizer: Tokenizer, template: str, kind: type[Tokenizer] = Tokenizer) -> Tokenizer:
    return kind(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=template,
    )


def test_questions_follow_one_another_with_the_targets_own_answers(tokenizer: Tokenizer) -> None:
    prompt = ask(tokenizer, "one", "two", "three")
    answers: list[list[int]] = []
    texts = []
    while (question := next_question(prompt, answers, tokenizer)) is not None:
        texts.append(tokenizer.decode(question))
        answers.append(said(tokenizer, f"answer {len(answers)}"))
    start = "<|system|>be brief<|end|><|user|>one<|end|><|assistant|>"
    second = start + "answer 0<|end|><|user|>two<|end|><|assistant|>"
    assert texts == [start, second, second + "answer 1<|end|><|user|>three<|end|><|assistant|>"]
    [row] = sequences(prompt, answers, tokenizer)
    assert learnt(tokenizer, row) == (
        "<|system|>be brief<|end|><|user|>one<|end|><|assistant|>[answer 0<|end|>]<|user|>two<|end|><|assistant|>"
        "[answer 1<|end|>]<|user|>three<|end|><|assistant|>[answer 2<|end|>]"
    )


def test_raw_text_and_a_single_question_ask_once(tokenizer: Tokenizer) -> None:
    for prompt in (Prompt("p", "s", (5, 6, 7), "abc"), ask(tokenizer, "one")):
        assert next_question(prompt, [], tokenizer) == prompt.tokens
        assert next_question(prompt, [[9]], tokenizer) is None
        assert sequences(prompt, [[9, 1]], tokenizer) == [([*prompt.tokens, 9, 1], [0] * len(prompt.tokens) + [1, 1])]


def test_an_answer_that_was_cut_short_is_followed_by_the_templates_end_marker(tokenizer: Tokenizer) -> None:
    prompt = ask(tokenizer, "one", "two")
    answers = [said(tokenizer, "unfinished")[:-1], said(tokenizer, "b")]
    [row] = sequences(prompt, answers, tokenizer)
    assert "[unfinished]<|end|><|user|>two" in learnt(tokenizer, row)


def test_a_conversation_that_stopped_early_is_learnt_as_far_as_it_went(tokenizer: Tokenizer) -> None:
    prompt = ask(tokenizer, "one", "two", "three")
    [row] = sequences(prompt, [said(tokenizer, "a"), said(tokenizer, "b")], tokenizer)
    assert learnt(tokenizer, row).endswith("<|user|>two<|end|><|assistant|>[b<|end|>]")
    assert sequences(prompt, [], tokenizer) == []
    with pytest.raises(ValueError, match="asks 3 questions, found 4 answers"):
        sequences(prompt, [[1]] * 4, tokenizer)


def test_a_conversation_ends_before_a_question_that_is_too_long(tokenizer: Tokenizer) -> None:
    prompt, answers = ask(tokenizer, "one", "two"), [said(tokenizer, "a")]
    second = next_question(prompt, answers, tokenizer)
    assert second is not None
    assert next_question(prompt, answers, tokenizer, len(second)) == second
    assert next_question(prompt, answers, tokenizer, len(second) - 1) is None
    assert next_question(prompt, [], tokenizer, 1) == prompt.tokens, "the first one was measured when it was read"


@pytest.mark.parametrize("given", [False, True])
def test_a_template_that_drops_thoughts_gives_a_row_for_each_turn(tokenizer: Tokenizer, given: bool) -> None:
    """Whether the target wrote them or they came with the prompt."""
    tokenizer, texts = with_template(tokenizer, THINKING), ["<think>hm</think>a", "<think>ha</think>b"]
    if given:
        prompt = ask(tokenizer, "one", "two", given=tuple((answer(text),) for text in texts))
        first, second = given_sequences(prompt, tokenizer)
    else:
        first, second = sequences(ask(tokenizer, "one", "two"), [said(tokenizer, text) for text in texts], tokenizer)
    assert learnt(tokenizer, first).endswith("<|assistant|>[<think>hm</think>a<|end|>]")
    expected = "<|assistant|>a<|end|><|user|>two<|end|><|assistant|>[<think>ha</think>b<|end|>]"
    assert learnt(tokenizer, second).endswith(expected)


def test_the_templates_arguments_hold_for_every_turn(tokenizer: Tokenizer) -> None:
    tokenizer = with_template(tokenizer, THINKING)
    prompt = ask(tokenizer, "one", "two", template={"enable_thinking": False})
    second = next_question(prompt, [said(tokenizer, "a")], tokenizer)
    assert second is not None
    assert tokenizer.decode(second).endswith("<|user|>two<|end|><|assistant|><think></think>")


def test_an_answer_that_reads_back_as_other_tokens_begins_a_new_row(tokenizer: Tokenizer) -> None:
    prompt = ask(tokenizer, "one", "two")
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "for"]
    assert len(tokenizer("for")["input_ids"]) == 1
    rows = sequences(prompt, [[*letters, tokenizer.eos_token_id], said(tokenizer, "b")], tokenizer)
    assert [learnt(tokenizer, row).partition("<|assistant|>")[2] for row in rows] == [
        "[for<|end|>]",
        "for<|end|><|user|>two<|end|><|assistant|>[b<|end|>]",
    ]
    assert letters == rows[0][0][-4:-1], "what the target wrote is learnt as it wrote it"


def test_a_tokenizer_that_knows_its_models_answers_tells_thoughts_from_text(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = with_template(tokenizer, template)
    tokenizer.response_template = {
        "start_anchor": "<|assistant|>",
        "fields": {"thinking": {"open": "(", "close": ")"}, "content": {"close": ["<|end|>"]}},
    }
    question = next_question(ask(tokenizer, "one", "two"), [said(tokenizer, "(hm)a")], tokenizer)
    assert question is not None
    assert "<|assistant|>a<|end|><|user|>two" in tokenizer.decode(question)


def test_given_answers_are_learnt_in_their_places(tokenizer: Tokenizer) -> None:
    given = tuple((answer(text),) for text in "ab")
    [row] = given_sequences(ask(tokenizer, "one", "two", given=given), tokenizer)
    assert learnt(tokenizer, row).endswith("<|assistant|>[a<|end|>]<|user|>two<|end|><|assistant|>[b<|end|>]")


def test_given_answers_that_are_too_long_lose_their_end_and_are_counted(tokenizer: Tokenizer) -> None:
    given = tuple((answer(text),) for text in ("abc", "xyz"))
    prompt = ask(tokenizer, "one", "two", given=given)
    [(tokens, mask)] = given_sequences(prompt, tokenizer)
    last, first_end = len(mask) - 1 - mask[::-1].index(1), mask.index(0, mask.index(1))
    for length, cut in ((last + 1, 0), (last, 1), (first_end + 1, 1), (first_end, 1), (first_end - 1, 2)):
        counts = Counter[str]()
        given_sequences(prompt, tokenizer, length, counts=counts)
        assert (counts["answers"], counts["answers_cut"]) == (2, cut)
    [(cut, cut_mask)] = given_sequences(prompt, tokenizer, last)
    assert (cut, cut_mask) == (tokens[:last], mask[:last])
    assert given_sequences(prompt, tokenizer, mask.index(1)) == []


def test_the_end_of_a_given_answer_that_its_server_cut_is_not_learnt(tokenizer: Tokenizer) -> None:
    counts = Counter[str]()
    given = tuple((answer(text) | {"finish_reason": "length"},) for text in "ab")
    [row] = given_sequences(
        ask(tokenizer, "one", "two", given=given), tokenizer, ending=[tokenizer.eos_token_id], counts=counts
    )
    assert learnt(tokenizer, row).endswith("<|assistant|>[a<|end|>]<|user|>two<|end|><|assistant|>[b]")
    assert (counts["answers"], counts["answers_cut"]) == (2, 1)


def test_a_given_completion_of_raw_text_ends_where_it_ends(tokenizer: Tokenizer) -> None:
    tokens = tuple(tokenizer("def f():", add_special_tokens=False)["input_ids"])
    prompt = Prompt("p", "s", tokens, "def f():", given=((answer(" pass"),),))
    [row] = given_sequences(prompt, tokenizer, ending=(1,))
    assert learnt(tokenizer, row) == "def f():[ pass<|end|>]"
    counts = Counter[str]()
    [row] = given_sequences(prompt, tokenizer, ending=(0, 1), counts=counts)  # one of them ends turns
    assert learnt(tokenizer, row) == "def f():[ pass]"
    assert counts["ends_unknown"] == counts["answers"] == 1
    with pytest.raises(ValueError, match="came without answers"):
        given_sequences(Prompt("p", "s", (1,)), tokenizer)


THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        (THINKS, answer("a"), "<think>\n\n</think>\n\n[a<|end|>]"),
        (THINKS, answer("a") | {"reasoning_content": "hm"}, "[<think>\nhm\n</think>\n\na<|end|>]"),
        (THINKS, answer("<think></think>a"), "[<think>\n\n</think>\n\na<|end|>]"),
        (THINKS.replace("<think>", "[THINK]").replace("</think>", "[/THINK]"), answer("a"), "[a<|end|>]"),
    ],
    ids=["empty", "a thought", "written by the author", "Mistral's"],
)
def test_an_empty_thought_that_the_template_adds_is_not_learnt(
    tokenizer: Tokenizer, template: str, message: Message, expected: str
) -> None:
    tokenizer = with_template(tokenizer, template)
    [row] = given_sequences(ask(tokenizer, "one", given=((message,),)), tokenizer)
    assert learnt(tokenizer, row).endswith(expected)


ALTERNATING = (
    "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MERGING = (
    "{% for m in messages %}{% if loop.first or m.role != messages[loop.index0 - 1].role %}<|{{ m.role }}|>{% endif %}"
    "{{ m.content }}{% if loop.last or m.role != messages[loop.index0 + 1].role %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected", "unlearnable"),
    [
        (None, ["[a<|end|>]<|assistant|>[b<|end|>]<|user|>two<|end|><|assistant|>[c<|end|>]"], 0),
        (ALTERNATING, ["[a<|end|>]"], 2),
        (MERGING, ["[a<|end|>]", "ab<|end|><|user|>two<|end|><|assistant|>[c<|end|>]"], 1),
    ],
    ids=["both", "alternating", "merging"],
)
def test_two_answers_in_a_row_lose_what_the_template_cannot_write_and_nothing_else(
    tokenizer: Tokenizer, template: str | None, expected: list[str], unlearnable: int
) -> None:
    tokenizer = with_template(tokenizer, template or tokenizer.chat_template)
    prompt = ask(tokenizer, "one", "two", given=((answer("a"), answer("b")), (answer("c"),)))
    counts = Counter[str]()
    rows = given_sequences(prompt, tokenizer, counts=counts)
    assert [learnt(tokenizer, row).partition("<|assistant|>")[2] for row in rows] == expected
    assert (counts["answers"], counts["answers_unlearnable"]) == (3 - unlearnable, unlearnable)


def test_an_end_that_has_no_name_in_the_tokenizer_is_no_part_of_the_text(tokenizer: Tokenizer) -> None:
    """The tokenizers of Llama 3's and Qwen's base models name another token as their end."""
    unnamed = Tokenizer(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|pad|>")
    unnamed.chat_template = tokenizer.chat_template
    assert unnamed.all_special_ids == [0]
    answers = [said(tokenizer, text) for text in "ab"]
    [row] = sequences(ask(unnamed, "one", "two"), answers, unnamed)
    assert "<|assistant|>[a<|end|>]<|user|>two<|end|><|assistant|>[b<|end|>]" in learnt(unnamed, row)
    given = [user("one"), answer("a")]
    unnamed.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    unnamed.chat_template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    assert marked(unnamed, *supervised_mask(unnamed, given)) == "a<|end|>"


DISLIKING = (
    "{% for m in messages %}{% if m.role == 'assistant' and 'no' in m.content %}{{ raise_exception('I dislike it') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_conversation_ends_at_an_answer_that_the_template_dislikes_and_says_so(tokenizer: Tokenizer) -> None:
    tokenizer = with_template(tokenizer, DISLIKING)
    prompt = ask(tokenizer, "one", "two", "three")
    answers = [said(tokenizer, "a"), said(tokenizer, "no")]
    assert next_question(prompt, answers[:1], tokenizer) is not None
    assert next_question(prompt, answers, tokenizer) is None
    assert why_ended(prompt, answers, tokenizer) == "template"
    assert why_ended(prompt, answers[:1], tokenizer) == "length"
    assert why_ended(prompt, [*answers, answers[0]], tokenizer) == ""
    [row] = sequences(prompt, answers, tokenizer)
    assert learnt(tokenizer, row).endswith("[a<|end|>]<|user|>two<|end|><|assistant|>[no<|end|>]"), "its turns stay"


def test_an_answer_that_cannot_be_taken_apart_is_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a call of a tool that was cut off in the middle of its JSON."""
    tokenizer = with_template(tokenizer, DISLIKING)
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


CHAT = [
    SYSTEM,
    user("sort the names"),
    answer("sorted(names)"),
    user("and print them é"),
    answer("for name in names:\n    print(name) é"),
]
BOTH = "sorted(names)<|end|>for name in names:\n    print(name) é<|end|>"


def supervised_mask(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Return the tokens and the mask of a conversation's last row."""
    return supervised_rows(tokenizer, messages)[-1]


def marked(tokenizer: Any, tokens: list[int], mask: list[bool]) -> str:
    return str(tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]))


def test_the_mask_equals_the_templates_own_generation_markers(tokenizer: Tokenizer) -> None:
    tokens, mask = supervised_mask(tokenizer, CHAT)
    theirs = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    assert tokens == theirs["input_ids"]
    assert mask == [bool(m) for m in theirs["assistant_masks"]]
    assert marked(tokenizer, tokens, mask) == BOTH


def test_a_template_without_markers_gives_the_same_mask(tokenizer: Tokenizer) -> None:
    template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert supervised_mask(with_template(tokenizer, template), CHAT) == supervised_mask(tokenizer, CHAT)


MASKS = {
    # "for" is one token: the generation prompt ends in "f", the answer begins with "or", and it belongs to neither.
    "a token that straddles the boundary": (
        "{% for m in messages %}{{ 'f' if m.role == 'assistant' }}{{ m.content }}|{% endfor %}"
        "{{ 'f' if add_generation_prompt }}",
        [user("q"), answer("or x")],
        r"^q\|for x\|$",
        " x|",
    ),
    "white space after the end marker": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n \n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        CHAT,
        r"<\|assistant\|>\nsorted",
        BOTH,
    ),
    # Templates of reasoning models drop the thoughts of all turns but the last.
    "an earlier turn that the template rewrites": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.thoughts and loop.last %}({{ m.thoughts }}){% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        [dict(m, thoughts="hmm") if m["role"] == "assistant" else m for m in CHAT],
        r"<\|assistant\|>sorted",
        "(hmm)for name in names:\n    print(name) é<|end|>",
    ),
    "what the markers leave out of a turn": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}[quiet]{% generation %}{{ m.content }}"
        "<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        CHAT,
        r"<\|assistant\|>\[quiet\]sorted",
        BOTH,
    ),
}


@pytest.mark.parametrize(("template", "chat", "text", "expected"), MASKS.values(), ids=MASKS)
def test_not_supervised_is(tokenizer: Tokenizer, template: str, chat: list[Message], text: str, expected: str) -> None:
    assert len(tokenizer("for")["input_ids"]) == 1
    tokenizer = with_template(tokenizer, template)
    tokens, mask = supervised_mask(tokenizer, chat)
    assert re.search(text, tokenizer.decode(tokens))
    assert marked(tokenizer, tokens, mask) == expected


@pytest.mark.parametrize("trim", [True, False])
def test_a_space_that_the_tokenizer_leaves_out_of_its_offsets_still_straddles(tokenizer: Tokenizer, trim: bool) -> None:
    """The generation prompt ends in a space that the first word of the answer swallows."""
    assert len(tokenizer(" second")["input_ids"]) == 1
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trim)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{{ 'assistant: ' if add_generation_prompt }}"
    tokenizer = Tokenizer(tokenizer_object=backend, eos_token="<|end|>", chat_template=template)
    tokens, mask = supervised_mask(tokenizer, [user("q"), answer("second, or none")])
    assert marked(tokenizer, tokens, mask) == ", or none\n"


def test_a_tokenizer_without_offsets_gives_the_same_mask(tokenizer: Tokenizer) -> None:
    class Slow(Tokenizer):
        is_fast = False

        def __call__(self, *args: Any, return_offsets_mapping: bool = False, **kwargs: Any) -> Any:
            assert not return_offsets_mapping
            return super().__call__(*args, **kwargs)

    slow = with_template(tokenizer, tokenizer.chat_template, Slow)
    assert supervised_mask(slow, CHAT) == supervised_mask(tokenizer, CHAT)


def test_nothing_or_everything_to_supervise_is_an_error_that_shows_the_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInputError, match=r"no token .*roles: user.*As rendered: '<\|user\|>hello<\|end\|>'"):
        supervised_mask(tokenizer, [user("hello")])
    tokenizer = with_template(tokenizer, "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}")
    with pytest.raises(BadInputError, match=r"every token .*As rendered: 'hi'"):
        supervised_mask(tokenizer, [user("hello"), answer("hi")])


ANSWERED = [user("def add("), answer("a, b):")]


def test_a_template_is_rendered_as_the_library_does(tokenizer: Tokenizer) -> None:
    expected = tokenizer.apply_chat_template(ANSWERED, tokenize=False, add_generation_prompt=True)
    assert render(tokenizer, ANSWERED, "here") == expected
