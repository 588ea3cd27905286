"""A stranger's tokenizer or chat template that cannot work is refused in a sentence, before anything uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.distill.conversation import RefusedChatError, render
from outrider.targets import load_tokenizer


def replaced(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# What is put into tokenizer.json; what load_tokenizer says, None where it does no harm.
PROGRAMS: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    "replaces nothing": (
        {"normalizer": {"type": "Sequence", "normalizers": [replaced("", "x")]}},
        "breaks off .*index out of bounds",
    ),
    "a normaliser's regex that is none": ({"normalizer": replaced("(", "x", "Regex")}, "cannot be loaded"),
    "a damaged table of characters": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "cannot be loaded",
    ),
    "a regex of nested repetitions": ({"pre_tokenizer": split("(a+)+(a+)+(a+)+(a+)+\\x01")}, "cannot be loaded"),
    "a regex that is none": ({"pre_tokenizer": split("(?<n")}, "cannot be loaded"),
    "a regex that looks back": ({"pre_tokenizer": split("(?<=a+)b")}, None),
    "truncation with a stride": (
        {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 10**6}},
        "cannot be loaded",
    ),
    "words without an unknown one": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}, "pre_tokenizer": None},
        "cannot be loaded",
    ),
    "a unigram of nothing": ({"model": {"type": "Unigram", "vocab": [], "unk_id": None}}, "cannot be loaded"),
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


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_tokenizer_that_cannot_work_is_refused_as_it_is_loaded(
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


TEMPLATES = [
    "{{ range(9999999)|list|length }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[9].content.x.y }}",
    "{{ raise_exception('no') }}",
    "{{ '\\ud800' }}",
    "{% for",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_raises_refuses_one_chat(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", template)
    with pytest.raises(RefusedChatError, match="here: the target's chat template refuses") as refused:
        render(tiny_tokenizer, [{"role": "user", "content": "hello"}], "here")
    assert len(str(refused.value)) < 600
