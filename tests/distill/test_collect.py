"""Prompts come from many layouts in one deterministic order, and every row that is not used is counted.

A recipe's are mixed by weight, read once, and never those that it measures.
"""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import processors

from outrider.common import BadInputError
from outrider.decode import Decoder
from outrider.distill import distill, load_responses, provenance
from outrider.distill.prompt_table import digest_prompts
from outrider.distill.recipe_prompts import Collection, PromptReading, collect, recipe_prompts
from outrider.distill.sources import check_sources
from outrider.recipes import Recipe, SourceSpec
from outrider.targets import Target

from .conftest import Rows, Tokenizer, assistant, plain, read_prompts, user

U = user("u")
A = assistant("a")
S = {"role": "system", "content": "s"}
HELLO = "<|user|>hello<|end|><|assistant|>"


def numbered(letter: str, count: int) -> list[dict[str, Any]]:
    return [{"text": f"{letter}{i}"} for i in range(count)]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "def f():\n"}, "def f():\n"),
        ({"prompt": "def f():\n"}, "def f():\n"),
        ({"question": "hello", "answer": "42"}, HELLO),
        ({"question_id": 81, "category": "writing", "turns": ["hello", "again"]}, HELLO),
        ({"conversations": [user("hello"), A, assistant("b")]}, HELLO),
        ({"messages": None, "text": "raw", "question": None}, "raw"),
        (
            {"messages": [S, user("a"), assistant("b"), user("c")]},
            "<|system|>s<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>",
        ),
    ],
)
def test_every_layout_is_understood(rows: Rows, tokenizer: Tokenizer, row: dict[str, Any], text: str) -> None:
    [prompt] = read_prompts([rows("a.jsonl", row)], tokenizer)
    assert prompt.text == text
    assert tokenizer.decode(prompt.tokens) == text
    assert (prompt.messages is not None) == text.startswith("<|")


def test_chat_tokens_are_those_of_the_librarys_own_template_call(rows: Rows, tokenizer: Tokenizer) -> None:
    messages = [user("sort these names")]
    [prompt] = read_prompts([rows("a.jsonl", {"messages": messages})], tokenizer)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(prompt.tokens) == expected


def test_without_a_chat_template_a_question_is_raw_text_and_a_chat_refused(rows: Rows, tokenizer: Tokenizer) -> None:
    read = collect([rows("a.jsonl", {"turns": ["hello"]})], plain(tokenizer))
    assert [(prompt.text, prompt.messages) for prompt in read.prompts] == [("hello", None)]
    assert dict(read.sources[0].layouts) == {"turns (key turns), as raw text: no chat template": 1}
    with pytest.raises(BadInputError, match=r"row 1: is a chat, but the target's tokenizer has no chat template"):
        read_prompts([rows("b.jsonl", {"messages": [user("hello")]})], plain(tokenizer))


def test_sources_are_read_in_turn_so_that_a_limit_leaves_a_mixture(rows: Rows, tokenizer: Tokenizer) -> None:
    sources = [rows("one.jsonl", *numbered("a", 5)), rows("two.jsonl", *numbered("b", 2))]
    assert [p.text for p in read_prompts(sources, tokenizer)] == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]
    assert [p.text for p in read_prompts(sources, tokenizer, limit=3)] == ["a0", "b0", "a1"]
    assert digest_prompts(read_prompts(sources, tokenizer)) == digest_prompts(read_prompts(sources, tokenizer))
    assert digest_prompts(read_prompts(sources, tokenizer)) != digest_prompts(read_prompts(sources[::-1], tokenizer))


def test_ids_are_the_rows_own_under_their_suite_and_unique(rows: Rows, tokenizer: Tokenizer) -> None:
    first = rows("mt_bench/question.jsonl", {"question_id": 81, "turns": ["a"]}, {"question_id": 81, "turns": ["b"]})
    second = rows("code.jsonl", {"id": "code/x:1", "suite": "code", "text": "c"}, {"text": "d"})
    found = read_prompts([first, second], tokenizer)
    assert {p.id for p in found} == {"mt_bench/81", "mt_bench/81#2", "code/x:1", "code/2"}
    assert [p.suite for p in found] == ["mt_bench", "code", "mt_bench", "code"]


