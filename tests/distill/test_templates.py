"""A chat template runs within limits of time and memory, and renders what the library renders."""

from __future__ import annotations

import resource
import sys
import time

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.distill.conversation import render

CHAT = [{"role": "user", "content": "def add("}, {"role": "assistant", "content": "a, b):"}]


def test_a_template_is_rendered_as_the_library_does_and_leaves_no_limit(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()
    expected = tiny_tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert render(tiny_tokenizer, CHAT, "here") == expected
    assert (resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()) == before


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "longer than 3 seconds"),
        (
            "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
            "longer than 3 seconds",
        ),
        ("{{ 'x' * 100000000000 }}", "MemoryError"),
        ("{% set n = namespace(x='xx') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MemoryError"),
        ("{{ 'x'.center(100000000000) }}", "MemoryError"),
        ("{{ 9 ** 9 ** 9 }}", "computes powers"),
        ("{{ 'x' * 2 }}{# " + "x" * 2**20 + " #}", "longer than 1 MB"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[9].content.x.y }}", "no element 9"),
        ("{% for", "refuses this conversation"),
    ],
)
def test_a_template_that_asks_for_too_much_is_refused_in_a_sentence(
    tiny_tokenizer: PreTrainedTokenizerFast, template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    before, began = resource.getrlimit(resource.RLIMIT_AS), time.process_time()
    with pytest.raises(BadInputError, match="the target's chat template refuses this conversation") as refused:
        render(tiny_tokenizer, CHAT, "here")
    assert said in str(refused.value)
    assert time.process_time() - began < 10
    assert resource.getrlimit(resource.RLIMIT_AS) == before
