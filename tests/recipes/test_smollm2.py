"""The answers of SmolLM2 that ship are whole conversations, of different questions."""

from __future__ import annotations

import json

from outrider.recipes import packaged_file


def test_each_row_is_one_question_and_its_answer() -> None:
    lines = packaged_file("smollm2", "answers.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["messages"] for line in lines]
    assert len({question["content"] for question, _ in rows}) == len(rows) >= 2004
    assert {answer["finish_reason"] for _, answer in rows} == {"stop", "length"}
    assert all(answer["role"] == "assistant" and answer["content"] for _, answer in rows)
