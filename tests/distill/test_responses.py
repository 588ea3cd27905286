"""The data set holds what the target itself says, does not depend on batching, and survives interruption."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError, IncompatibleError, Refusal, digests
from outrider.decode import Decoder, Output
from outrider.distill import distill, load_responses, provenance, read_prompts
from outrider.recipes import Recipe
from outrider.targets import Target

from .conftest import data_recipe, write_rows

TEXTS = [
    "def add(first, second):",
    "for name in",
    "The target",
    "class Stack:",
    "return",
    "print(name, len(name))",
    "x",
]

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def make_recipe(tmp_path: Path) -> MakeRecipe:
    """`make_recipe(output="run", **data)`: a recipe over TEXTS."""
    file = write_rows(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS))

    def make(output: str = "run", **data: Any) -> Recipe:
        return data_recipe(tmp_path / output, **{"prompts": [file], "max_new_tokens": 8, "batch_size": 3, **data})

    return make


def count_prompts(monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> list[int]:
    """Record the size of each batch that is generated; Ctrl-C in call number `fail_at`."""
    sizes: list[int] = []
    generate = Decoder.generate

    def counted(self: Decoder, prompts: Any, *args: Any, **kwargs: Any) -> Output:
        if len(sizes) == fail_at:
            raise KeyboardInterrupt
        sizes.append(len(prompts))
        return generate(self, prompts, *args, **kwargs)

    monkeypatch.setattr(Decoder, "generate", counted)
    return sizes


def interrupt(recipe: Recipe, target: Target, after: int) -> None:
    """A run that is interrupted after so many batches."""
    with pytest.MonkeyPatch.context() as patch:
        count_prompts(patch, fail_at=after)
        with pytest.raises(KeyboardInterrupt):
            distill(recipe, target)


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(load_responses(folder))


def test_rows_are_prompt_and_response_in_the_order_of_the_prompts(make_recipe: MakeRecipe, tiny_target: Target) -> None:
    found = rows(distill(make_recipe(), tiny_target))
    assert [r["id"] for r in found] == [f"texts/{i}" for i in range(1, len(TEXTS) + 1)]
    for text, row in zip(TEXTS, found, strict=True):
        prompt = tiny_target.require_tokenizer()(text)["input_ids"]
        response = row["input_ids"][len(prompt) :]
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(response)
        assert response == Decoder(tiny_target).generate([prompt], max_new_tokens=8).tokens[0]


def test_a_row_says_what_it_asks_whatever_its_id_and_place(make_recipe: MakeRecipe, tiny_target: Target) -> None:
    """By that, rows are held out: the same ones when data grows, and not all or none of them."""
    found = load_responses(distill(make_recipe(), tiny_target))
    prompts = read_prompts(make_recipe().data.prompts, tiny_target.require_tokenizer())
    assert list(found["content"]) == [prompt.content for prompt in prompts]
    assert len(set(found["content"])) == len(TEXTS)


def test_provenance_names_target_prompts_sampling_versions_and_counts(
    make_recipe: MakeRecipe, tiny_target: Target
) -> None:
    folder = distill(make_recipe(limit=4, max_prompt_tokens=5), tiny_target)
    saved = provenance(folder)
    assert folder.name == "data"
    assert saved["target"]["digest"] == tiny_target.fingerprint().digest
    assert saved["sampling"]["max_new_tokens"] == 8
    assert set(saved["versions"]) == {"python", "outrider", "torch", "transformers", "datasets"}
    counts = saved["counts"]
    assert (counts["prompts"], counts["sequences"], counts["empty_responses"]) == (4, 4, 0)
    assert counts["truncated"] == sum(len(tiny_target.require_tokenizer()(t)["input_ids"]) > 5 for t in TEXTS[:4]) > 0
    assert counts["response_tokens"] == sum(sum(r["loss_mask"]) for r in rows(folder))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_interrupted_run_continues_and_batching_changes_nothing(
    make_recipe: MakeRecipe, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    sampling = {"temperature": temperature, "seed": 3}
    whole = distill(make_recipe("whole", sampling=sampling, batch_size=7), tiny_target)
    interrupt(make_recipe("cut", sampling=sampling, batch_size=3), tiny_target, after=1)
    sizes = count_prompts(monkeypatch)
    cut = distill(make_recipe("cut", sampling=sampling, batch_size=2), tiny_target)
    assert sizes == [2, 2], "the three finished prompts are not generated again"
    assert rows(cut) == rows(whole)
    assert not cut.with_name("data.partial").exists()
    assert sorted(p.name for p in cut.parent.iterdir()) == ["data"]


def test_sampled_responses_depend_on_the_seed(make_recipe: MakeRecipe, tiny_target: Target) -> None:
    first, second = (
        distill(make_recipe(f"s{seed}", sampling={"temperature": 1.0, "seed": seed}), tiny_target) for seed in (0, 1)
    )
    assert rows(first) != rows(second)


def test_a_finished_folder_is_reused(
    make_recipe: MakeRecipe, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = distill(make_recipe(), tiny_target)
    sizes = count_prompts(monkeypatch)
    assert distill(make_recipe(batch_size=1), tiny_target) == folder
    assert sizes == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"max_new_tokens": 9}, r"max_new_tokens \(was 8, is 9\)"),
        ({"sampling": {"temperature": 0.5}}, r"temperature \(was 0\.0, is 0\.5\)"),
        ({"limit": 2}, r"prompts \(other sources"),
    ],
)
@pytest.mark.parametrize("unfinished", [True, False])
def test_a_folder_of_other_settings_is_refused_and_says_which(
    make_recipe: MakeRecipe, tiny_target: Target, change: dict[str, Any], expected: str, unfinished: bool
) -> None:
    if unfinished:
        interrupt(make_recipe(), tiny_target, after=1)
    else:
        distill(make_recipe(), tiny_target)
    with pytest.raises(BadInputError, match=expected):
        distill(make_recipe(**change), tiny_target)


def test_a_folder_of_another_target_is_refused_and_says_what_differs(
    make_recipe: MakeRecipe, tiny_target: Target
) -> None:
    distill(make_recipe(), tiny_target)
    with torch.no_grad():
        tiny_target.model.get_output_embeddings().weight[0, 0] += 1
    with pytest.raises(BadInputError, match=r"target \(1 of \d+ weights \(first: .*\)\)\. Choose another `output`"):
        distill(make_recipe(), tiny_target)


def test_a_folder_that_is_no_data_set_is_never_overwritten(make_recipe: MakeRecipe, tiny_target: Target) -> None:
    recipe = make_recipe()
    precious = recipe.output_folder / "data" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    with pytest.raises(BadInputError, match=r"provenance\.json is missing"):
        distill(recipe, tiny_target)
    assert precious.read_text() == "years of work"


def test_a_full_disk_is_said_in_a_sentence_and_keeps_what_was_done(
    make_recipe: MakeRecipe, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def full(self: Path, to: Path) -> Path:
        if to.name == "00001.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(
            BadInputError,
            match=r"the disk that holds .*/run/data\.partial is full.*kept in .*data\.partial.*"
            "run the same command again",
        ):
            distill(make_recipe(), tiny_target)
    partial = make_recipe().output_folder / "data.partial"
    kept = ["00000.jsonl", "SHA256SUMS", "identity.json"]
    assert sorted(p.name for p in partial.iterdir()) == kept, "no half-written file is left"
    sizes = count_prompts(monkeypatch)
    assert len(rows(distill(make_recipe(), tiny_target))) == len(TEXTS)
    assert sum(sizes) == len(TEXTS) - 3


def test_a_disk_that_fills_while_the_data_set_is_written_loses_no_response(
    make_recipe: MakeRecipe, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("Error writing bytes to file. Detail: No space left on device")  # as pyarrow reports it

    with monkeypatch.context() as patch:
        patch.setattr(datasets.Dataset, "save_to_disk", full)
        with pytest.raises(BadInputError, match="is full"):
            distill(make_recipe(), tiny_target)
    assert not (make_recipe().output_folder / "data").exists()
    sizes = count_prompts(monkeypatch)
    assert len(rows(distill(make_recipe(), tiny_target))) == len(TEXTS)
    assert sizes == []


def test_a_damaged_batch_is_generated_again(
    make_recipe: MakeRecipe, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(make_recipe(), tiny_target, after=2)
    damaged = make_recipe().output_folder / "data.partial" / "00000.jsonl"
    damaged.write_text(damaged.read_text()[:20])
    sizes = count_prompts(monkeypatch)
    assert len(rows(distill(make_recipe(), tiny_target))) == len(TEXTS)
    assert sizes == [3, 1]


def answer_with(monkeypatch: pytest.MonkeyPatch, response: Callable[[int], list[int]]) -> None:
    def scripted(self: Decoder, prompts: Any, *args: Any, sequence_ids: Any, **kwargs: Any) -> Output:
        return Output([response(i) for i in sequence_ids], [], None)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "generate", scripted)


def test_empty_responses_are_dropped_and_counted(
    make_recipe: MakeRecipe, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    [end] = tiny_target.eos_ids
    answer_with(monkeypatch, lambda i: [end] if i in (0, 4) else [7, end])
    folder = distill(make_recipe(), tiny_target)
    assert [r["id"] for r in rows(folder)] == [f"texts/{i + 1}" for i in (1, 2, 3, 5, 6)]
    assert provenance(folder)["counts"]["empty_responses"] == 2


def test_nothing_but_empty_responses_is_an_error_that_shows_a_prompt(
    make_recipe: MakeRecipe, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, lambda i: list(tiny_target.eos_ids))
    with pytest.raises(BadInputError, match=r"all 7 responses are empty.*def add\(first, second\):"):
        distill(make_recipe(), tiny_target)


def test_prompts_that_leave_no_room_are_refused_before_any_work(make_recipe: MakeRecipe, tiny_target: Target) -> None:
    with pytest.raises(BadInputError, match=r"data\.max_new_tokens=512 it exceeds the target's context of 512"):
        distill(make_recipe(max_new_tokens=512), tiny_target)


def test_an_empty_source_is_named(make_recipe: MakeRecipe, tiny_target: Target, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(BadInputError, match=r"no prompts in '.*empty\.jsonl': it is empty"):
        distill(make_recipe(prompts=[str(tmp_path / "texts.jsonl"), str(tmp_path / "empty.jsonl")]), tiny_target)


def test_a_missing_source_is_named_before_the_target_is_loaded(make_recipe: MakeRecipe) -> None:
    with pytest.raises(BadInputError, match=r"'nowhere\.jsonl' does not exist"):
        distill(make_recipe(prompts=["nowhere.jsonl"]))  # its target does not exist either


def test_given_responses_are_used_and_those_of_another_tokenizer_refused(
    make_recipe: MakeRecipe, tiny_target: Target, caplog: pytest.LogCaptureFixture, tiny_llama: Callable[..., Any]
) -> None:
    folder = distill(make_recipe(), tiny_target)
    recipe = make_recipe("other", responses=str(folder))
    assert distill(recipe, tiny_target) == folder
    assert not caplog.records
    tuned = Target(tiny_llama(vocab=tiny_target.vocab_size, seed=1), tiny_target.tokenizer)
    assert distill(recipe, tuned) == folder
    assert "come from a target that differs in" in caplog.text
    from tokenizers import Tokenizer, models

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(IncompatibleError, match="written with another tokenizer"):
        distill(recipe, Target(tiny_target.model, other))


def test_chats_are_answered_where_the_template_says(
    make_recipe: MakeRecipe, tiny_target: Target, tmp_path: Path
) -> None:
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "unused"}]})
    )
    [row] = rows(distill(make_recipe(prompts=[str(tmp_path / "chat.jsonl")]), tiny_target))
    asked = [t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if not m]
    assert tiny_target.require_tokenizer().decode(asked) == "<|user|>hi<|end|><|assistant|>"


def test_progress_is_drawn_on_a_terminal_only(make_recipe: MakeRecipe, tiny_target: Target) -> None:
    from rich.console import Console

    terminal, pipe = io.StringIO(), io.StringIO()
    distill(make_recipe("a"), tiny_target, Console(file=terminal, force_terminal=True, width=120))
    distill(make_recipe("b"), tiny_target, Console(file=pipe, force_terminal=False))
    assert "7/7" in terminal.getvalue()
    assert "tokens/s" in terminal.getvalue()
    assert pipe.getvalue().strip().endswith("7 of 7 rows"), "a log says what was read, and draws nothing"


def test_a_damaged_data_folder_is_refused(make_recipe: MakeRecipe, tiny_target: Target) -> None:
    folder = distill(make_recipe(), tiny_target)
    next(folder.glob("*.arrow")).write_bytes(b"garbage")
    for use in (lambda: load_responses(folder), lambda: distill(make_recipe(), tiny_target)):
        with pytest.raises(Refusal, match=r"data-00000-of-00001\.arrow: content differs .* run distill again"):
            use()
    digests.seal(folder)
    with pytest.raises(BadInputError, match="its data set cannot be read"):
        load_responses(folder)
    (folder / "provenance.json").write_text('{"schema_version": 99}')
    with pytest.raises(BadInputError, match="schema version 99"):
        provenance(folder)


def test_what_decides_no_text_at_temperature_0_may_change(make_recipe: MakeRecipe, tiny_target: Target) -> None:
    folder = distill(make_recipe(sampling={"seed": 1}), tiny_target)
    assert distill(make_recipe(sampling={"seed": 2, "top_k": 5, "top_p": 0.9, "min_p": 0.1}), tiny_target) == folder
    with pytest.raises(BadInputError, match="repetition_penalty"):
        distill(make_recipe(sampling={"repetition_penalty": 1.5}), tiny_target)


def test_the_longest_question_decides_conversations_and_given_answers_and_no_single_questions(
    make_recipe: MakeRecipe, tiny_target: Target, tmp_path: Path
) -> None:
    folder = distill(make_recipe(max_prompt_tokens=50), tiny_target)
    assert distill(make_recipe(max_prompt_tokens=60), tiny_target) == folder, "the prompts are the same"
    user, assistant = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    rows = {"turns": [user, assistant, user], "given": [user, assistant]}
    for name, chat in rows.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"messages": chat}) + "\n")
        data = {"prompts": [str(file)], "answers": "given" if name == "given" else "target"}
        distill(make_recipe(name, **data, max_prompt_tokens=50), tiny_target)
        with pytest.raises(BadInputError, match=r"max_prompt_tokens \(was 50, is 60\)"):
            distill(make_recipe(name, **data, max_prompt_tokens=60), tiny_target)


def test_a_conversation_that_the_template_ends_is_counted_and_the_run_goes_on(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    target = Target.load("embedded", dtype="float32", device="cpu")
    tokenizer = target.require_tokenizer()
    tokenizer.chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('no answers, please') }}{% endif %}{{ messages[0].content }}"
    )
    file = tmp_path / "chats.jsonl"
    user, assistant = ({"role": role, "content": "def f():"} for role in ("user", "assistant"))
    file.write_text(json.dumps({"messages": [user, assistant, user]}) + "\n")
    folder = distill(make_recipe("ended", prompts=[str(file)]), target)
    assert provenance(folder)["counts"]["conversations_ended_by_template"] == 1
    assert len(rows(folder)) == 1
