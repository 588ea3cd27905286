"""A stranger's tokenizer or chat template is a program: what takes too much is refused, in time and in a sentence."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.common.safe_load import MEGABYTE
from outrider.distill.conversation import RefusedChatError, render
from outrider.targets import load_tokenizer, tokenizer_process

OVER = r"takes (longer than|more than)"
SLOW: list[str] = []  # rows of the tables below


def replaced(pattern: str, content: str, times: int = 1, kind: str = "String") -> dict[str, Any]:
    """A normaliser or decoder that replaces one text by another, so many times."""
    return {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {kind: pattern}, "content": content}] * times,
        "decoders": [{"type": "Replace", "pattern": {kind: pattern}, "content": content}] * times,
    }


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def template(single: list[str], ids: int = 1) -> dict[str, Any]:
    """A post-processor that writes these parts: `$A` for the text, `x` for a token of so many ids."""
    parts = {"$A": {"Sequence": {"id": "A", "type_id": 0}}, "x": {"SpecialToken": {"id": "x", "type_id": 0}}}
    token = {"id": "x", "ids": [0] * ids, "tokens": ["<|end|>"] * ids}
    pair = [parts["$A"], {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [parts[part] for part in single],
        "pair": pair,
        "special_tokens": {"x": token},
    }


# What is put into tokenizer.json, and what load_tokenizer says; None where it does no harm.
PROGRAMS: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    "doubles every a": ({"normalizer": replaced("a", "aa", 30)}, OVER),
    "doubles what no usual text has": ({"normalizer": replaced("ẞq", "ẞqẞq", 40)}, OVER),
    "writes a megabyte for each letter": ({"normalizer": replaced(".", "x" * 10**6, 1, "Regex")}, OVER),
    "grows each space": ({"normalizer": replaced(" ", " " * 1000, 4)}, OVER),
    "replaces nothing": ({"normalizer": replaced("", "x", 1)}, "index out of bounds"),
    "a normaliser's regex that is none": ({"normalizer": replaced("(", "x", 1, "Regex")}, "cannot be loaded|cannot be"),
    "a damaged table of characters": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "cannot be loaded|cannot be used",
    ),
    "a decoder that doubles": ({"decoder": replaced("e", "ee", 40)}, OVER),
    "a decoder that doubles what one token has": ({"decoder": replaced("~", "~~", 40)}, OVER),
    "a decoder's regex of nested repetitions": (
        {"decoder": replaced("(e+)+(e+)+(\\w+)+(\\w+)+(\\w+)+\x01\x01", "x", 9, "Regex")},
        None,
    ),
    "a post-processor of many ids": ({"post_processor": template(["x", "$A"] * 2000, 20_000)}, OVER),
    "a post-processor that writes the text often": ({"post_processor": template(["$A"] * 50_000)}, OVER),
    "a regex of nested repetitions": ({"pre_tokenizer": split("(a+)+(a+)+(a+)+(a+)+\\x01")}, "cannot be used"),
    "a regex of many ways": ({"pre_tokenizer": split("(a|aa|aaa)+\\x01")}, "cannot be used"),
    "a regex that is none": ({"pre_tokenizer": split("(?<n")}, "cannot be loaded"),
    "a regex that looks back": ({"pre_tokenizer": split("(?<=a+)b")}, None),
    "padding to a trillion": (
        {
            "padding": {
                "strategy": {"Fixed": 10**12},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        },
        None,  # the library asks for padding itself
    ),
    "truncation with a stride": (
        {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 10**6}},
        "cannot be loaded",
    ),
    "words without an unknown one": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}, "pre_tokenizer": None},
        "cannot be used",
    ),
    "a unigram of nothing": ({"model": {"type": "Unigram", "vocab": [], "unk_id": None}}, "cannot be"),
    "an id beyond 31 bits": (
        {"model": {"type": "WordLevel", "vocab": {"a": 2**31}, "unk_token": "a"}},
        "a token has the id 2147483648",
    ),
    "an id beyond 31 bits around a text": (
        {"post_processor": {"type": "BertProcessing", "sep": ["x", 2**31], "cls": ["x", 0]}},
        "a token has the id 2147483648",
    ),
    "an id beyond 32 bits": ({"model": {"type": "WordLevel", "vocab": {"a": 2**33}, "unk_token": "a"}}, "cannot be"),
}


def edited(tokenizer: PreTrainedTokenizerFast, folder: Path, state: dict[str, Any], config: dict[str, Any]) -> Path:
    tokenizer.save_pretrained(folder)
    for name, values in (("tokenizer.json", state), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits that are reached sooner; and nothing here takes time or memory of this process."""
    monkeypatch.setattr(tokenizer_process, "SECONDS", {"try": 0.6, "render": 0.3, "parse": 0.3})
    monkeypatch.setattr(tokenizer_process, "MEMORY", 256 * MEGABYTE)
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kB"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_tokenizer_is_tried_where_it_can_do_no_harm(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str
) -> None:
    state, said = PROGRAMS[name]
    folder = edited(tiny_tokenizer, tmp_path / "tokenizer", state, {})
    if said is None:
        loaded = load_tokenizer(folder)
        assert loaded is not None
        assert loaded("def add(").input_ids
    else:
        with pytest.raises(BadInputError, match=said):
            load_tokenizer(folder)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_max_length": "abc"}, "not supported between instances of 'int' and 'str'"),
        ({"model_max_length": [1]}, "not supported between"),
        ({"model_max_length": -5}, None),
        ({"padding_side": "up"}, "cannot be"),
        ({"truncation_side": 5}, "cannot be"),
        ({"tokenizer_class": "Evil"}, None),
    ],
)
def test_settings_of_a_wrong_type_are_refused_at_the_door(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, config: dict[str, Any], said: str | None
) -> None:
    folder = edited(tiny_tokenizer, tmp_path / "tokenizer", {}, config)
    if said is None:
        assert load_tokenizer(folder)
    else:
        with pytest.raises(BadInputError, match=said):
            load_tokenizer(folder)


