"""A drafter speculates while the target answers: the text stays that without it, whichever drafter it is."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from outrider.heads import DraftModel, Ngram
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompts", ["texts", "turns"])
def test_the_text_is_that_without_a_drafter(place: Place, similar: str, temperature: float, prompts: str) -> None:
    sampling = {"temperature": temperature, "seed": 3}
    plain = place.distil("plain", sampling=sampling)
    assert rows_of(place.distil("drafted", sampling=sampling, drafter=similar)) == rows_of(plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_responses_begun_with_one_drafter_may_be_finished_with_another(
    place: Place, ngram: str, similar: str, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """What was finished is not answered again, and a finished data set is that of any drafter."""
    sampling = {"temperature": temperature, "seed": 3}
    whole = place.distil("whole", sampling=sampling)
    place.interrupt("cut", after=2, sampling=sampling, drafter=ngram)
    sizes = count_prompts(monkeypatch)
    cut = place.distil("cut", sampling=sampling, drafter=similar, batch_size=1)
    assert sizes == [1, 1]
    assert rows_of(cut) == rows_of(whole)
    assert place.distil("cut", sampling=sampling) == cut
    assert sizes == [1, 1]
