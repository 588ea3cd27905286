"""A mask covers the assistant's turns, end marker included, whatever the template.

A token that straddles a boundary is out.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.distill.conversation import supervised_mask

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "sort the names"},
    {"role": "assistant", "content": "sorted(names)"},
    {"role": "user", "content": "and print them é"},
    {"role": "assistant", "content": "for name in names:\n    print(name) é"},
]


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=template,
    )


def marked(tokenizer: Any, tokens: list[int], mask: list[bool]) -> str:
    return str(tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]))


def test_the_mask_equals_the_templates_own_generation_markers(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens, mask = supervised_mask(tiny_tokenizer, CHAT)
    theirs = tiny_tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    assert tokens == theirs["input_ids"]
    assert mask == [bool(m) for m in theirs["assistant_masks"]]
    assert marked(tiny_tokenizer, tokens, mask) == "sorted(names)<|end|>for name in names:\n    print(name) é<|end|>"


def test_a_template_without_markers_gives_the_same_mask(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    template = tiny_tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert supervised_mask(with_template(tiny_tokenizer, template), CHAT) == supervised_mask(tiny_tokenizer, CHAT)


def test_sharegpt_messages_are_understood(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    sharegpt = [
        {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in CHAT
    ]
    assert supervised_mask(tiny_tokenizer, sharegpt) == supervised_mask(tiny_tokenizer, CHAT)


def test_a_token_that_straddles_the_boundary_is_not_supervised(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The generation prompt ends in "f", the answer begins with "or".

    "for" is one token and belongs to neither side.
    """
    assert len(tiny_tokenizer("for")["input_ids"]) == 1
    template = (
        "{% for m in messages %}{{ 'f' if m.role == 'assistant' }}{{ m.content }}|{% endfor %}"
        "{{ 'f' if add_generation_prompt }}"
    )
    tokenizer = with_template(tiny_tokenizer, template)
    tokens, mask = supervised_mask(
        tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "or x"}]
    )
    assert tokenizer.decode(tokens) == "q|for x|"
    assert marked(tokenizer, tokens, mask) == " x|"


@pytest.mark.parametrize("trim", [True, False])
def test_a_space_that_the_tokenizer_leaves_out_of_its_offsets_still_straddles(
    tiny_tokenizer: PreTrainedTokenizerFast, trim: bool
) -> None:
    """The generation prompt ends in a space that the first word of the answer swallows."""
    from tokenizers import Tokenizer, processors

    assert len(tiny_tokenizer(" second")["input_ids"]) == 1
    backend = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=template)
    tokens, mask = supervised_mask(
        tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "second, or none"}]
    )
    assert marked(tokenizer, tokens, mask) == ", or none\n"


def test_white_space_after_the_end_marker_is_not_supervised(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n \n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    tokenizer = with_template(tiny_tokenizer, template)
    tokens, mask = supervised_mask(tokenizer, CHAT)
    assert marked(tokenizer, tokens, mask) == "sorted(names)<|end|>for name in names:\n    print(name) é<|end|>"


def test_an_earlier_turn_that_the_template_rewrites_is_not_supervised(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Templates of reasoning models drop the thoughts of all turns but the last."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.thoughts and loop.last %}({{ m.thoughts }}){% endif %}{{ "
        "m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = with_template(tiny_tokenizer, template)
    chat = [dict(m, thoughts="hmm") if m["role"] == "assistant" else m for m in CHAT]
    tokens, mask = supervised_mask(tokenizer, chat)
    assert marked(tokenizer, tokens, mask) == "(hmm)for name in names:\n    print(name) é<|end|>"


def test_a_tokenizer_without_offsets_gives_the_same_mask(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    class Slow(PreTrainedTokenizerFast):
        is_fast = False

        def __call__(self, *args: Any, return_offsets_mapping: bool = False, **kwargs: Any) -> Any:
            assert not return_offsets_mapping
            return super().__call__(*args, **kwargs)

    slow = Slow(
        tokenizer_object=tiny_tokenizer.backend_tokenizer,
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=tiny_tokenizer.chat_template,
    )
    assert supervised_mask(slow, CHAT) == supervised_mask(tiny_tokenizer, CHAT)


def test_nothing_to_supervise_is_an_error_that_shows_the_text(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(BadInputError, match=r"no token .*roles: user.*As rendered: '<\|user\|>hello<\|end\|>'"):
        supervised_mask(tiny_tokenizer, [{"role": "user", "content": "hello"}])


def test_everything_supervised_is_an_error_that_shows_the_text(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = with_template(
        tiny_tokenizer, "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(BadInputError, match=r"every token .*As rendered: 'hi'"):
        supervised_mask(tokenizer, [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}])


def test_what_the_templates_markers_leave_out_of_a_turn_is_not_supervised(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}[quiet]{% generation %}{{ m.content }}"
        "<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = with_template(tiny_tokenizer, template)
    tokens, mask = supervised_mask(tokenizer, CHAT)
    assert "<|assistant|>[quiet]sorted" in tokenizer.decode(tokens)
    assert marked(tokenizer, tokens, mask) == "sorted(names)<|end|>for name in names:\n    print(name) é<|end|>"
