"""Rows of every layout say what is asked, what was answered and with which tools; another kind of value is an error."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from outrider.distill.dataset_formats import RowError, understand
from outrider.distill.recipe_prompts import PromptReading, collect

from .conftest import Tokenizer, assistant, user, write_rows

U = user("u")
A = assistant("a")
S = {"role": "system", "content": "s"}
GPT = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]
CALL = {"type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}


def said(turns: tuple[tuple[dict[str, Any], ...], ...]) -> list[str]:
    return ["+".join(message["content"] for message in turn) for turn in turns]


@pytest.mark.parametrize(
    ("row", "layout", "asked"),
    [
        ({"messages": [S, U, A, U, A]}, "messages", (["s+u", "u"], ["a", "a"])),
        ({"messages": [U, A, U]}, "messages", (["u", "u"], ["a"])),
        ({"messages": [A, U, A, A]}, "messages", (["u"], ["a+a"])),
        ({"messages": [S, A, U]}, "messages", (["s+u"], [])),
        ({"conversations": GPT}, "messages", (["u"], ["a"])),
        ({"system": "s", "conversation": [U, A]}, "messages", (["s+u"], ["a"])),
        ({"prompt": [U], "completion": [A]}, "messages", (["u"], ["a"])),
        ({"turns": ["u", "v"], "reference": ["a", "b"]}, "turns", (["u", "v"], ["a", "b"])),
        ({"turns": ["u", " ", "v"], "reference": ["a", "b", "c"]}, "turns", (["u", "v"], [])),
        ({"turns": [U, A]}, "messages", (["u"], ["a"])),
        ({"question": "u", "answer": "a"}, "question", (["u"], ["a"])),
        ({"instruction": "u", "input": "v", "output": "a"}, "question", (["u\n\nv"], ["a"])),
        ({"instruction": "u", "input": "", "output": "a"}, "question", (["u"], ["a"])),
        ({"messages": [S, A]}, "messages", ([""], [])),
        ({"messages": [user(" "), A]}, "messages", ([""], [])),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}]}, "messages", (["u"], [])),
    ],
)
def test_a_chat_is_told_apart_into_questions_and_answers(
    row: dict[str, Any], layout: str, asked: tuple[list[str], list[str]]
) -> None:
    found = understand(row, "here")
    assert (found.layout, found.text) == (layout, None)
    assert (said((found.messages, *found.later)), said(found.given)) == asked


@pytest.mark.parametrize(
    ("row", "text", "answer"),
    [
        ({"text": "t"}, "t", []),
        ({"prompt": "t", "completion": "c"}, "t", ["c"]),
        ({"prompt": "t", "response": "c", "text": "x"}, "t", ["c"]),
    ],
)
def test_raw_text_may_bring_its_continuation(row: dict[str, Any], text: str, answer: list[str]) -> None:
    found = understand(row, "here")
    assert (found.layout, found.text, said(found.given)) == ("text", text, answer)


def test_a_recipe_can_force_the_layout() -> None:
    assert understand({"prompt": "x"}, "here").text == "x"
    forced = understand({"prompt": "x", "response": "y"}, "here", "question")
    assert (forced.layout, said((forced.messages,)), said(forced.given)) == ("question", ["x"], ["y"])
    assert understand({"question": "x"}, "here", "text").text == "x"
    assert understand({"text": "t", "messages": [U]}, "here", "text").text == "t"
    with pytest.raises(RowError, match=r"expected one of turns, .* \(data.prompts says layout: turns\); found text"):
        understand({"text": "x"}, "here", "turns")


def test_a_recipe_can_name_the_column() -> None:
    row = {"problem": "x", "text": "t", "answer": "y"}
    assert understand(row, "here", column="problem").text == "x"
    asked = understand(row, "here", "question", "problem")
    assert (asked.layout, asked.key) == ("question", "problem")
    assert (said((asked.messages,)), said(asked.given)) == (["x"], ["y"])
    assert understand({"dialogue": [U, A]}, "here", column="dialogue").layout == "messages"
    with pytest.raises(RowError, match=r"expected one of task \(data.prompts says column: task\); found problem"):
        understand(row, "here", "question", "task")


def test_one_question_is_the_last_of_a_chat_and_the_first_of_turns() -> None:
    chat = understand({"messages": [S, U, A, user("v"), A]}, "here").last_question()
    assert (said((chat.messages,)), chat.later, said(chat.given)) == (["s+u+a+v"], (), ["a"])
    for references, given in (({}, []), ({"reference": ["a", "b"]}, ["a"])):
        turns = understand({"turns": ["u", "v"], **references}, "here").last_question()
        assert (said((turns.messages,)), turns.later, said(turns.given)) == (["u"], (), given)


def test_tool_calls_hold_objects_as_templates_expect_them_and_nulls_of_tables_are_gone() -> None:
    row = {
        "tools": '[{"type": "function", "function": {"name": "ls"}}]',
        "messages": [
            {"role": "user", "content": "u", "tool_calls": None},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{**CALL, "id": None}]},
            {"role": "tool", "content": "file", "name": None},
            {"role": "assistant", "content": "a"},
        ],
    }
    found = understand(row, "here")
    assert found.tools == [{"type": "function", "function": {"name": "ls"}}]
    assert found.messages == (U,)
    [[call], [answer]] = found.given
    assert call == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "ls", "arguments": {"path": "."}}}],
    }
    assert (said(found.later), answer["content"]) == (["file"], "a")


def test_arguments_that_are_no_json_stay_as_the_model_wrote_them() -> None:
    broken = {"type": "function", "function": {"name": "ls", "arguments": '{"path": '}}
    found = understand({"messages": [U, {"role": "assistant", "content": "", "tool_calls": [broken]}]}, "here")
    assert found.given[0][0]["tool_calls"] == [broken]


VIDEO: Any = [{"type": "video", "video": "x"}]


def picture(place: Any = "x", role: str = "user") -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": place}}
    return {"messages": [U, {"role": role, "content": [part, {"type": "text", "text": "What is it?"}]}]}


NEEDS = "a message needs `role` and `content`"
FAULTS = [
    ({}, "expected one of text, prompt, question, messages, conversations, turns; found no keys."),
    ({"txet": "x"}, "found txet."),
    ({"text": None, "id": 1}, "found text (null), id."),
    ({"text": 5}, "`text` must be text, found 5."),
    ({"prompt": 5}, "`prompt` must be text, found 5."),
    ({"prompt": ["a"]}, '`prompt` must be text, found ["a"].'),
    ({"question": {"a": 1}}, '`question` must be text, found {"a": 1}.'),
    ({"instruction": "x", "input": 3}, "`input` must be text, found 3."),
    ({"turns": []}, "`turns` must be a list that is not empty, found []."),
    ({"turns": "x"}, '`turns` must be a list that is not empty, found "x".'),
    ({"turns": [1, 2]}, "`turns` must hold text; its entry 1 is 1."),
    ({"turns": ["x", None]}, "`turns` must hold text; its entry 2 is null."),
    ({"messages": "x"}, 'expected a list of messages, found "x".'),
    ({"messages": ["x"]}, 'expected a list of messages, found ["x"].'),
    ({"messages": {"role": "user"}}, "expected a list of messages, found "),
    ({"messages": [{"text": "x"}]}, f"{NEEDS} (or `from` and `value`); found the keys text."),
    ({"messages": [{"role": 3, "content": "x"}]}, NEEDS),
    ({"messages": [{"role": "usr", "content": "x"}]}, "a message has the role 'usr'; expected one of system, "),
    ({"messages": [{"role": "user", "content": None}]}, "the content of a message (user) must be text, found null."),
    ({"messages": [{"role": "user"}]}, "the content of a message (user) must be text, found null."),
    ({"messages": [U, {"role": "assistant", "content": None}]}, "a message (assistant) must be text, found null."),
    ({"messages": [{"role": "user", "content": 7}]}, "the content of a message (user) must be text, found 7."),
    ({"messages": [user(VIDEO)]}, "the content of a message (user) must be text, found [{"),
    (picture(), "there is no image "),
    (picture("https://example.org/a.png"), "is on a network, and nothing is fetched from there"),
    (picture("/etc/hostname"), "is not below the prompt file's folder"),
    (picture("a/../../b.png"), "is not below the prompt file's folder"),
    (picture("data:image/png,x"), "must be in base64"),
    (picture("data:image/png;base64,x!"), "is no base64"),
    (picture("data:image/png;base64,aGVsbG8="), "not an image of the kinds PNG, JPEG"),
    (picture(7), "a part of a message must be a text, or an image by its path or data: URL; found {"),
    (picture(role="assistant"), "an assistant's message holds an image"),
    ({"messages": [U, {**A, "tool_calls": "ls"}]}, '`tool_calls` must be a list, found "ls".'),
    ({"messages": [U, {**A, "tool_calls": ["ls"]}]}, 'a tool call must be an object, found "ls".'),
    ({"messages": [U], "tools": "ls"}, "`tools` must be a list, or JSON of one: not valid JSON"),
    ({"messages": [U], "tools": {"name": "ls"}}, "`tools` must be a list, or JSON of one; found {"),
    ({"messages": [U], "tools": ["ls"]}, '`tools` must hold objects; its entry 1 is "ls".'),
    ({"messages": [U, {**A, "tool_calls": [{"function": "ls"}]}]}, "a tool call must name its function, found {"),
    ({"messages": [U], "system": 5}, "`system` must be text, found 5."),
    ({"prompt": [U], "completion": [{"role": "assistant"}]}, "a message (assistant) must be text, found null."),
]


@pytest.mark.parametrize(("row", "expected"), FAULTS)
def test_a_planted_fault_is_named_with_its_place(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], expected: str
) -> None:
    """In the third row of a real file, which is read as a recipe's is."""
    file = write_rows(tmp_path / "chats.jsonl", [{"text": "a"}, {"text": "b"}, row])
    with pytest.raises(RowError) as caught:
        collect([file], tokenizer)
    assert str(caught.value).startswith(f"{file}, row 3: ")
    assert expected in str(caught.value)
    found = collect([file], tokenizer, reading=PromptReading(drop_malformed=True))
    assert (len(found.prompts), found.counts()["malformed"]) == (2, 1)
    assert expected in found.sources[0].examples["malformed"]


def test_what_no_template_reads_of_a_message_goes() -> None:
    """A time of a parquet file is no JSON, and a number of the message would tell equal questions apart."""
    notes = {"timestamp": datetime.datetime(2026, 1, 1), "id": 7, "score": 0.5, "metadata": {"by": "x"}}
    kept = {"reasoning_content": "hm", "name": "ann", "tool_call_id": "1"}
    noted = understand({"messages": [{**U, **notes}, {**A, **kept, **notes}]}, "here")
    assert (noted.messages, noted.given) == ((U,), (({**A, **kept},),))
    assert noted.canonical(with_answers=True) == understand({"messages": [U, {**A, **kept}]}, "here").canonical(True)
