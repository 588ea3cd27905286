"""A data set keeps at which depth a round of decoding reached each token, wherever a drafter speculated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common import BadInputError
from outrider.decode import Decoder, Output
from outrider.distill import distill, load_responses, provenance
from outrider.distill.data_set import depths_of_answer, depths_of_rows, rounds_of
from outrider.heads import Drafter, DraftModel, Ngram, load_drafter
from outrider.recipes import Recipe
from outrider.targets import Target

from .conftest import data_recipe, write_rows
from .test_responses import count_prompts, interrupt, rows

TEXTS = ["def add(first, second):", "for name in", "The target", "class Stack:", "print(name, len(name))", "x"]
TURNS = [["hello", "and then"], ["one"], ["def add", "more", "again"]]

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def ngram(tmp_path: Path) -> str:
    Ngram().save(tmp_path / "ngram")
    return str(tmp_path / "ngram")


@pytest.fixture
def similar(tmp_path: Path, tiny_target: Target) -> str:
    """The folder of a draft model that is the target with some noise in it: some of its drafts are accepted."""
    model = copy.deepcopy(tiny_target.model)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.05 * parameter.std() * torch.randn_like(parameter)
    DraftModel(model).save(tmp_path / "similar")
    return str(tmp_path / "similar")


@pytest.fixture
def make_recipe(tmp_path: Path) -> MakeRecipe:
    """`make_recipe(output="run", **data)`: a recipe over TEXTS."""
    write_rows(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS))
    write_rows(tmp_path / "turns.jsonl", ({"turns": turns} for turns in TURNS))

    def make(output: str = "run", prompts: str = "texts", **data: Any) -> Recipe:
        values = {"prompts": [str(tmp_path / f"{prompts}.jsonl")], "max_new_tokens": 40, "batch_size": 2, **data}
        return data_recipe(tmp_path / output, **values)

    return make


def watched(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[int]]:
    """What the rounds after each question emitted, as the decoder says it; filled while responses are made."""
    found: dict[tuple[int, ...], list[int]] = {}
    generate = Decoder.generate

    def noted(self: Decoder, prompts: Any, *args: Any, **kwargs: Any) -> Output:
        out = generate(self, prompts, *args, **kwargs)
        found.update(
            {tuple(asked): [r.emitted for r in played] for asked, played in zip(prompts, out.rounds, strict=True)}
        )
        return out

    monkeypatch.setattr(Decoder, "generate", noted)
    return found


def answers_of(row: dict[str, Any]) -> list[tuple[int, int]]:
    """Where each answer of a row begins and ends."""
    mask = [0, *row["loss_mask"], 0]
    begins = [i for i in range(len(mask) - 1) if mask[i : i + 2] == [0, 1]]
    return list(zip(begins, [i for i in range(len(mask) - 1) if mask[i : i + 2] == [1, 0]], strict=True))


def test_depths_by_hand() -> None:
    """Rounds that emitted 3 and 1 tokens after the first one; of a second answer, 2."""
    assert list(depths_of_answer([3, 1])) == [0, 1, 2, 3, 1]
    assert list(depths_of_answer([])) == [0]
    masks = [[0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1]]
    assert depths_of_rows(masks, [[3, 1], [2]]) == [[0, 0, 0, 1, 2, 3, 1], [0, 0, 1, 2]]
    with pytest.raises(ValueError, match="9 tokens were answered, and rounds emitted 8"):
        depths_of_rows([[1] * 9], [[3, 1], [2]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompts", ["texts", "turns"])
def test_stored_rounds_are_the_decoders_own_and_the_text_is_that_without_them(
    make_recipe: MakeRecipe,
    tiny_target: Target,
    similar: str,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    prompts: str,
) -> None:
    sampling = {"temperature": temperature, "seed": 3}
    plain = distill(make_recipe("plain", prompts, sampling=sampling), tiny_target)
    played = watched(monkeypatch)
    folder = distill(make_recipe("drafted", prompts, sampling=sampling, drafter=similar), tiny_target)
    found = rows(folder)
    assert [{k: v for k, v in row.items() if k != "depths"} for row in found] == rows(plain)
    answers = 0
    for row in found:
        assert len(row["depths"]) == len(row["input_ids"])
        assert all(learnt or not depth for learnt, depth in zip(row["loss_mask"], row["depths"], strict=True))
        for begin, end in answers_of(row):
            assert row["depths"][begin:end] == list(depths_of_answer(played[tuple(row["input_ids"][:begin])]))
            answers += 1
    assert answers == (len(TEXTS) if prompts == "texts" else sum(map(len, TURNS)))
    assert {depth for row in found for depth in row["depths"]} == {0, 1, 2, 3, 4, 5}, "some drafts were accepted"
    assert provenance(folder)["prompts"] == provenance(plain)["prompts"]
    [(who, count)] = rounds_of(folder).items()
    assert who.startswith("draft_model ")
    assert count == len(TEXTS if prompts == "texts" else TURNS)


def test_rounds_are_as_deep_as_the_recipe_says(make_recipe: MakeRecipe, tiny_target: Target, tmp_path: Path) -> None:
    """A drafter that is the target has all accepted: rounds emit one token more than the depth."""
    DraftModel(tiny_target.model).save(tmp_path / "itself")
    found = rows(distill(make_recipe(drafter=str(tmp_path / "itself"), draft_depth=2, limit=2), tiny_target))
    for row in found:
        for begin, end in answers_of(row):
            assert row["depths"][begin:end] == [0, *[1, 2, 3] * 40][: end - begin]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_interrupted_run_keeps_its_rounds(
    make_recipe: MakeRecipe, tiny_target: Target, ngram: str, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """What was finished is not answered again, and its rounds are those of a run that was not interrupted."""
    data = {"sampling": {"temperature": temperature, "seed": 3}, "drafter": ngram}
    whole = distill(make_recipe("whole", **data), tiny_target)
    interrupt(make_recipe("cut", **data), tiny_target, after=2)
    sizes = count_prompts(monkeypatch)
    cut = distill(make_recipe("cut", **data, batch_size=1), tiny_target)
    assert sizes == [1, 1]
    assert rows(cut) == rows(whole)
    assert rounds_of(cut) == rounds_of(whole)


def test_responses_begun_without_a_drafter_may_be_finished_with_one(
    make_recipe: MakeRecipe, tiny_target: Target, ngram: str, similar: str
) -> None:
    """Or with another one. Their text is the same; who has no rounds says so, row by row; each drafter is named."""
    whole = distill(make_recipe("whole"), tiny_target)
    interrupt(make_recipe("cut"), tiny_target, after=2)
    cut = distill(make_recipe("cut", drafter=ngram), tiny_target)
    found = rows(cut)
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in rows(whole)]
    assert sum(row["depths"] is None for row in found) == 4
    assert list(rounds_of(cut).values()) == [2]
    interrupt(make_recipe("both", drafter=ngram), tiny_target, after=2)
    both = rounds_of(distill(make_recipe("both", drafter=similar), tiny_target))
    assert {who.split()[0]: count for who, count in both.items()} == {"ngram": 4, "draft_model": 2}
    assert load_responses(cut).data.column("depths").null_count == 4


def test_a_finished_data_set_is_that_of_any_drafter(
    make_recipe: MakeRecipe, tiny_target: Target, ngram: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text does not depend on who drafts, so nothing is answered again; the rounds stay the first one's."""
    first = distill(make_recipe(drafter=ngram), tiny_target)
    before = rounds_of(first)
    DraftModel(tiny_target.model).save(tmp_path / "itself")
    sizes = count_prompts(monkeypatch)
    for drafter in (str(tmp_path / "itself"), None):
        assert distill(make_recipe(drafter=drafter), tiny_target) == first
    assert sizes == []
    assert rounds_of(first) == before


def test_without_a_drafter_there_are_no_rounds(make_recipe: MakeRecipe, tiny_target: Target) -> None:
    folder = distill(make_recipe(), tiny_target)
    assert "depths" not in load_responses(folder).column_names
    with pytest.raises(
        BadInputError, match=r"data\.verified: the responses in .* without a drafter .*\(data\.drafter\)"
    ):
        rounds_of(folder)


def test_rounds_name_the_drafter_by_content(
    make_recipe: MakeRecipe, tiny_target: Target, ngram: str, tmp_path: Path
) -> None:
    folder = distill(make_recipe(drafter=ngram), tiny_target)
    drafter: Drafter[Any] = load_drafter(ngram, tiny_target)
    assert rounds_of(folder) == {f"ngram {drafter.digest()[:16]}": len(TEXTS)}
