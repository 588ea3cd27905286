"""What a recipe learns from is mixed by weight, read once, never what it measures, and every row is accounted for."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.decode import Decoder
from outrider.distill import distill, load_responses, provenance
from outrider.distill.collect import Collection, PromptReading, collect, recipe_prompts
from outrider.recipes import Recipe
from outrider.targets import Target

from .conftest import write_rows

Rows = Callable[..., str]
U, A = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """`rows(name, *rows)`: a jsonl file of these rows."""

    def write(name: str, *given: dict[str, Any]) -> str:
        return write_rows(tmp_path / name, given)

    return write


def recipe(prompts: list[Any], suites: list[str] | None = None, **data: Any) -> Recipe:
    values = {"name": "t", "target": {"path": "unused"}, "drafter": {}, "data": {"prompts": prompts, **data}}
    return Recipe.from_dict({**values, "eval": {"suites": suites or ["code"]}})


def texts(found: Collection) -> list[str]:
    return [prompt.text for prompt in found.prompts]


def numbered(letter: str, count: int) -> list[dict[str, Any]]:
    return [{"text": f"{letter}{i}"} for i in range(count)]


def test_weights_hold_to_the_last_prompt(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    one, other = rows("a.jsonl", *numbered("a", 50)), rows("b.jsonl", *numbered("b", 10))
    found = recipe_prompts(recipe([{"path": one, "weight": 3}, {"path": other, "weight": 1.0}]), tiny_tokenizer)
    letters = [text[0] for text in texts(found)]
    assert letters[:8] == ["a", "a", "b", "a", "a", "a", "b", "a"]
    assert (letters.count("a"), letters.count("b")) == (32, 10), "b ends, and so does the mixture"
    limited = recipe_prompts(recipe([{"path": one, "weight": 3}, other], limit=12), tiny_tokenizer)
    assert [text[0] for text in texts(limited)].count("a") == 9
    assert len(recipe_prompts(recipe([one, other]), tiny_tokenizer).prompts) == 60, "without weights all of it is read"


def test_three_sources_are_read_in_turn_after_one_has_ended(
    rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    sources = [rows(f"{letter}.jsonl", *numbered(letter, count)) for letter, count in (("a", 3), ("b", 1), ("c", 3))]
    assert texts(collect(sources, tiny_tokenizer)) == ["a0", "b0", "c0", "a1", "c1", "a2", "c2"]


def test_what_is_asked_twice_is_learnt_once(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    source = rows(
        "a.jsonl",
        {"id": 1, "messages": [U, A]},
        {"id": 2, "messages": [U, {**A, "content": "b"}]},
        {"id": 3, "question": "u"},
        {"id": 4, "messages": [U, A, U]},
        {"id": 5, "text": "u"},
    )
    found = recipe_prompts(recipe([source]), tiny_tokenizer)
    assert [p.id for p in found.prompts] == ["a/1", "a/4", "a/5"]
    assert found.counts()["duplicate"] == 2
    given = recipe_prompts(recipe([source], answers="given"), tiny_tokenizer)
    assert [p.id for p in given.prompts] == ["a/1", "a/2", "a/4"], "with another answer there is more to learn"
    assert given.counts()["unanswered"] == 2


def test_what_is_measured_is_not_learnt(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    suite = rows("suite.jsonl", {"text": "other"}, {"question": "sort  the\nnames"})
    leak = rows("chats.jsonl", {"messages": [{**U, "content": "sort the names "}, A, U]}, {"messages": [U]})
    expected = rf"{leak}, row 1 asks what the suite {suite}, row 2, measures: 'sort the names '.*data.allow_leaks=true"
    with pytest.raises(BadInputError, match=expected):
        recipe_prompts(recipe([leak], [suite]), tiny_tokenizer)
    allowed = recipe_prompts(recipe([leak], [suite], allow_leaks=True), tiny_tokenizer)
    assert (allowed.counts()["prompts"], allowed.counts()["leaked"]) == (2, 1)
    late = rows("late.jsonl", {"messages": [U, A, {**U, "content": "sort the names"}]})
    assert len(recipe_prompts(recipe([late], [suite]), tiny_tokenizer).prompts) == 1, (
        "in another conversation it is another"
    )


def test_only_the_prompts_that_are_measured_count(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    suite, leak = rows("suite.jsonl", {"text": "a"}, {"text": "b"}), rows("data.jsonl", {"text": "b"})
    asked = recipe([leak], [suite])
    asked.eval.limit = 1
    assert len(recipe_prompts(asked, tiny_tokenizer).prompts) == 1
    asked.eval.limit = 2
    with pytest.raises(BadInputError, match="row 2, measures"):
        recipe_prompts(asked, tiny_tokenizer)


def test_malformed_rows_end_the_run_or_are_counted(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    source = rows("a.jsonl", {"text": "x"}, {"prompt": 5}, {"turns": [1]}, {"text": "y"})
    with pytest.raises(BadInputError, match="row 2: `prompt` must be text, found 5"):
        recipe_prompts(recipe([source]), tiny_tokenizer)
    found = recipe_prompts(recipe([source], malformed="drop"), tiny_tokenizer)
    assert (texts(found), found.counts()["malformed"]) == (["x", "y"], 2)
    assert found.sources[0].examples["malformed"].endswith("row 2: `prompt` must be text, found 5.")


def test_a_refused_chat_is_malformed(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    source = rows("a.jsonl", {"messages": [{"role": "system", "content": "s"}, U]}, {"messages": [U]})
    found = recipe_prompts(recipe([source], malformed="drop"), tokenizer)
    assert found.counts()["malformed"] == 1
    assert "refuses this conversation: no system" in found.sources[0].examples["malformed"]


def test_every_source_gets_a_line_and_losses_a_warning(
    rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    fine = rows("fine.jsonl", *numbered("a", 60), {"text": "a1"})
    lossy = rows("lossy.jsonl", *numbered("b", 30), {"messages": [{**U, "content": "long " * 99}]}, {"text": ""})
    said = io.StringIO()
    with caplog.at_level(logging.WARNING):
        recipe_prompts(recipe([fine, lossy], max_prompt_tokens=20), tiny_tokenizer, Console(file=said))
    first, second = said.getvalue().splitlines()
    assert first == f"{fine}: text (key text); 60 of 61 rows; left out: 1 duplicates"
    assert second == (
        f"{lossy}: text (key text), messages (key messages); 30 of 32 rows; "
        "left out: 1 too long, 1 with nothing to answer"
    )
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{lossy}: 6.2% of the rows were left out")
    assert "row 31: a chat of" in warning


def test_conversations_are_asked_from_their_first_question_on(
    rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    source = rows("a.jsonl", {"messages": [U, A, {**U, "content": "v"}, A]}, {"turns": ["one", "two", "three"]})
    first, second = recipe_prompts(recipe([source]), tiny_tokenizer).prompts
    assert first.text == "<|user|>u<|end|><|assistant|>"
    assert (first.later, first.given) == ((({"role": "user", "content": "v"},),), ((A,), (A,)))
    assert [turn[0]["content"] for turn in second.later] == ["two", "three"]


def test_arguments_reach_the_template(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    tokenizer.chat_template = "{{ messages[0].content }}{% if not enable_thinking %}<no thought>{% endif %}"
    asked = recipe([rows("a.jsonl", {"question": "u"})])
    asked.template = {"enable_thinking": False}
    [prompt] = recipe_prompts(asked, tokenizer).prompts
    assert prompt.text == "u<no thought>"
    assert prompt.template == {"enable_thinking": False}


def test_ids_of_one_name_are_numbered_in_linear_time(rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    source = rows("a.jsonl", *({"id": "x", "text": f"t{i}"} for i in range(4000)))
    ids = [p.id for p in collect([source], tiny_tokenizer, reading=PromptReading()).prompts]
    assert ids[:3] == ["a/x", "a/x#2", "a/x#3"]
    assert len(set(ids)) == 4000


def test_answers_that_came_with_the_rows_are_learnt_without_the_target(
    rows: Rows, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "generate", None)  # nobody may be asked
    source = rows(
        "pairs.jsonl",
        {"prompt": "def f():", "completion": " pass"},
        {"messages": [U, A, {**U, "content": "v"}, {**A, "content": "b"}]},
        {"question": "nobody answered"},
        {"question": "far", "answer": ""},
    )
    made = recipe([source], answers="given", max_prompt_tokens=40, max_new_tokens=20)
    made.output = str(tmp_path / "run")
    folder = distill(made, tiny_target)
    tokenizer = tiny_target.require_tokenizer()
    found = [
        tokenizer.decode([t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m])
        for row in load_responses(folder)
    ]
    assert found == [" pass<|end|>", "a<|end|>b<|end|>"]
    counts = provenance(folder)["counts"]
    assert (counts["unanswered"], counts["sequences"], counts["rows"]) == (2, 2, 4)
    [told] = provenance(folder)["sources"]
    assert (told["source"], told["kept"], told["dropped"]) == (source, 2, {"unanswered": 2})
    assert distill(made, tiny_target) == folder, "a finished folder is used as it is"


def test_a_source_whose_rows_all_repeat_another_adds_nothing(
    rows: Rows, tiny_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    files = [rows("first.jsonl", {"text": "a"}, {"text": "b"}), rows("second.jsonl", {"text": "a"})]
    found = recipe_prompts(recipe(files), tiny_tokenizer)
    assert (len(found.prompts), found.counts()["duplicate"]) == (2, 1)
    assert "second.jsonl: 100.0% of the rows were left out" in caplog.text
