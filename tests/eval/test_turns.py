"""Conversations, categories, contexts, batches and the target's own sampling, in a suite and in its report."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan, Sampling
from outrider.distill.conversation import next_question
from outrider.distill.recipe_prompts import PromptReading, collect
from outrider.eval import Ratio, Report
from outrider.eval.generation_config import base_sampling
from outrider.eval.measure import Contestant, GenerateRacer, measure, suite_info
from outrider.eval.reports.render import markdown
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import checked_for_leaks, load_suites, make_jobs, suites_of, with_later_turns
from outrider.eval.summary import groups_of, summarise_groups
from outrider.heads import Ngram
from outrider.recipes import EvalSpec
from outrider.targets import Target

ROWS: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["Write a name.", "Now another one."]},
    {"question_id": 82, "category": "math", "turns": ["What is 3 + 4?", "Add 5."]},
    {"question_id": 161, "category": "translation", "turns": ["Translate: Guten Tag"]},
    {"question_id": 162, "category": "qa", "turns": ["Who wrote that word by word and then some more of it?"]},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "spec_bench").mkdir()
    path = tmp_path / "spec_bench" / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def settings(file: Path) -> EvalSpec:
    return EvalSpec(suites=[str(file)], max_new_tokens=12, repeats=1, temperatures=[0.0], batch_sizes=[1, 2])


@pytest.fixture
def report(tiny_target: Target, settings: EvalSpec) -> Report:
    entrants = [Contestant("ngram", Ngram(), Plan(2))]
    return measure(tiny_target, entrants, suites_of(tiny_target, settings), settings, generate_baseline=False)


def test_a_later_turn_is_asked_after_the_plain_targets_own_answer(tiny_target: Target, file: Path) -> None:
    jobs = make_jobs(load_suites([str(file)], tiny_target.require_tokenizer()))
    asked = with_later_turns(tiny_target, jobs, 12)
    ids = [f"spec_bench/{n}" for n in ("81", "81, turn 2", "82", "82, turn 2", "161", "162")]
    assert [job.request for job in asked] == ids
    first = asked[0].prompt
    [answer] = Decoder(tiny_target).generate([first.tokens], 12, Sampling(), Plan(0)).tokens
    assert asked[1].prompt.tokens == next_question(first, [answer], tiny_target.require_tokenizer())
    assert asked[1].sequence != asked[0].sequence
    alone = with_later_turns(tiny_target, jobs[1:2], 12)
    assert [job.prompt.tokens for job in alone] == [job.prompt.tokens for job in asked[2:4]]


def test_turns_categories_tasks_and_batches_are_in_the_report(report: Report) -> None:
    drafter = {(g.by, g.group): g for g in report.groups if g.contestant == "ngram"}
    assert [by_group for by_group in drafter if by_group[0] != "category"] == [
        ("task", "mt_bench"),
        ("task", "translation"),
        ("task", "qa"),
        ("turn", "turn 1"),
        ("turn", "turn 2"),
    ]
    counts = {name: g.num_prompts for (by, name), g in drafter.items() if by != "category"}
    assert counts == {"mt_bench": 4, "translation": 1, "qa": 1, "turn 1": 4, "turn 2": 2}
    assert drafter["category", "math"].num_prompts == 2
    whole = report.headline("ngram")
    assert sum(g.num_tokens for (by, _), g in drafter.items() if by == "turn") == whole.num_tokens
    assert whole.identical == whole.num_prompts == 6
    [suite] = report.conditions.suites
    assert (suite.name, suite.num_prompts, suite.later_turns, suite.unasked_turns) == ("spec_bench", 4, 2, 0)
    assert [(b.contestant, b.size, b.identical == b.sequences) for b in report.batches] == [
        (name, size, True) for size in (1, 2) for name in ("ngram", "plain")
    ]
    asked = {r.prompt: r.asked for r in report.records}
    assert (asked["spec_bench/81"], len(asked["spec_bench/81, turn 2"] or "")) == (None, 12)
    text = markdown(report)
    assert "| spec_bench | turn 2 | ngram |" in text
    assert "### By batch size" in text
    assert "and 2 later turns" in text
    assert Report.model_validate_json(report.model_dump_json()).groups == report.groups


def test_the_turns_of_one_conversation_are_drawn_again_together() -> None:
    """Four conversations of two equal turns say as much as four prompts, not as eight."""
    values = Ratio([1, 1, 3, 3, 2, 2, 4, 4], [1] * 8)
    alone, together = Bootstrap([8]).ratio(values), Bootstrap([8], clusters=[0, 0, 1, 1, 2, 2, 3, 3]).ratio(values)
    assert alone.value == together.value == 2.5
    assert together.high - together.low > 1.3 * (alone.high - alone.low)


def test_mt_benchs_categories_are_a_task_in_spec_bench_alone(report: Report) -> None:
    record = report.records[0]
    assert groups_of(record, {"writing", "math"}) == {"turn": "turn 1", "category": "writing"}
    assert groups_of(record, {"writing", "translation"}) == {
        "turn": "turn 1",
        "task": "mt_bench",
        "category": "writing",
    }
    whole = record.model_copy(update={"category": "qa"})  # a task by itself stands once
    assert groups_of(whole, {"writing", "qa", "translation"}) == {"turn": "turn 1", "task": "qa"}
    others = [{"writing", "sql"}, {"coding", "math", "writing", "qa", "rag", "summarization", "multilingual"}]
    assert not any("task" in groups_of(record, categories) for categories in others)  # SPEED-Bench's, for one


def test_labels_of_single_rows_are_no_categories(report: Report) -> None:
    many = [r.model_copy(update={"category": f"row {i}", "turn": 1}) for i in range(41) for r in report.records]
    assert not summarise_groups(many, report.baselines)
    assert len(summarise_groups(many[: -len(report.records)], report.baselines)) == 40 * 2


def test_longer_prompts_are_left_out_and_counted_and_contexts_filled(tiny_target: Target, settings: EvalSpec) -> None:
    [whole] = suites_of(tiny_target, settings)
    lengths = sorted(len(p.tokens) for p in whole.prompts)
    [short] = suites_of(tiny_target, settings.model_copy(update={"max_prompt_tokens": lengths[-2]}))
    assert (len(short.prompts), short.left_out) == (3, 1)
    assert short.digest != whole.digest
    filled = suites_of(tiny_target, settings.model_copy(update={"contexts": [60, 80]}))
    assert [s.name for s in filled] == ["spec_bench@60", "spec_bench@80"]
    for suite, length in zip(filled, (60, 80), strict=True):
        assert {len(p.tokens) for p in suite.prompts} == {length}
        for before, after in zip(whole.prompts, suite.prompts, strict=True):
            assert after.tokens[-len(before.tokens) :] == before.tokens
            assert not after.later
        assert suite.unasked == 2
    texts = [p.tokens for p in whole.prompts]
    assert filled[1].prompts[0].tokens[: -len(texts[0])] == (*texts[1], *texts[2], *texts[3])[-80 + len(texts[0]) :]
    with pytest.raises(BadInputError, match=r"eval.contexts: the prompts .* have 88 together, .* take at most 88"):
        suites_of(tiny_target, settings.model_copy(update={"contexts": [60, 90]}))


def test_turns_that_are_not_asked_are_counted(tiny_target: Target, settings: EvalSpec) -> None:
    tokenizer = copy.deepcopy(tiny_target.require_tokenizer())
    tokenizer.chat_template = None
    [suite] = load_suites(settings.suites, tokenizer)
    assert suite_info(suite, None, 0).unasked_turns == suite.unasked == 2
    [suite] = suites_of(tiny_target, settings)
    longest = max(len(p.tokens) for p in suite.prompts)
    asked = with_later_turns(tiny_target, make_jobs([suite]), 12, longest)
    assert suite_info(suite, None, len(asked) - 4).unasked_turns == 2 - (len(asked) - 4)
    assert max(len(job.prompt.tokens) for job in asked) == longest


def test_what_a_drafter_learned_is_no_suite_unless_that_is_allowed_and_counted(
    tiny_target: Target, file: Path, settings: EvalSpec
) -> None:
    suites = load_suites([str(file)], tiny_target.require_tokenizer())
    learnt = suites[0].prompts[1]
    for known in (learnt, replace(learnt, later=())):  # the whole conversation, or its first question
        with pytest.raises(BadInputError, match=r"spec_bench asks in 'spec_bench/82' what .* learned from the data:"):
            checked_for_leaks(suites[0], set(known.asked_digests()), "the data")
    assert checked_for_leaks(suites[0], {"0" * 16}, "the data").learnt == 0
    found = suites_of(tiny_target, settings, None, set(learnt.asked_digests()), "the data", allow_leaks=True)
    assert suite_info(found[0], None).learnt == 1


def test_the_very_file_that_was_learned_is_no_suite(tiny_target: Target, tmp_path: Path) -> None:
    """Learnt is a chat from its first question on, and asked is its last one, after the chat's own answers."""
    path, tokenizer = tmp_path / "chats.jsonl", tiny_target.require_tokenizer()
    said = [{"role": role, "content": text} for role, text in (("user", "One?"), ("assistant", "1"), ("user", "Two?"))]
    path.write_text(json.dumps({"messages": said}))
    [learnt] = collect([str(path)], tokenizer, None, PromptReading(whole=True)).prompts
    [again] = load_suites([str(path)], tokenizer)
    assert learnt.content != again.prompts[0].content
    with pytest.raises(BadInputError, match="asks in 'chats/1' what the drafter learned"):
        checked_for_leaks(again, set(learnt.asked_digests()), "the data")
    path.write_text(json.dumps({"messages": [{"role": "system", "content": "Be brief."}, *said[:1]]}))
    with pytest.raises(BadInputError, match="asks in 'chats/1' what the drafter learned"):
        checked_for_leaks(*load_suites([str(path)], tokenizer), set(learnt.asked_digests()), "the data")