def test_a_long_text_loses_its_beginning_and_keeps_its_bos(rows: Rows, tokenizer: Tokenizer) -> None:
    with_bos = Tokenizer(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<|pad|>")
    with_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", with_bos.bos_token_id)]
    )
    file = rows("a.jsonl", {"text": "zyxwvutsrq"})
    found = collect([file], with_bos, reading=PromptReading(max_tokens=5))
    assert with_bos.decode(found.prompts[0].tokens) == "<|pad|>tsrq"
    assert found.prompts[0].text == "zyxwvutsrq"
    assert found.counts()["truncated"] == 1
    assert plain(tokenizer).decode(read_prompts([file], plain(tokenizer), max_tokens=5)[0].tokens) == "utsrq"


def test_long_chats_and_rows_that_ask_nothing_are_dropped_and_counted(rows: Rows, tokenizer: Tokenizer) -> None:
    asked = [{"question": "far too long a question"}, {"question": "hi"}, {"text": ""}]
    source = rows("a.jsonl", *asked, {"messages": [S, assistant("unasked")]})
    found = collect([source], tokenizer, reading=PromptReading(max_tokens=6))
    none = dict.fromkeys(("truncated", "leaked", "unanswered", "duplicate", "malformed"), 0)
    assert found.counts() == {"prompts": 1, "rows": 4, "too_long": 1, "unanswerable": 2, **none}


def test_tools_reach_the_template(rows: Rows, tokenizer: Tokenizer) -> None:
    template = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    file = rows("a.jsonl", {"tools": [{"name": "ls"}], "messages": [user("x")]})
    [prompt] = read_prompts([file], plain(tokenizer, template))
    assert prompt.text == "[ls]x"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', "line 2: not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1: is a list; expected an object"),
        ("a.jsonl", "\n", "no prompts in .* it is empty"),
        ("a.jsonl", '{"text": ""}\n', "none of its 1 rows can be used"),
        ("a.json", '{"text": "x"}', "expected a list of objects"),
        ("a.json", '{"text": "x"}\n{"text": "y"}', r"One object per line is a \.jsonl file"),
        ("a.parquet", "this is no table at all", "not a readable parquet file"),
        ("a.arrow", "this is no table at all", "not a readable arrow file"),
        ("a.txt", b"abc\xff", "not UTF-8 text"),
        ("a.csv", "x", r"is a \.csv file; expected one of \.jsonl, \.json, \.parquet, \.arrow, \.txt"),
    ],
)
def test_an_unusable_file_is_refused_with_its_place(
    tmp_path: Path, tokenizer: Tokenizer, name: str, content: str | bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInputError, match=expected):
        read_prompts([str(tmp_path / name)], tokenizer)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("nowhere/a.jsonl", "does not exist"), ("embedded:poetry", "no embedded file"), (".", "is a folder")],
)
def test_a_source_that_cannot_exist_is_refused_before_anything_is_loaded(source: str, expected: str) -> None:
    with pytest.raises(BadInputError, match=expected):
        check_sources([source])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"qestion": "x"}, "row 1: expected one of .* found qestion"),
        ({"question": "x", "answer": "y" * 2_000_001}, "a chat of 2,000,002 letters; at most 1,000,000"),
        ({"messages": [{"role": "user", "content": "y" * 2_000_001}]}, "a chat of 2,000,001 letters"),
    ],
    ids=["key", "answer", "chat"],
)
def test_rows_that_cannot_be_read_are_refused_before_anything_is_loaded(
    tmp_path: Path, row: dict[str, Any], expected: str
) -> None:
    """As long as there is none among the first that can: the others are counted."""
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 2)
    with pytest.raises(BadInputError, match=expected):
        check_sources([str(file)])
    file.write_text(f'{json.dumps(row)}\n{{"text": "a"}}\n')
    check_sources([str(file)])


def test_an_unknown_hub_name_is_refused(tokenizer: Tokenizer) -> None:
    check_sources(["some-org/no-such-data:train"])
    expected = "'some-org/no-such-data:train' is no file here, and the Hub gives no data set"
    with pytest.raises(BadInputError, match=expected):
        read_prompts(["some-org/no-such-data:train"], tokenizer)


def test_a_template_that_refuses_a_conversation_is_quoted(rows: Rows, tokenizer: Tokenizer) -> None:
    refusing = plain(tokenizer, "{{ raise_exception('System role not supported') }}")
    expected = r"row 1: the target's chat template refuses this conversation: System role not supported.*'user'"
    with pytest.raises(BadInputError, match=expected):
        read_prompts([rows("a.jsonl", {"question": "x"})], refusing)