TEMPLATES = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": True,
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}": True,
    "{% set s = 'a' * 9000000 %}{% set p = 'a' * 99999 %}{{ s.rfind(p ~ 'b' ~ p) }}": True,
    "{% set s = 'ab' * 9000000 %}{% for i in range(99) %}{{ s.rsplit('a', 3000000)|length }}{% endfor %}": True,
    "{{ ('a ' * 3000000)|wordwrap(2) }}": True,
    "{{ 9 ** (9 ** 9) }}": True,
    "{{ 'x' * 100000000000 }}": True,
    "{% set n = namespace(x='xx') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}": True,
    "{{ 'x'.center(100000000000) }}": True,
    "{{ '\t'.expandtabs(999999999) }}": True,
    "{{ '%9999999999d'|format(1) }}": True,
    "{{ ('x' * 40000000) }}": True,
    "{{ ('<' * 300000)|striptags|urlize }}{{ ('(' * 90000)|urlize }}{{ ('a.' * 900000)|urlize }}": True,
    "{{ [1]|batch(999999999, 'x')|list|length }}": True,
    "{{ 'x' * 2 }}{# " + "x" * 2**20 + " #}": True,
    "{{ range(9999999)|list|length }}": False,
    "{{ ''.__class__.__mro__ }}": False,
    "{{ messages[9].content.x.y }}": False,
    "{{ raise_exception('no') }}": False,
    "{{ '\\ud800' }}": False,
    "{% for": False,
    "{{ " + "(" * 5000 + ")" * 5000 + " }}": False,
}


# Each of these ends the process, and its next start takes a second; one of each kind is tried every time.
SLOW += [name for name, (_, said) in PROGRAMS.items() if said == OVER and name != "doubles every a"]
SLOW += [
    template for template, over in TEMPLATES.items() if over and "rfind" not in template and "'x' *" not in template
]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_takes_too_much_ends_the_work_and_others_refuse_one_chat(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    with pytest.raises(BadInputError, match="here: the target's chat template") as refused:
        render(tiny_tokenizer, [{"role": "user", "content": "hello"}], "here")
    assert isinstance(refused.value, RefusedChatError) is not TEMPLATES[template]
    assert len(str(refused.value)) < 600


def test_a_process_that_something_ended_is_started_again() -> None:
    """By the kernel that needs its memory, for example: the next chat is not refused for that."""
    ask = tokenizer_process._process.ask
    values: dict[str, Any] = {"messages": [], "tools": None, "arguments": {}}
    assert ask("render", template="a", **values)[0] == "a"
    child = tokenizer_process._process._running
    assert child is not None
    child.kill()
    child.wait()
    assert ask("render", template="b", **values)[0] == "b"
    assert tokenizer_process._process._running is not child
