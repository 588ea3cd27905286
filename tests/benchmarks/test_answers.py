"""The answers that are kept are whole conversations, of different questions."""

from __future__ import annotations

import json
from pathlib import Path

ANSWERS = Path(__file__).parents[2] / "benchmarks" / "data" / "smollm2-answers.jsonl"


def test_each_row_is_one_question_and_its_answer() -> None:
    rows = [json.loads(line)["messages"] for line in ANSWERS.read_text(encoding="utf-8").splitlines()]
    assert len({question["content"] for question, _ in rows}) == len(rows) >= 768
    assert {answer["finish_reason"] for _, answer in rows} == {"stop", "length"}
    assert all(answer["role"] == "assistant" and answer["content"] for _, answer in rows)
