"""The data set holds what the target itself says, does not depend on batching, and survives interruption."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError, IncompatibleError, Refusal, digests
from outrider.common.places import MARKER
from outrider.decode import Decoder, Output
from outrider.distill import distill, load_responses, provenance
from outrider.targets import Target

from .conftest import Place, count_prompts, read_prompts, rows_of, write_rows

TEXTS = ["def add(first, second):", "for name in", "The target", "class Stack:", "return"]
TEXTS += ["print(name, len(name))", "x"]


@pytest.fixture
def place(tmp_path: Path, tiny_target: Target) -> Place:
    return Place(tmp_path, tiny_target, [{"text": text} for text in TEXTS], {"max_new_tokens": 8, "batch_size": 3})


def test_rows_are_prompt_and_response_in_the_order_of_the_prompts(place: Place) -> None:
    found = rows_of(place.distil())
    assert [r["id"] for r in found] == [f"texts/{i}" for i in range(1, len(TEXTS) + 1)]
    for text, row in zip(TEXTS, found, strict=True):
        prompt = place.target.require_tokenizer()(text)["input_ids"]
        response = row["input_ids"][len(prompt) :]
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(response)
        assert response == Decoder(place.target).generate([prompt], max_new_tokens=8).tokens[0]


def test_a_row_says_what_it_asks_whatever_its_id_and_place(place: Place) -> None:
    """By that, rows are held out: the same ones when data grows, and not all or none of them."""
    found = load_responses(place.distil())
    prompts = read_prompts(place.recipe().data.prompts, place.target.require_tokenizer())
    assert list(found["content"]) == [prompt.content for prompt in prompts]
    assert len(set(found["content"])) == len(TEXTS)


def test_provenance_names_target_prompts_sampling_versions_and_counts(place: Place) -> None:
    folder = place.distil(limit=4, sample=None, max_prompt_tokens=5)
    saved = provenance(folder)
    assert folder.name == "data"
    assert saved["target"]["digest"] == place.target.fingerprint().digest
    assert saved["sampling"]["max_new_tokens"] == 8
    assert set(saved["versions"]) == {"python", "outrider", "torch", "transformers", "datasets"}
    counts = saved["counts"]
    assert (counts["prompts"], counts["sequences"], counts["empty_responses"]) == (4, 4, 0)
    assert counts["truncated"] == sum(len(place.target.require_tokenizer()(t)["input_ids"]) > 5 for t in TEXTS[:4]) > 0
    assert counts["response_tokens"] == sum(sum(r["loss_mask"]) for r in rows_of(folder))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_interrupted_run_continues_and_batching_changes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    sampling = {"temperature": temperature, "seed": 3}
    whole = place.distil("whole", sampling=sampling, batch_size=7)
    place.interrupt("cut", after=1, sampling=sampling, batch_size=3)
    sizes = count_prompts(monkeypatch)
    cut = place.distil("cut", sampling=sampling, batch_size=2)
    assert sizes == [2, 2], "the three finished prompts are not generated again"
    assert rows_of(cut) == rows_of(whole)
    assert not cut.with_name("data.partial").exists()
    assert sorted(p.name for p in cut.parent.iterdir()) == [MARKER, "data"]


def test_sampled_responses_depend_on_the_seed(place: Place) -> None:
    first, second = (place.distil(f"s{seed}", sampling={"temperature": 1.0, "seed": seed}) for seed in (0, 1))
    assert rows_of(first) != rows_of(second)


def test_a_finished_folder_is_reused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place.distil()
    sizes = count_prompts(monkeypatch)
    assert place.distil(batch_size=1) == folder
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
    place: Place, change: dict[str, Any], expected: str, unfinished: bool
) -> None:
    if unfinished:
        place.interrupt("run", after=1)
    else:
        place.distil()
    place.refuses(expected, **change)


def test_a_folder_of_another_target_is_refused_and_says_what_differs(place: Place) -> None:
    place.distil()
    with torch.no_grad():
        place.target.model.get_output_embeddings().weight[0, 0] += 1
    place.refuses(r"target \(1 of \d+ weights \(first: .*\)\)\. Choose another `output`")


def test_a_folder_that_is_no_data_set_is_never_overwritten(place: Place) -> None:
    recipe = place.recipe()
    precious = recipe.output_folder / "data" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    with pytest.raises(BadInputError, match=r"is not a run: it holds 'data'"):
        distill(recipe, place.target)
    assert precious.read_text() == "years of work"


def test_a_full_disk_is_said_in_a_sentence_and_keeps_what_is_done(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def full(self: Path, to: Path) -> Path:
        if to.name == "00001.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        place.refuses(
            r"the disk that holds .*/run/data\.partial is full.*kept in .*data\.partial.*"
            "run the same command again"
        )
    partial = place.recipe().output_folder / "data.partial"
    kept = ["00000.jsonl", "SHA256SUMS", "identity.json"]
    assert sorted(p.name for p in partial.iterdir()) == kept, "no half-written file is left"
    sizes = count_prompts(monkeypatch)
    assert len(rows_of(place.distil())) == len(TEXTS)
    assert sum(sizes) == len(TEXTS) - 3


def test_a_disk_that_fills_at_the_end_loses_no_response(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("Error writing bytes to file. Detail: No space left on device")  # as pyarrow reports it

    with monkeypatch.context() as patch:
        patch.setattr(datasets.Dataset, "save_to_disk", full)
        place.refuses("is full")
    assert not (place.recipe().output_folder / "data").exists()
    sizes = count_prompts(monkeypatch)
    assert len(rows_of(place.distil())) == len(TEXTS)
    assert sizes == []


def test_a_damaged_batch_is_generated_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.interrupt("run", after=2)
    damaged = place.recipe().output_folder / "data.partial" / "00000.jsonl"
    damaged.write_text(damaged.read_text()[:20])
    sizes = count_prompts(monkeypatch)
    assert len(rows_of(place.distil())) == len(TEXTS)
    assert sizes == [3, 1]


def answer_with(monkeypatch: pytest.MonkeyPatch, response: Callable[[int], list[int]]) -> None:
    def scripted(self: Decoder, prompts: Any, *args: Any, sequence_ids: Any, **kwargs: Any) -> Output:
        return Output([response(i) for i in sequence_ids], [], None)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "generate", scripted)


def test_empty_responses_are_dropped_and_counted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    [end] = place.target.eos_ids
    answer_with(monkeypatch, lambda i: [end] if i in (0, 4) else [7, end])
    folder = place.distil()
    assert [r["id"] for r in rows_of(folder)] == [f"texts/{i + 1}" for i in (1, 2, 3, 5, 6)]
    assert provenance(folder)["counts"]["empty_responses"] == 2


def test_nothing_but_empty_responses_is_an_error_with_a_prompt(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, lambda i: list(place.target.eos_ids))
    place.refuses(r"all 7 responses are empty.*def add\(first, second\):")


def test_prompts_that_leave_no_room_and_empty_sources_are_refused_before_any_work(place: Place, tmp_path: Path) -> None:
    place.refuses(r"data\.max_new_tokens=512 it exceeds the target's context of 512", max_new_tokens=512)
    empty = write_rows(tmp_path / "empty.jsonl", [])
    place.refuses(r"no prompts in '.*empty\.jsonl': it is empty", prompts=[str(tmp_path / "texts.jsonl"), empty])


def test_a_missing_source_is_named_before_the_target_is_loaded(place: Place) -> None:
    with pytest.raises(BadInputError, match=r"'nowhere\.jsonl' does not exist"):
        distill(place.recipe(prompts=["nowhere.jsonl"]))  # its target does not exist either


def test_given_responses_are_used_and_those_of_another_tokenizer_refused(
    place: Place, caplog: pytest.LogCaptureFixture, tiny_llama: Callable[..., Any]
) -> None:
    folder = place.distil()
    raw_texts, cut = (record.getMessage() for record in caplog.records)
    assert "7 rows are raw text" in raw_texts
    assert cut == (
        "7 of 7 answers (100%) were cut at data.max_new_tokens: a drafter hardly learns how this target ends. Raise it "
        "to what is served."
    )
    caplog.clear()
    recipe = place.recipe("other", responses=str(folder))
    assert distill(recipe, place.target) == folder
    assert not caplog.records
    tuned = Target(tiny_llama(vocab=place.target.vocab_size, seed=1), place.target.tokenizer)
    with pytest.raises(BadInputError, match=r"57 weights \(first: lm_head.weight, .* target.allow_changed=true"):
        distill(recipe, tuned)
    allowed = recipe.model_copy(update={"target": recipe.target.model_copy(update={"allow_changed": True})})
    assert distill(allowed, tuned) == folder
    assert tuned.source["changed"] in caplog.text
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(IncompatibleError, match="written with another tokenizer"):
        distill(recipe, Target(place.target.model, other))


def test_chats_are_answered_where_the_template_says(place: Place) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "unused"}]
    [row] = rows_of(place.distil(rows=[{"messages": chat}]))
    asked = [t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if not m]
    assert place.target.require_tokenizer().decode(asked) == "<|user|>hi<|end|><|assistant|>"


def test_progress_is_drawn_on_a_terminal_only(place: Place) -> None:
    terminal, pipe = io.StringIO(), io.StringIO()
    distill(place.recipe("a"), place.target, Console(file=terminal, force_terminal=True, width=120))
    distill(place.recipe("b"), place.target, Console(file=pipe, force_terminal=False))
    assert "7/7" in terminal.getvalue()
    assert "tokens/s" in terminal.getvalue()
    assert pipe.getvalue().strip().endswith("7 of 7 rows"), "a log says what was read, and draws nothing"


def test_a_damaged_data_folder_is_refused(place: Place) -> None:
    folder = place.distil()
    next(folder.glob("*.arrow")).write_bytes(b"garbage")
    for use in (lambda: load_responses(folder), lambda: place.distil()):
        with pytest.raises(Refusal, match=r"data-00000-of-00001\.arrow: content differs .* run distill again"):
            use()
    digests.seal(folder)
    with pytest.raises(BadInputError, match="its data set cannot be read"):
        load_responses(folder)
    (folder / "provenance.json").write_text('{"schema_version": 99}')
    with pytest.raises(BadInputError, match="schema version 99"):
        provenance(folder)


def test_what_decides_no_text_at_temperature_0_may_change(place: Place) -> None:
    folder = place.distil(sampling={"seed": 1})
    assert place.distil(sampling={"seed": 2, "top_k": 5, "top_p": 0.9, "min_p": 0.1}) == folder
    place.refuses("repetition_penalty", sampling={"repetition_penalty": 1.5})


def test_the_longest_question_decides_conversations_and_given_answers_and_no_single_questions(place: Place) -> None:
    folder = place.distil(max_prompt_tokens=50)
    assert place.distil(max_prompt_tokens=60) == folder, "the prompts are the same"
    user, assistant = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    rows = {"turns": [user, assistant, user], "given": [user, assistant]}
    for name, chat in rows.items():
        data = {"rows": [{"messages": chat}], "answers": "given" if name == "given" else "target"}
        place.distil(name, **data, max_prompt_tokens=50)
        place.refuses(r"max_prompt_tokens \(was 50, is 60\)", name, **data, max_prompt_tokens=60)


def test_a_conversation_that_the_template_ends_is_counted_and_the_run_goes_on(place: Place) -> None:
    target = Target.load("embedded", dtype="float32", device="cpu")
    tokenizer = target.require_tokenizer()
    tokenizer.chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('no answers, please') }}{% endif %}{{ messages[0].content }}"
    )
    user, assistant = ({"role": role, "content": "def f():"} for role in ("user", "assistant"))
    folder = distill(place.recipe("ended", rows=[{"messages": [user, assistant, user]}]), target)
    assert provenance(folder)["counts"]["conversations_ended_by_template"] == 1
    assert len(rows_of(folder)) == 1
