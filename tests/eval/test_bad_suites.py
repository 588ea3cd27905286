"""Every kind of bad suite has its message before the target's weights are loaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.common import BadInputError
from outrider.scripts import eval_setup

GOOD = {"question_id": 1, "category": "math", "turns": ["What is 1 + 1?", "And 2 + 2?"]}
MUCH = {"text": "x" * 40 * 2**20}


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "s.jsonl")


BAD: list[tuple[str, bytes | None, str, dict[str, Any]]] = [
    ("nowhere.jsonl", None, "no suite .*nowhere.jsonl.*neither packaged nor a file", {}),
    ("cod", None, "did you mean 'code'", {}),
    (".", None, "is a folder; name one file of prompts in it", {}),
    ("no-such-org/no-such-data:test", None, "is no file here, and the Hub gives no data set for it", {}),
    ("s.csv", b"text\nx\n", "is a .csv file; expected one of .jsonl", {}),
    ("s.jsonl", b"", "no prompts in .*it is empty", {}),
    ("s.jsonl", b"\n\n", "no prompts in .*it is empty", {}),
    ("s.jsonl", lines({"txet": "x"}), "row 1: expected one of text, prompt, question, .*found txet", {}),
    ("s.jsonl", lines({"text": None}), r"found text \(null\)", {}),
    ("s.jsonl", lines({"turns": "x"}), '`turns` must be a list that is not empty, found "x"', {}),
    ("s.jsonl", lines({"turns": []}), r"`turns` must be a list that is not empty, found \[\]", {}),
    ("s.jsonl", lines(GOOD, {"turns": ["x", 3]}), "row 2: `turns` must hold text; its entry 2 is 3", {}),
    (
        "s.jsonl",
        lines({"turns": ["x"] * 1001}),
        "`turns` holds 1,001 turns; at most 1,000 are asked",
        {},
    ),
    ("s.jsonl", lines({"turns": ["x", " "]}), "row 1: turn 2 of `turns` is empty", {}),
    ("s.jsonl", lines(GOOD) + b'{"turns": ["x"\n', "s.jsonl: line 2: not valid JSON", {}),
    ("s.jsonl", lines(GOOD) + b'{"text": "\xff"}\n', "s.jsonl: line 2: cannot be read: not UTF-8", {}),
    ("s.jsonl", '{"text": "x"}'.encode("utf-16"), "it is in UTF-16; save it as UTF-8", {}),
    ("s.jsonl", lines(["x"]), "line 1: is a list; expected an object with named fields", {}),
    ("s.jsonl", b'{"text": "x", "score": NaN}\n', "NaN is no number of JSON", {}),
    ("s.jsonl", lines(MUCH), "line 1: longer than 32 MB", {}),
    ("s.txt", b"x" * 1_000_001, "row 1: a text of 1,000,001 letters; at most 1,000,000 are read as tokens", {}),
    ("s.jsonl", b'{"text": "x", "id": ' + b"1" * 500 + b"}\n", "an integer of 500 digits", {}),
    ("s.jsonl", b'{"text": ' + b"[" * 200 + b"]" * 200 + b"}\n", "more than 100 lists and objects inside", {}),
    ("s.jsonl", b'{"text": "\\ud800"}\n', "a lone surrogate", {}),
    ("s.jsonl", lines(GOOD, GOOD), "row 2: the id 1 stands in an earlier row, too", {}),
    ("s.jsonl", lines({"text": "x"}, {"text": " "}), "has 1 with nothing to answer.*row 2.*mend the row", {}),
    ("s.jsonl", lines({"messages": [{"role": "usr", "content": "x"}]}), "a message has the role 'usr'", {}),
    ("s.jsonl", lines({"messages": [{"role": "user", "content": None}]}), "must be text, found null", {}),
    ("s.jsonl", lines({"text": "word " * 600}), "exceeds the target's context of 512.*max_prompt_tokens=504", {}),
    ("s.jsonl", lines(GOOD), "all of its 1 prompts have more than 2 tokens", {"max_prompt_tokens": 2}),
    ("s.jsonl", lines(GOOD), "all of its 1 prompts have more than 3 tokens", {"contexts": [3]}),
    (
        "s.jsonl",
        lines(GOOD),
        "eval.contexts: 510 tokens and 8 new ones exceed .* 512; take at most 504",
        {"contexts": [510]},
    ),
    ("s.jsonl", lines(GOOD), "between 1 and the number of prompts, 1; got 4", {"batch_sizes": [4]}),
    ("s.json", b'{"text": "x"', "s.json.*not valid JSON|s.json.*One object per line", {}),
    ("s.parquet", b"PAR1 and no more", "not a readable parquet file", {}),
    ("all.jsonl", lines(GOOD), "a suite cannot be called 'all'", {}),
]


@pytest.fixture
def refused(
    tiny_llama: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    def no_weights(_recipe: Any) -> None:
        raise BadInputError("now the weights are loaded")

    target = tmp_path / "target"
    tiny_llama(vocab=len(tiny_tokenizer), eos_token_id=1, pad_token_id=0).save_pretrained(target)
    tiny_tokenizer.save_pretrained(target)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(eval_setup, "trained_drafter", lambda _recipe: tmp_path)
    monkeypatch.setattr(eval_setup, "load_target", no_weights)

    def refuse(suites: list[str], **settings: Any) -> str:
        recipe = {"name": "x", "target": {"path": str(target)}, "drafter": {"type": "ngram"}}
        recipe |= {"data": {"prompts": ["embedded:code"]}, "eval": {"suites": suites, "max_new_tokens": 8} | settings}
        (tmp_path / "x.yaml").write_text(yaml.safe_dump(recipe))
        with pytest.raises(BadInputError) as error:
            eval_setup.load_setup(str(tmp_path / "x.yaml"))
        return str(error.value)

    return refuse


@pytest.mark.parametrize(("name", "content", "message", "settings"), BAD, ids=range(len(BAD)))
def test_a_bad_suite_is_refused_before_a_model_is_loaded(
    refused: Callable[..., str],
    tmp_path: Path,
    name: str,
    content: bytes | None,
    message: str,
    settings: dict[str, Any],
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    said = refused([name], **settings)
    assert re.search(message, said), said


def test_a_pipe_is_refused_and_never_waited_for(refused: Callable[..., str], tmp_path: Path) -> None:
    a_pipe(tmp_path)
    assert "expected a regular file, found a pipe" in refused(["s.jsonl"])


def test_a_good_suite_comes_as_far_as_the_weights(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(lines(GOOD))
    assert refused(["s.jsonl"]) == "now the weights are loaded"


def test_settings_of_generation_that_cannot_be_used_are_refused_as_early(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "target" / "generation_config.json").write_text('{"suppress_tokens": 5}')
    assert "generation_config.json cannot be used: 'int' object is not iterable" in refused(["code"])
