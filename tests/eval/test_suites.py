"""Suites: where they come from, and what makes two of them the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.common import BadInputError
from outrider.distill.prompt_table import Prompt
from outrider.distill.recipe_prompts import SuitePrompts
from outrider.distill.sources import some_of_each
from outrider.eval.suites import load_suites, make_jobs, make_suite


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "text": f"def f{i}(x):"}) + "\n" for i in range(4)))
    return path


def test_a_prompt_file_is_a_suite_named_after_it(file, tiny_tokenizer):
    (suite,) = load_suites([str(file)], tiny_tokenizer)
    assert (suite.name, [p.id for p in suite.prompts]) == ("mine", ["mine/p0", "mine/p1", "mine/p2", "mine/p3"])
    assert list(suite.prompts[0].tokens) == tiny_tokenizer("def f0(x):")["input_ids"]


def test_a_limit_takes_the_first_prompts_of_rows_without_a_category_and_changes_the_digest(file, tiny_tokenizer):
    (whole,), (part,) = load_suites([str(file)], tiny_tokenizer), load_suites([str(file)], tiny_tokenizer, limit=2)
    assert part.prompts == whole.prompts[:2]
    assert part.digest != whole.digest


def test_a_limit_takes_as_evenly_of_all_categories_as_it_can_and_of_each_the_first(tmp_path, tiny_tokenizer):
    rows = [
        {"id": f"{c}{i}", "category": c, "text": f"{c} {i}"}
        for c, n in (("a", 5), ("b", 5), ("c", 1))
        for i in range(n)
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = {
        1: "a0",
        3: "a0 b0 c0",
        4: "a0 a1 b0 c0",
        7: "a0 a1 a2 b0 b1 b2 c0",
        11: " ".join(r["id"] for r in rows),
    }
    (whole,) = load_suites([str(path)], tiny_tokenizer)
    for limit, ids in expected.items():
        (part,) = load_suites([str(path)], tiny_tokenizer, limit)
        assert [p.id.removeprefix("tasks/") for p in part.prompts] == ids.split()
        assert part.prompts == whole.some(limit) == part.some(limit) == make_suite("s", whole.some(limit)).some(limit)
        assert [job.prompt for job in make_jobs([whole], limit)] == part.prompts
        assert {place.partition("row ")[2] for place in SuitePrompts.of([str(path)], limit).places.values()} == {
            str(1 + rows.index(row)) for row in rows if row["id"] in ids.split()
        }, "what must not be learnt is what is measured"
    assert [p.id for p in some_of_each(whole.prompts, 4, lambda p: p.id[-1])] == [p.id for p in whole.prompts[:4]]


def test_the_digest_depends_on_ids_tokens_and_order_only():
    one, two = Prompt("a", "s", (1, 2), text="x"), Prompt("b", "s", (3,))
    digest = make_suite("s", [one, two]).digest
    assert make_suite("other name", [Prompt("a", "s", (1, 2), text="y"), two]).digest == digest
    assert make_suite("s", [two, one]).digest != digest
    assert make_suite("s", [Prompt("a", "s", (1, 3)), two]).digest != digest


@pytest.mark.parametrize(
    ("name", "message"),
    [("cod", "did you mean 'code'"), ("nowhere.jsonl", "packaged suites: code, docs, prose")],
)
def test_an_unknown_suite_is_refused_with_what_there_is(name, message, tiny_tokenizer):
    with pytest.raises(BadInputError, match=message):
        load_suites([name], tiny_tokenizer)


def test_two_suites_of_one_name_are_refused_also_before_a_prompt_is_answered(file, tmp_path, tiny_tokenizer):
    (tmp_path / "sub").mkdir()
    other = tmp_path / "sub" / file.name
    other.write_text(file.read_text())
    for read in (lambda names: load_suites(names, tiny_tokenizer), SuitePrompts.of):
        with pytest.raises(BadInputError, match="2 suites are called 'mine'"):
            read([str(file), str(other)])


def test_a_file_that_all_call_question_has_its_folders_name(file, tmp_path, tiny_tokenizer, monkeypatch):
    """Spec-Bench's and EAGLE's suites, beside one another; also where the path does not name the folder."""
    for folder in ("gsm8k", "mt_bench"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "question.jsonl").write_text(file.read_text())
    monkeypatch.chdir(tmp_path / "gsm8k")
    suites = load_suites(["question.jsonl", "../mt_bench/question.jsonl"], tiny_tokenizer)
    assert [suite.name for suite in suites] == ["gsm8k", "mt_bench"]


def test_ids_that_repeat_empty_suites_and_the_name_all_are_refused():
    one, other = (Prompt("a", "s", (i,)) for i in (1, 2))
    for name, prompts, message in (
        ("s", [one, other], "'a' occurs 2 times"),
        ("s", [], "holds no prompts"),
        ("all", [one], "cannot be called 'all'"),
    ):
        with pytest.raises(BadInputError, match=message):
            make_suite(name, prompts)
