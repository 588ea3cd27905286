"""Streamed text is the text: whatever the tokens cut in pieces."""

from __future__ import annotations

import math

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.decode import StreamEvent
from outrider.scripts.streaming import Tally, pieces, prompt_tokens
from outrider.targets.tokenizers import TextStream

TEXTS = [
    "def f(x):\n    return x\n",
    "naïve façade – 漢字 und 🦊🦊",
    "  leading and   inner spaces ",
    "\ttabs\n\n\nlines",
    "e\u0301 combining",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_decoded_text(tiny_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """A character of several tokens appears once it is whole, never as a replacement character."""
    tokens = tiny_tokenizer(text)["input_ids"]
    stream = TextStream(tiny_tokenizer, tiny_tokenizer("some prompt")["input_ids"])
    shown = [stream.push(t) for t in tokens]
    assert not any("\ufffd" in piece for piece in shown)
    assert "".join(shown) + stream.flush() == text


def test_an_unfinished_character_is_shown_at_the_end(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The target may stop in the middle of one; nothing is swallowed."""
    tokens = tiny_tokenizer("ok 🦊")["input_ids"][:-1]
    stream = TextStream(tiny_tokenizer, [])
    shown = "".join(stream.push(t) for t in tokens)
    assert shown == "ok "
    assert stream.flush() == tiny_tokenizer.decode(tokens)[len(shown) :]


def test_a_leading_space_that_only_shows_behind_another_token_is_kept() -> None:
    """Tokenizers of the sentencepiece kind drop it at the beginning of what they decode."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert tokenizer.decode([1]) == "b"
    assert TextStream(tokenizer, [0]).push(1) == " b"


def test_special_tokens_are_not_shown(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    stream = TextStream(tiny_tokenizer, [])
    assert stream.push(tiny_tokenizer.eos_token_id) == ""


def test_pieces_say_which_tokens_were_drafted(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    a, b, c = (tiny_tokenizer(x)["input_ids"][0] for x in "abc")
    events = iter([StreamEvent([a], 0, 0), StreamEvent([b, b, c], 2, 4)])
    assert list(pieces(events, TextStream(tiny_tokenizer, []))) == [
        ("a", False),
        ("b", True),
        ("b", True),
        ("c", False),
    ]


def test_tau_counts_the_bonus_token_and_leaves_the_prefill_out() -> None:
    """By hand: a prefill and two rounds that emit 4 and 2 tokens, the second cut by the limit: (4 + 2) / 2 = 3."""
    tally = Tally()
    events = [StreamEvent([1], 0, 0), StreamEvent([1, 2, 3, 4], 3, 4), StreamEvent([1, 2], 2, 4)]
    assert list(tally.watch(iter(events))) == events
    assert (tally.tau, tally.rounds, tally.tokens) == (3.0, 2, 7)
    assert math.isnan(Tally().tau)


def test_chat_without_a_template_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    with pytest.raises(BadInputError, match="no chat template"):
        prompt_tokens(bare, "hello", chat=True)
    assert prompt_tokens(bare, "hello", chat=False) == tiny_tokenizer("hello")["input_ids"]


def test_chat_goes_through_the_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = prompt_tokens(tiny_tokenizer, "hello", chat=True)
    assert tiny_tokenizer.decode(tokens) == "<|user|>hello<|end|><|assistant|>"


def test_the_template_gets_its_arguments(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{{ messages[0].content }}{% if not thinking %} briefly{% endif %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer, chat_template=template)
    asked = [prompt_tokens(tokenizer, "hello", True, given) for given in ({"thinking": False}, {"thinking": True})]
    assert [tokenizer.decode(tokens) for tokens in asked] == ["hello briefly", "hello"]