def recipe(prompts: list[Any], suites: list[str] | None = None, **data: Any) -> Recipe:
    values = {"name": "t", "target": {"path": "unused"}, "drafter": {}, "data": {"prompts": prompts, **data}}
    return Recipe.from_dict({**values, "eval": {"suites": suites or ["code"]}})


def texts(found: Collection) -> list[str]:
    return [prompt.text for prompt in found.prompts]


def test_weights_hold_to_the_last_prompt(rows: Rows, tokenizer: Tokenizer) -> None:
    one, other = rows("a.jsonl", *numbered("a", 50)), rows("b.jsonl", *numbered("b", 10))
    found = recipe_prompts(recipe([{"path": one, "weight": 3}, {"path": other, "weight": 1.0}]), tokenizer)
    letters = [text[0] for text in texts(found)]
    assert letters[:8] == ["a", "a", "b", "a", "a", "a", "b", "a"]
    assert (letters.count("a"), letters.count("b")) == (32, 10), "b ends, and so does the mixture"
    limited = recipe_prompts(recipe([{"path": one, "weight": 3}, other], limit=12), tokenizer)
    assert [text[0] for text in texts(limited)].count("a") == 9
    assert len(recipe_prompts(recipe([one, other]), tokenizer).prompts) == 60, "without weights all of it is read"


def test_what_is_asked_twice_is_learnt_once(rows: Rows, tokenizer: Tokenizer) -> None:
    source = rows(
        "a.jsonl",
        {"id": 1, "messages": [U, A]},
        {"id": 2, "messages": [U, assistant("b")]},
        {"id": 3, "question": "u"},
        {"id": 4, "messages": [U, A, U]},
        {"id": 5, "text": "u"},
    )
    found = recipe_prompts(recipe([source]), tokenizer)
    assert [p.id for p in found.prompts] == ["a/1", "a/4", "a/5"]
    assert found.counts()["duplicate"] == 2
    given = recipe_prompts(recipe([source], answers="given"), tokenizer)
    assert [p.id for p in given.prompts] == ["a/1", "a/2", "a/4"], "with another answer there is more to learn"
    assert given.counts()["unanswered"] == 2


def test_what_is_measured_is_not_learnt(rows: Rows, tokenizer: Tokenizer) -> None:
    suite = rows("suite.jsonl", {"text": "other"}, {"question": "sort  the\nnames"})
    leak = rows("chats.jsonl", {"messages": [user("sort the names "), A, U]}, {"messages": [U]})
    expected = rf"{leak}, row 1 asks what the suite {suite}, row 2, measures: 'sort the names '.*data.allow_leaks=true"
    with pytest.raises(BadInputError, match=expected):
        recipe_prompts(recipe([leak], [suite]), tokenizer)
    allowed = recipe_prompts(recipe([leak], [suite], allow_leaks=True), tokenizer)
    assert (allowed.counts()["prompts"], allowed.counts()["leaked"]) == (2, 1)
    late = rows("late.jsonl", {"messages": [U, A, user("sort the names")]})
    assert len(recipe_prompts(recipe([late], [suite]), tokenizer).prompts) == 1, "in another conversation it is another"


def test_only_the_prompts_that_are_measured_count(rows: Rows, tokenizer: Tokenizer) -> None:
    suite, leak = rows("suite.jsonl", {"text": "a"}, {"text": "b"}), rows("data.jsonl", {"text": "b"})
    asked = recipe([leak], [suite])
    asked.eval.limit = 1
    assert len(recipe_prompts(asked, tokenizer).prompts) == 1
    asked.eval.limit = 2
    with pytest.raises(BadInputError, match="row 2, measures"):
        recipe_prompts(asked, tokenizer)


def test_malformed_rows_end_the_run_or_are_counted(rows: Rows, tokenizer: Tokenizer) -> None:
    source = rows("a.jsonl", {"text": "x"}, {"prompt": 5}, {"turns": [1]}, {"text": "y"})
    with pytest.raises(BadInputError, match="row 2: `prompt` must be text, found 5"):
        recipe_prompts(recipe([source]), tokenizer)
    found = recipe_prompts(recipe([source], malformed="drop"), tokenizer)
    assert (texts(found), found.counts()["malformed"]) == (["x", "y"], 2)
    assert found.sources[0].examples["malformed"].endswith("row 2: `prompt` must be text, found 5.")


