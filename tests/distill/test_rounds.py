"""A data set keeps at which depth a round of decoding reached each token, wherever a drafter speculated."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common import BadInputError
from outrider.decode import Decoder, Output
from outrider.distill import load_responses, provenance
from outrider.distill.data_set import depths_of_answer, depths_of_rows, rounds_of
from outrider.heads import Drafter, DraftModel, Ngram, load_drafter
from outrider.targets import Target

from .conftest import Place, count_prompts, rows_of

TEXTS = ["def add(first, second):", "for name in", "The target", "class Stack:", "print(name, len(name))", "x"]
TURNS = [["hello", "and then"], ["one"], ["def add", "more", "again"]]


@pytest.fixture
def ngram(tmp_path: Path) -> str:
    Ngram().save(tmp_path / "ngram")
    return str(tmp_path / "ngram")


@pytest.fixture
def similar(tmp_path: Path, place: Place) -> str:
    """The folder of a draft model that is the target with some noise in it: some of its drafts are accepted."""
    model = copy.deepcopy(place.target.model)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.05 * parameter.std() * torch.randn_like(parameter)
    DraftModel(model).save(tmp_path / "similar")
    return str(tmp_path / "similar")


@pytest.fixture
def prompts() -> str:
    return "texts"


@pytest.fixture
def place(tmp_path: Path, tiny_target: Target, prompts: str) -> Place:
    given = [{"text": text} for text in TEXTS] if prompts == "texts" else [{"turns": turns} for turns in TURNS]
    return Place(tmp_path, tiny_target, given, {"max_new_tokens": 40, "batch_size": 2})


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
    place: Place, similar: str, monkeypatch: pytest.MonkeyPatch, temperature: float, prompts: str
) -> None:
    sampling = {"temperature": temperature, "seed": 3}
    plain = place.distil("plain", sampling=sampling)
    played = watched(monkeypatch)
    folder = place.distil("drafted", sampling=sampling, drafter=similar)
    found = rows_of(folder)
    assert [{k: v for k, v in row.items() if k != "depths"} for row in found] == rows_of(plain)
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


def test_rounds_are_as_deep_as_the_recipe_says(place: Place, tmp_path: Path) -> None:
    """A drafter that is the target has all accepted: rounds emit one token more than the depth."""
    DraftModel(place.target.model).save(tmp_path / "itself")
    found = rows_of(place.distil(drafter=str(tmp_path / "itself"), draft_depth=2, limit=2))
    for row in found:
        for begin, end in answers_of(row):
            assert row["depths"][begin:end] == [0, *[1, 2, 3] * 40][: end - begin]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_interrupted_run_keeps_its_rounds(
    place: Place, ngram: str, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """What was finished is not answered again, and its rounds are those of a run that was not interrupted."""
    data = {"sampling": {"temperature": temperature, "seed": 3}, "drafter": ngram}
    whole = place.distil("whole", **data)
    place.interrupt("cut", after=2, **data)
    sizes = count_prompts(monkeypatch)
    cut = place.distil("cut", **data, batch_size=1)
    assert sizes == [1, 1]
    assert rows_of(cut) == rows_of(whole)
    assert rounds_of(cut) == rounds_of(whole)


def test_responses_begun_without_a_drafter_may_be_finished_with_one(place: Place, ngram: str, similar: str) -> None:
    """Or with another one. Their text is the same; who has no rounds says so, row by row; each drafter is named."""
    whole = place.distil("whole")
    place.interrupt("cut", after=2)
    cut = place.distil("cut", drafter=ngram)
    found = rows_of(cut)
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in rows_of(whole)]
    assert sum(row["depths"] is None for row in found) == 4
    assert list(rounds_of(cut).values()) == [2]
    place.interrupt("both", after=2, drafter=ngram)
    both = rounds_of(place.distil("both", drafter=similar))
    assert {who.split()[0]: count for who, count in both.items()} == {"ngram": 4, "draft_model": 2}
    assert load_responses(cut).data.column("depths").null_count == 4


def test_a_finished_data_set_is_that_of_any_drafter(
    place: Place, ngram: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text does not depend on who drafts, so nothing is answered again; the rounds stay the first one's."""
    first = place.distil(drafter=ngram)
    before = rounds_of(first)
    DraftModel(place.target.model).save(tmp_path / "itself")
    sizes = count_prompts(monkeypatch)
    for drafter in (str(tmp_path / "itself"), None):
        assert place.distil(drafter=drafter) == first
    assert sizes == []
    assert rounds_of(first) == before


def test_without_a_drafter_there_are_no_rounds(place: Place) -> None:
    folder = place.distil()
    assert "depths" not in load_responses(folder).column_names
    with pytest.raises(
        BadInputError, match=r"data\.verified: the responses in .* without a drafter .*\(data\.drafter\)"
    ):
        rounds_of(folder)


def test_rounds_name_the_drafter_by_content(place: Place, ngram: str, tmp_path: Path) -> None:
    folder = place.distil(drafter=ngram)
    drafter: Drafter[Any] = load_drafter(ngram, place.target)
    assert rounds_of(folder) == {f"ngram {drafter.digest()[:16]}": len(TEXTS)}
