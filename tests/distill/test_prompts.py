"""A table on disk is the list of prompts that it was made from, and leaves nothing behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from outrider.common.atomic import CannotWriteError
from outrider.common.digests import digest_json
from outrider.distill.prompt_table import Prompt, PromptTable, digest_prompts

USER = {"role": "user", "content": "u"}
PROMPTS = [
    *(Prompt(f"p{i}", "s", tuple(range(i % 7 + 1)), f"text {i}") for i in range(2500)),
    Prompt(
        "chat", "s", (1, 2), "t", (USER,), ((USER,), (USER, USER)), (({"role": "assistant", "content": "é"},),), [{}]
    ),
]


def test_a_table_is_the_list_that_it_was_made_from(tmp_path: Path) -> None:
    table = PromptTable(iter(PROMPTS), folder=tmp_path)
    assert list(table) == PROMPTS
    assert len(table) == len(PROMPTS)
    assert [table[i] for i in (0, 1023, 1024, 2047, 2048, -1)] == [PROMPTS[i] for i in (0, 1023, 1024, 2047, 2048, -1)]
    assert table[1020:1030] == PROMPTS[1020:1030]
    assert table.lengths.tolist() == [len(p.tokens) for p in PROMPTS]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(IndexError):
        table[len(PROMPTS)]


def test_an_empty_table_is_an_empty_list() -> None:
    table = PromptTable([])
    assert (len(table), list(table), table[:3]) == (0, [], [])


def test_arguments_of_the_template_belong_to_every_prompt() -> None:
    table = PromptTable(PROMPTS[:1], {"enable_thinking": False})
    assert table[0].template == {"enable_thinking": False}


def test_nothing_is_left_behind_when_reading_fails(tmp_path: Path) -> None:
    def broken():  # type: ignore[no-untyped-def]
        yield PROMPTS[0]
        raise ValueError("a bad row")

    with pytest.raises(ValueError, match="a bad row"):
        PromptTable(broken(), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(CannotWriteError, match="could not be written"):
            PromptTable(iter(PROMPTS), folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_the_digest_of_prompts_is_that_of_ids_suites_and_tokens_and_of_what_comes_later() -> None:
    plain = PROMPTS[:5]
    assert digest_prompts(plain) == digest_json([[p.id, p.suite, list(p.tokens)] for p in plain])
    assert digest_prompts([]) == digest_json([])
    once = Prompt("chat", "s", (1, 2), "t", (USER,))
    assert digest_prompts([once]) != digest_prompts([PROMPTS[-1]])


def test_content_is_what_is_asked_whatever_the_tokens_and_the_id() -> None:
    assert Prompt("a", "s", (1,), "x").content == Prompt("b", "t", (2, 3), "x").content
    assert Prompt("a", "s", (1,), "x").content != Prompt("a", "s", (1,), "y").content
    chat = Prompt("a", "s", (1,), "t", (USER,))
    assert chat.content == Prompt("b", "s", (2,), "another template's text", (USER,)).content
    assert chat.content != Prompt("a", "s", (1,), "t", (USER,), ((USER,),)).content
    assert Prompt("a", "s", (1,)).content != Prompt("a", "s", (2,)).content