def test_a_refused_chat_is_malformed(rows: Rows, tokenizer: Tokenizer) -> None:
    refusing = "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system') }}{% endfor %}"
    source = rows("a.jsonl", {"messages": [S, U]}, {"messages": [U]})
    template = refusing + "{% for m in messages %}{{ m.content }}{% endfor %}"
    found = recipe_prompts(recipe([source], malformed="drop"), plain(tokenizer, template))
    assert found.counts()["malformed"] == 1
    assert "refuses this conversation: no system" in found.sources[0].examples["malformed"]


def test_every_source_gets_a_line_and_losses_a_warning(
    rows: Rows, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    fine = rows("fine.jsonl", *numbered("a", 60), {"text": "a1"})
    lossy = rows("lossy.jsonl", *numbered("b", 30), {"messages": [user("long " * 99)]}, {"text": ""})
    said = io.StringIO()
    with caplog.at_level(logging.WARNING):
        recipe_prompts(recipe([fine, lossy], max_prompt_tokens=20), tokenizer, Console(file=said))
    first, second = said.getvalue().splitlines()
    assert first == f"{fine}: text (key text); 60 of 61 rows; dropped: 1 duplicates"
    dropped = "dropped: 1 too long, 1 with nothing to answer"
    assert second == f"{lossy}: text (key text), messages (key messages); 30 of 32 rows; {dropped}"
    [warning] = [text for record in caplog.records if "were dropped" in (text := record.getMessage())]
    assert warning.startswith(f"{lossy}: 6.2% of the rows were dropped")
    assert "row 31: a chat of 498 tokens (data.max_prompt_tokens=20)" in warning


def test_raw_text_for_a_target_with_a_chat_template_is_warned_about(
    rows: Rows, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """A chat model ends at once on it, and a whole run is lost."""
    source = rows("a.jsonl", {"prompt": "Name a colour."}, {"text": "x"}, {"messages": [U]})
    expected = f'{source}: 2 rows are raw text, at which .* {{"messages": .{{"role": "user", "content": …}}.}} instead'
    recipe_prompts(recipe([source]), tokenizer)
    assert re.search(expected, caplog.text)
    caplog.clear()
    texts = rows("b.jsonl", {"prompt": "Name a colour."})
    recipe_prompts(recipe([{"path": texts, "layout": "text"}, "embedded:code"], limit=6), tokenizer)
    recipe_prompts(recipe([texts]), plain(tokenizer))
    assert "raw text" not in caplog.text, "it is meant, or there is no template"


def test_conversations_are_asked_from_their_first_question_on(rows: Rows, tokenizer: Tokenizer) -> None:
    source = rows("a.jsonl", {"messages": [U, A, user("v"), A]}, {"turns": ["one", "two", "three"]})
    first, second = recipe_prompts(recipe([source]), tokenizer).prompts
    assert first.text == "<|user|>u<|end|><|assistant|>"
    assert (first.later, first.given) == (((user("v"),),), ((A,), (A,)))
    assert [turn[0]["content"] for turn in second.later] == ["two", "three"]


def test_arguments_reach_the_template(rows: Rows, tokenizer: Tokenizer) -> None:
    template = "{{ messages[0].content }}{% if not enable_thinking %}<no thought>{% endif %}"
    asked = recipe([rows("a.jsonl", {"question": "u"})])
    asked.template = {"enable_thinking": False}
    [prompt] = recipe_prompts(asked, plain(tokenizer, template)).prompts
    assert prompt.text == "u<no thought>"
    assert prompt.template == {"enable_thinking": False}


def test_ids_of_one_name_are_numbered_in_linear_time(rows: Rows, tokenizer: Tokenizer) -> None:
    source = rows("a.jsonl", *({"id": "x", "text": f"t{i}"} for i in range(4000)))
    ids = [p.id for p in collect([source], tokenizer, reading=PromptReading()).prompts]
    assert ids[:3] == ["a/x", "a/x#2", "a/x#3"]
    assert len(set(ids)) == 4000


def test_answers_that_came_with_the_rows_are_learnt_without_the_target(
    rows: Rows, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "generate", None)  # nobody may be asked
    source = rows(
        "pairs.jsonl",
        {"prompt": "def f():", "completion": " pass"},
        {"messages": [U, A, user("v"), assistant("b")]},
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
    rows: Rows, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    files = [rows("first.jsonl", {"text": "a"}, {"text": "b"}), rows("second.jsonl", {"text": "a"})]
    found = recipe_prompts(recipe(files), tokenizer)
    assert (len(found.prompts), found.counts()["duplicate"]) == (2, 1)
    assert "second.jsonl: 100.0% of the rows were dropped" in caplog.text


def drawn(tokenizer: Tokenizer, sources: list[Any], limit: int | None, sample: int | None = 0) -> Collection:
    return collect(sources, tokenizer, limit, PromptReading(sample=sample, once=True, drop_malformed=True))


def test_a_limit_draws_rows_from_all_of_a_sorted_source(rows: Rows, tokenizer: Tokenizer) -> None:
    file = rows("sorted.jsonl", *({"text": f"task {i // 100} of {i}"} for i in range(1000)))
    found = drawn(tokenizer, [file], 100)
    tasks = [int(prompt.text.split()[1]) for prompt in found.prompts]
    assert len(tasks) == 100
    assert all(2 <= tasks.count(task) <= 22 for task in range(10)), "ten are expected, within four deviations"
    [counts] = found.sources
    assert (counts.kept, counts.drawn_from) == (100, 1000)
    assert counts.summary().endswith("100 of 100 rows; drawn from 1,000")
    assert {prompt.id for prompt in found.prompts} == {f"sorted/{int(p.text.split()[3]) + 1}" for p in found.prompts}
    assert digest_prompts(drawn(tokenizer, [file], 100).prompts) == digest_prompts(found.prompts)
    assert digest_prompts(drawn(tokenizer, [file], 100, sample=1).prompts) != digest_prompts(found.prompts)
    assert [p.text for p in drawn(tokenizer, [file], 100, sample=None).prompts] == [
        f"task 0 of {i}" for i in range(100)
    ]


def test_rows_that_a_limit_does_not_cut_keep_their_order(rows: Rows, tokenizer: Tokenizer) -> None:
    files = [rows("a.jsonl", *numbered("a", 30)), rows("b.jsonl", *numbered("b", 20))]
    for limit in (None, 50, 51, 5000):
        found = drawn(tokenizer, files, limit)
        assert digest_prompts(found.prompts) == digest_prompts(drawn(tokenizer, files, None, sample=None).prompts)
        assert [counts.drawn_from for counts in found.sources] == [0, 0]
    cut = [prompt.text for prompt in drawn(tokenizer, files, 40).prompts]  # each source has fewer rows than the limit
    assert {f"a{i}" for i in range(20)} | {f"b{i}" for i in range(20)} != set(cut)
    assert [text[0] for text in cut] == ["a", "b"] * 20


def test_a_sources_own_limit_is_a_sample_of_it_in_its_order(rows: Rows, tokenizer: Tokenizer) -> None:
    file = rows("a.jsonl", *numbered("a", 500))
    found = drawn(tokenizer, [SourceSpec(path=file, limit=20)], None)
    places = [int(prompt.text[1:]) for prompt in found.prompts]
    assert len(places) == 20
    assert sorted(places) == places
    assert max(places) > 250
    [counts] = found.sources
    assert (counts.rows, counts.drawn_from) == (20, 500)


def test_a_sample_is_as_large_as_the_limit_though_most_rows_are_dropped(rows: Rows, tokenizer: Tokenizer) -> None:
    few = [{"text": f"row {i}" if i % 10 == 0 else "the same"} for i in range(2000)]
    found = drawn(tokenizer, [rows("few.jsonl", *few)], 60)
    assert len({prompt.text for prompt in found.prompts}) == len(found.prompts) == 60
    everything = drawn(tokenizer, [rows("few.jsonl", *few)], 300)
    assert len(everything.prompts) == 201


def test_a_malformed_row_of_a_sample_has_its_own_number(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' * 3 + "no json\n" + "".join(f'{{"text": "good {i}"}}\n' for i in range(9)))
    [counts] = drawn(tokenizer, [str(file)], 8).sources
    assert [line.partition(": not")[0] for line in counts.malformed] in ([f"{file}: line 4"], [])
    [counts] = drawn(tokenizer, [str(file)], 12).sources
    assert [line.partition(": not")[0] for line in counts.malformed] == [f"{file}: line 4"]
