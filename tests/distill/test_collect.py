"""Prompts come from many layouts in one deterministic order, and every row that is not used is counted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.distill.collect import DigestSet, PromptReading, collect, read_prompts
from outrider.distill.conversation import given_sequences
from outrider.distill.prompts import digest_prompts
from outrider.distill.sources import check_sources

Rows = Callable[..., str]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """`rows(name, *rows)`: a jsonl file of these rows."""

    def write(name: str, *given: dict[str, Any]) -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in given))
        return str(file)

    return write


def plain(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokenizer without a chat template."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>")


HELLO = "<|user|>hello<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "def f():\n"}, "def f():\n"),
        ({"prompt": "def f():\n"}, "def f():\n"),
        ({"prompt": [{"role": "user", "content": "hello"}]}, HELLO),
        ({"question": "hello", "answer": "42"}, HELLO),
        ({"question_id": 81, "category": "writing", "turns": ["hello", "again"]}, HELLO),
        ({"messages": [{"role": "user", "content": "hello"}]}, HELLO),
        ({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}, HELLO),
        (
            {
                "conversations": [
                    {"role": "user", "content": "hello"},
                    {"role": "assistant", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ]
            },
            HELLO,
        ),
        ({"messages": None, "text": "raw", "question": None}, "raw"),
        (
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    *[{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))],
                ]
            },
            "<|system|>s<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>",
        ),
    ],
)
def test_every_layout_is_understood(
    rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], text: str
) -> None:
    [prompt] = read_prompts([rows("a.jsonl", row)], tiny_tokenizer)
    assert prompt.text == text
    assert tiny_tokenizer.decode(prompt.tokens) == text
    assert (prompt.messages is not None) == text.startswith("<|")


def test_chat_tokens_are_those_of_the_librarys_own_template_call(
    rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [{"role": "user", "content": "sort these names"}]
    [prompt] = read_prompts([rows("a.jsonl", {"messages": messages})], tiny_tokenizer)
    expected = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(prompt.tokens) == expected


def test_a_question_is_raw_text_for_a_target_without_chat_template_but_a_chat_is_refused(
    rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    [prompt] = read_prompts([rows("a.jsonl", {"turns": ["hello"]})], plain(tiny_tokenizer))
    assert (prompt.text, prompt.messages) == ("hello", None)
    with pytest.raises(BadInputError, match=r"row 1: is a chat, but the target's tokenizer has no chat template"):
        read_prompts([rows("b.jsonl", {"messages": [{"role": "user", "content": "hello"}]})], plain(tiny_tokenizer))


def test_sources_are_read_in_turn_so_that_a_limit_leaves_a_mixture(
    rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    sources = [
        rows("one.jsonl", *[{"text": f"a{i}"} for i in range(5)]),
        rows("two.jsonl", {"text": "b0"}, {"text": "b1"}),
    ]
    assert [p.text for p in read_prompts(sources, tiny_tokenizer)] == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]
    assert [p.text for p in read_prompts(sources, tiny_tokenizer, limit=3)] == ["a0", "b0", "a1"]
    assert digest_prompts(read_prompts(sources, tiny_tokenizer)) == digest_prompts(
        read_prompts(sources, tiny_tokenizer)
    )
    assert digest_prompts(read_prompts(sources, tiny_tokenizer)) != digest_prompts(
        read_prompts(sources[::-1], tiny_tokenizer)
    )


def test_ids_are_the_rows_own_under_their_suite_and_unique(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    first = rows("mt_bench/question.jsonl", {"question_id": 81, "turns": ["a"]}, {"question_id": 81, "turns": ["b"]})
    second = rows("code.jsonl", {"id": "code/x:1", "suite": "code", "text": "c"}, {"text": "d"})
    found = read_prompts([first, second], tiny_tokenizer)
    assert {p.id for p in found} == {"mt_bench/81", "mt_bench/81#2", "code/x:1", "code/2"}
    assert [p.suite for p in found] == ["mt_bench", "code", "mt_bench", "code"]


def test_a_long_text_loses_its_beginning_and_keeps_its_bos(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers import processors

    with_bos = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer, bos_token="<|pad|>")
    with_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", with_bos.bos_token_id)]
    )
    file = rows("a.jsonl", {"text": "zyxwvutsrq"})
    found = collect([file], with_bos, reading=PromptReading(max_tokens=5))
    assert with_bos.decode(found.prompts[0].tokens) == "<|pad|>tsrq"
    assert found.prompts[0].text == "zyxwvutsrq"
    assert found.counts()["truncated"] == 1
    assert plain(tiny_tokenizer).decode(read_prompts([file], plain(tiny_tokenizer), max_tokens=5)[0].tokens) == "utsrq"


def test_long_chats_and_rows_that_ask_nothing_are_left_out_and_counted(
    rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    source = rows(
        "a.jsonl",
        {"question": "far too long a question"},
        {"question": "hi"},
        {"text": ""},
        {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "unasked"}]},
    )
    found = collect([source], tiny_tokenizer, reading=PromptReading(max_tokens=6))
    assert found.counts() == {
        "prompts": 1,
        "rows": 4,
        "truncated": 0,
        "leaked": 0,
        "too_long": 1,
        "unanswerable": 2,
        "unanswered": 0,
        "duplicate": 0,
        "malformed": 0,
    }


def test_tools_reach_the_template(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = plain(tiny_tokenizer)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    [prompt] = read_prompts(
        [rows("a.jsonl", {"tools": [{"name": "ls"}], "messages": [{"role": "user", "content": "x"}]})], tokenizer
    )
    assert prompt.text == "[ls]x"


def test_json_parquet_and_text_files_hold_the_same_prompts(
    tmp_path: Path, rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    import pyarrow
    import pyarrow.parquet

    table = [{"text": "one"}, {"text": "two"}]
    (tmp_path / "a.json").write_text(json.dumps(table))
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    expected = [p.tokens for p in read_prompts([rows("a.jsonl", *table)], tiny_tokenizer)]
    for suffix in ("json", "txt", "parquet"):
        assert [p.tokens for p in read_prompts([str(tmp_path / f"a.{suffix}")], tiny_tokenizer)] == expected


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', "line 2: not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1: is a list; expected an object"),
        ("a.jsonl", "\n", "no prompts in .* it is empty"),
        ("a.jsonl", '{"text": ""}\n', "none of its 1 rows can be used"),
        (
            "a.jsonl",
            '{"txet": "x"}\n',
            "row 1: expected one of text, prompt, question, messages, conversations, turns; found txet",
        ),
        ("a.jsonl", '{"messages": "x"}\n', "row 1: expected a list of messages"),
        ("a.jsonl", '{"messages": [{"text": "x"}]}\n', "a message needs `role` and `content`"),
        ("a.jsonl", '{"turns": []}\n', "`turns` must be a list that is not empty"),
        ("a.json", '{"text": "x"}', "expected a list of objects"),
        ("a.json", '{"text": "x"}\n{"text": "y"}', r"One object per line is a \.jsonl file"),
        ("a.parquet", "text", "not a readable parquet file"),
        ("a.csv", "x", r"is a \.csv file; expected one of \.jsonl, \.json, \.parquet, \.arrow, \.txt"),
    ],
)
def test_an_unusable_file_is_refused_with_its_place(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, name: str, content: str, expected: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInputError, match=expected):
        read_prompts([str(tmp_path / name)], tiny_tokenizer)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(BadInputError, match="not UTF-8 text"):
        read_prompts([str(tmp_path / "a.txt")], tiny_tokenizer)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("nowhere/a.jsonl", "does not exist"), ("embedded:poetry", "no embedded file"), (".", "is a folder")],
)
def test_a_source_that_cannot_exist_is_refused_before_anything_is_loaded(source: str, expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        check_sources([source])


def test_an_unknown_hub_name_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    check_sources(["some-org/no-such-data:train"])
    with pytest.raises(
        BadInputError, match=r"'some-org/no-such-data:train' is no file here, and the Hub gives no data set"
    ):
        read_prompts(["some-org/no-such-data:train"], tiny_tokenizer)


def test_a_template_that_refuses_a_conversation_is_quoted(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = plain(tiny_tokenizer)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(
        BadInputError,
        match=r"row 1: the target's chat template refuses this conversation: System role not supported.*'user'",
    ):
        read_prompts([rows("a.jsonl", {"question": "x"})], tokenizer)


@pytest.mark.skipif("OUTRIDER_DATA" not in os.environ, reason="OUTRIDER_DATA names a folder of real prompt files")
def test_real_prompt_files_are_readable(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """Every .jsonl under $OUTRIDER_DATA gives a prompt for each of its rows, and what they answer is supervised."""
    reading = PromptReading(whole=True)
    for file in sorted(Path(os.environ["OUTRIDER_DATA"]).rglob("*.jsonl")):
        found = collect([str(file)], tiny_tokenizer, reading=reading)
        assert len(found.prompts) == sum(1 for line in file.open() if line.strip()), file
        assert len({p.id for p in found.prompts}) == len(found.prompts)
        for prompt in found.prompts[:200]:
            supervised = "".join(
                tiny_tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])
                for tokens, mask in (given_sequences(prompt, tiny_tokenizer) if prompt.given else ())
            )
            for answer in prompt.given:
                assert "".join(message["content"] for message in answer) in supervised
        print(file.name, found.counts())


def test_a_digest_set_remembers_every_text() -> None:
    known = DigestSet()
    texts = [f"text {i % 5000}" for i in range(8000)]
    assert [known.add(text) for text in texts] == [True] * 5000 + [False] * 3000
    assert len(known) == 5000
