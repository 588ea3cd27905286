"""`outrider data`: what would be learnt, and what is dropped, before anything is spent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.common import BadInputError
from outrider.recipes import load_recipe
from outrider.scripts.data_cli import _samples, _tokenizer, arguments

from .conftest import Command, failed

CHAT = [{"role": "user", "content": "sort"}, {"role": "assistant", "content": "sorted"}]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    rows = [{"messages": CHAT}, {"messages": CHAT}, {"prompt": 5}, {"turns": ["one", "two"]}, {"text": ""}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_check_counts_what_is_dropped_and_why(outrider: Command, recipe_file: Path, chats: Path) -> None:
    result = outrider("data", "check", recipe_file, f"data.prompts=[{chats}]", "--json")
    assert result.exit_code == 1, result.output
    answer = json.loads(result.stdout)
    [source] = answer["sources"]
    assert (answer["schema"], answer["exit_code"], answer["prompts"]) == ("outrider.data-check/1", 1, 2)
    assert (source["rows"], source["kept"]) == (5, 2)
    assert source["dropped"] == {"duplicate": 1, "malformed": 1, "unanswerable": 1}
    assert source["layouts"] == {"messages (key messages)": 2, "turns (key turns)": 1, "text (key text)": 1}
    assert source["examples"]["malformed"] == f"{chats}, row 3: `prompt` must be text, found 5."
    shown = " ".join(outrider("data", "check", recipe_file, f"data.prompts=[{chats}]").stdout.split())
    assert "row 3: `prompt` must be text, found 5." in shown
    assert "2 prompts; tokens of a prompt: median" in shown
    assert source["raw_texts"] == 0


def test_every_malformed_row_is_shown_by_its_line_as_far_as_a_hundred(
    outrider: Command, recipe_file: Path, chats: Path
) -> None:
    bad = ['{"q": 1}', "no json", '{"prompt": 5}']
    chats.write_text('{"text": "one"}\n' + "\n".join(bad) + "\n")
    words = ["data", "check", recipe_file, f"data.prompts=[{chats}]"]
    [source] = json.loads(outrider(*words, "--json").stdout)["sources"]
    assert source["malformed"][0].startswith(f"{chats}, row 2: expected one of")
    assert (source["dropped"]["malformed"], len(source["malformed"]), source["raw_texts"]) == (3, 3, 1)
    shown = outrider(*words).stdout
    assert "1 rows are raw text, at which a target with a chat template may end at once" in shown
    assert all(place in shown for place in ("row 2: ", "line 3: ", "row 4: "))
    chats.write_text('{"text": "one"}\n' + '{"q": 1}\n' * 150)
    shown = outrider(*words).stdout
    assert ("row 101: " in shown, "row 102: " in shown) == (True, False)
    assert "and 50 more malformed rows" in shown


def test_answers_that_were_cut_are_counted_once_they_are_written(
    outrider: Command, recipe_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert json.loads(outrider("data", "check", recipe_file, "--json").stdout)["answers"] is None
    assert outrider("distill", recipe_file).exit_code == 0
    answers = json.loads(outrider("data", "check", recipe_file, "--json").stdout)["answers"]
    assert 0.2 < answers["answers_cut"] / answers["answers"] <= 1
    said = f"{answers['answers_cut']} of {answers['answers']} answers ("
    assert said in caplog.text
    assert said in outrider("data", "check", recipe_file).stdout


def test_a_file_without_any_good_row_says_why(outrider: Command, recipe_file: Path, chats: Path) -> None:
    """A wrong key in every row: the first mistake of most."""
    chats.write_text('{"q": "one"}\n{"q": "two"}\n')
    result = outrider("data", "check", recipe_file, f"data.prompts=[{chats}]")
    failed(result, "none of its 2 rows can be used. Dropped: 2 malformed. For example,", "row 1:", "found q.")


def test_check_finds_prompts_that_are_measured(outrider: Command, recipe_file: Path) -> None:
    """The recipe of these tests learns what it measures: three of its prompts."""
    result = outrider("data", "check", recipe_file, "--json")
    [source] = json.loads(result.stdout)["sources"]
    assert (result.exit_code, source["leaked"], source["kept"]) == (1, 3, 6)
    assert "row 1 asks what the suite" in source["examples"]["leaked"]


def test_a_recipe_without_findings_passes(outrider: Command) -> None:
    result = outrider("data", "check", "embedded-eagle3", "data.limit=20")
    assert result.exit_code == 0, result.output
    assert "20 prompts; tokens of a prompt" in result.stdout


def test_show_shows_answers_where_there_are_some(outrider: Command, recipe_file: Path, chats: Path) -> None:
    words = ["data", "show", recipe_file, f"data.prompts=[{chats}]", "data.malformed=drop"]
    prompts = outrider(*words).stdout
    assert "chats/1 (the target has not answered yet)" in prompts
    assert "<|user|>one<|end|><|assistant|>[the target's answer]\nuser: two\n[the target's answer]" in prompts
    own = outrider(*words, "data.answers=given").stdout
    assert "chats/1 (its own answers)" in own
    assert "<|user|>sort<|end|><|assistant|>sorted<|end|>" in own
    assert outrider("distill", recipe_file).exit_code == 0
    written = outrider("data", "show", recipe_file, "--count", 2).stdout
    assert "/p0 (row 0 of" in written
    assert "/p3 (row 3 of" in written


def test_arguments_of_the_template_are_yaml() -> None:
    assert arguments(None) is None
    expected = {"enable_thinking": False, "effort": "low", "n": 3}
    assert arguments(["enable_thinking=false", "effort=low", "n=3"]) == expected
    with pytest.raises(BadInputError, match=r"--template 'thinking': expected KEY=VALUE"):
        arguments(["thinking"])


def test_show_goes_on_after_a_conversation_of_which_nothing_can_be_learnt(recipe_file: Path, chats: Path) -> None:
    recipe = load_recipe(str(recipe_file), [f"data.prompts=[{chats}]", "data.malformed=drop", "data.answers=given"])
    tokenizer = _tokenizer(recipe)
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    [(name, [(said, _)])] = list(_samples(recipe, tokenizer, 3))
    assert name == "chats/1 (nothing of its own answers can be learnt)"
    assert "no token of this conversation would be supervised" in said