def test_the_targets_own_sampling_is_taken_and_what_we_cannot_do_is_refused(tiny_target: Target) -> None:
    served = EvalSpec(sampling="served", seed=3)
    tiny_target.model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, num_beams=1, max_length=99
    )
    made = base_sampling(tiny_target, served)
    assert made == Sampling(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, seed=3)
    theirs = GenerateRacer(tiny_target, served)._config(0.6)
    assert (theirs.top_k, theirs.top_p, theirs.repetition_penalty) == (20, 0.95, 1.1)
    assert base_sampling(tiny_target, EvalSpec()) == Sampling()
    tiny_target.model.generation_config = GenerationConfig(temperature=0.6, repetition_penalty=1.2)
    assert base_sampling(tiny_target, served) == Sampling(repetition_penalty=1.2, seed=3)  # nothing is drawn
    tiny_target.model.generation_config = GenerationConfig(no_repeat_ngram_size=3, num_beams=4)
    with pytest.raises(BadInputError, match="asks for no_repeat_ngram_size=3, num_beams=4; our decoder does not"):
        base_sampling(tiny_target, served)


def test_generate_takes_nothing_from_the_targets_own_config(tiny_target: Target, settings: EvalSpec) -> None:
    [job, *_] = make_jobs(suites_of(tiny_target, settings))
    own = GenerationConfig(num_beams=3, no_repeat_ngram_size=2, repetition_penalty=1.5)
    own.stop_strings = ["the"] * 3  # with which `generate` asks for a tokenizer
    racer = GenerateRacer(tiny_target, settings)
    before = racer(job, 0.0).tokens
    tiny_target.model.generation_config = own
    assert racer(job, 0.0).tokens == before
    assert tiny_target.model.generation_config is own


def test_a_penalised_measurement_writes_the_plain_targets_text(tiny_target: Target, settings: EvalSpec) -> None:
    tiny_target.model.generation_config = GenerationConfig(repetition_penalty=1.3, eos_token_id=1)
    asked = settings.model_copy(update={"sampling": "served", "temperatures": [1.0], "batch_sizes": []})
    entrants = [Contestant("ngram", Ngram(), Plan(2))]
    made = measure(tiny_target, entrants, suites_of(tiny_target, asked), asked)
    assert made.conditions.temperatures == [0.0]
    assert made.conditions.sampling == {"repetition_penalty": 1.3}
    for name in ("ngram", "transformers.generate"):
        assert made.headline(name).identical == made.headline(name).num_prompts
