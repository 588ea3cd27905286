"""A share of a training's loss lies on what rounds of decoding reached while its responses were written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.common import BadInputError
from outrider.distill import distill, load_responses
from outrider.heads import HEADS, Ngram, ReachedPositions, TargetBatch, load_drafter
from outrider.heads.low_rank import LowRank
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import train
from outrider.train.check import check
from outrider.train.data import EMPTY, OnlineBatches, PackedBatches, Packs, Rows, collate, split

from ..closeness import assert_same, both_precisions, terms
from ..conftest import drafter_in_training
from .conftest import EAGLE3, MakeRecipe, losses, make_rows, provenance, train_alike, train_in_two, weights, write_data
from .test_data import KINDS, learn_alike, lesson, require_same_lesson

FOLLOW = {name: KINDS[name] for name in KINDS if HEADS[KINDS[name]["type"]].follows_rounds}


def with_depths(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as if rounds had emitted 1 to 5 tokens; every seventh was written without a drafter."""
    generator, found = torch.Generator().manual_seed(9), []
    for number, row in enumerate(rows):
        depths = [0] * (row["loss_mask"].index(1) + 1)
        while len(depths) < len(row["input_ids"]):
            depths += range(1, 2 + int(torch.randint(0, 5, (1,), generator=generator)))
        found.append(row | {"depths": None if number % 7 == 6 else depths[: len(row["input_ids"])]})
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    """The data set of the other tests, with rounds."""
    rows = with_depths(make_rows(target.vocab_size))
    return write_data(tmp_path_factory.mktemp("served") / "data", rows, target, rounds={"eagle3 0123": 53})


@pytest.fixture
def follow(recipe: MakeRecipe, served: Path) -> MakeRecipe:
    """`follow(name, share, drafter, data={…}, **training)`: a recipe that follows the rounds of `served`."""

    def make(
        name: str, share: float, drafter: Any = EAGLE3, data: dict[str, Any] | None = None, **training: Any
    ) -> Recipe:
        return recipe(name, drafter, {"responses": str(served), "verified": share, **(data or {})}, **training)

    return make


def given(batches: Any, inputs: dict[str, Tensor], share: float = 0.5) -> TargetBatch:
    found: TargetBatch = batches.of(inputs)
    found.verified = ReachedPositions(inputs["depths"], share)
    return found


@both_precisions
@pytest.mark.parametrize("values", FOLLOW.values(), ids=FOLLOW)
def test_packed_rows_follow_rounds_as_single_ones_do(tried, served, values):
    """The same loss and the same gradients, beside a text without rounds and an empty row; and not the usual ones."""
    drafter = drafter_in_training(tried, values)
    rows = Rows(load_responses(served), range(14), depths=True)
    packs, online = Packs(rows, 64), OnlineBatches(tried, drafter.taps)
    single = given(online, collate([rows[i] for i in [*range(14), EMPTY]]))
    packed = given(PackedBatches(online), collate([packs[i] for i in [*range(len(packs)), EMPTY]]))
    require_same_lesson(drafter, packed, single)
    followed, single.verified = lesson(drafter, single)[0], None
    assert abs(float(lesson(drafter, single)[0] / followed) - 1) > 1e-4


@both_precisions
@pytest.mark.parametrize("values", FOLLOW.values(), ids=FOLLOW)
def test_what_a_row_teaches_does_not_depend_on_its_batch(tried, served, values):
    drafter, rows = drafter_in_training(tried, values), Rows(load_responses(served), range(8), depths=True)
    online = OnlineBatches(tried, drafter.taps)
    whole = lesson(drafter, given(online, collate([rows[i] for i in range(8)])))[0]
    apart = [lesson(drafter, given(online, collate([rows[i]])))[0] for i in range(8)]
    assert_same(whole, torch.stack(apart).sum(), terms(tried.model, drafter))


def test_rows_have_depths_only_if_they_are_asked_for(served):
    table = load_responses(served)
    training, held_out = split(table, 0.1, depths=True)
    assert training[0]["depths"] == table[training.indices[0]]["depths"]
    assert training[training.indices.index(6)]["depths"] == [0] * len(table[6]["input_ids"])
    assert "depths" not in held_out[0]
    assert "depths" not in split(table, 0.1)[0][0]
    assert training[EMPTY]["depths"] == [0, 0]


def test_trainings_follow_rounds_however_their_batches_are_made(follow, target):
    """Loss by loss: with states from the loop or from disk, in packs, and in accumulated batches."""
    steps = {"max_steps": 3, "save_steps": 3, "per_device_eval_batch_size": 4}
    packed = {"packing": True, "max_length": 48}
    runs = [
        follow("single", 0.5, per_device_train_batch_size=64, **steps),
        follow("packed", 0.5, per_device_train_batch_size=32, **steps, **packed),
        follow("cached", 0.5, data={"features": "cached"}, per_device_train_batch_size=64, **steps),
        follow("accumulated", 0.5, per_device_train_batch_size=8, gradient_accumulation_steps=8, **steps),
    ]
    learn_alike(runs, target)
    usual = follow("usual", 0.0, per_device_train_batch_size=64, **steps)
    train(usual, target)
    assert losses(usual) != pytest.approx(losses(runs[0]), rel=1e-3)
    assert provenance(runs[0])["data"]["rounds"] == {"eagle3 0123": 53}


@pytest.mark.slow
def test_two_processes_follow_rounds_as_one(follow, target):
    one = follow("one", 0.5, max_steps=3, per_device_train_batch_size=8)
    two = follow("two", 0.5, max_steps=3, per_device_train_batch_size=4)
    train_alike(one, [two], target, start=train_in_two)


def test_without_a_share_a_training_is_bit_for_bit_that_without_rounds(recipe, follow, target):
    runs = follow("rounds", 0.0, max_steps=4), recipe("none", max_steps=4)
    assert weights(train(runs[0], target)) == weights(train(runs[1], target))


def test_held_out_rows_are_judged_as_always(follow, target, caplog):
    """Of one drafter the figures are the same whatever the share; and who has no rounds is said."""
    still = {"learning_rate": 0.0, "max_steps": 1, "warmup_steps": 0}
    usual, followed = (train(follow(f"s{share}", share, **still), target).metrics for share in (0.0, 1.0))
    names = [name for name in usual if name.startswith("eval_") and "runtime" not in name and "per_second" not in name]
    assert {name: followed[name] for name in names} == {name: usual[name] for name in names}
    assert followed["train_loss"] != usual["train_loss"]
    assert "of 61 rows 8 were written without a drafter" in caplog.text


def test_a_training_is_continued_with_its_own_share(follow, target):
    """Interrupted half-way, it ends bit for bit as one that was not; with another share it is refused."""
    settings = {"max_steps": 4, "save_steps": 2}
    before = weights(train(follow("run", 0.5, **settings), target))
    shutil.rmtree(follow("run", 0.5).output_folder / "checkpoints" / "checkpoint-4")
    with pytest.raises(BadInputError, match=r"data\.verified \(was 0\.5, is 0\.25\)"):
        train(follow("run", 0.25, **settings), target)
    assert weights(train(follow("run", 0.5, **settings), target)) == before


def test_a_recipe_trains_on_rounds_that_it_lets_the_decoder_play(recipe, target, tmp_path):
    """Depth and root mean in training what they mean in decoding.

    The drafter's own drafts at the depths that were reached are right up to the last of a round, and wrong there.
    """
    (tmp_path / "prompts.txt").write_text("".join(f"def f{i}(x):\n" for i in range(24)))
    data = {"responses": None, "prompts": [str(tmp_path / "prompts.txt")], "max_new_tokens": 24}
    first = train(recipe("first", EAGLE3 | {"draft_vocab_size": 0}, data, max_steps=60, save_steps=60), target)
    data |= {"drafter": str(first.drafter_folder), "draft_depth": 3, "verified": 0.5}
    second = recipe("second", EAGLE3 | {"draft_vocab_size": 0}, data, max_steps=2)
    table = load_responses(distill(second, target))
    assert max(max(row["depths"]) for row in table) > 2
    drafter: Any = load_drafter(first.drafter_folder, target)
    right = wrong = 0
    for row in table:
        tokens = torch.tensor([row["input_ids"]])
        states = target.forward(tokens, taps=drafter.taps)
        said = [drafter.logits(o, target).argmax(-1)[0] for o in drafter.unroll(target, tokens, states.hidden)]
        depths = [*row["depths"], 1]
        for place, depth in enumerate(depths[:-1]):
            if not 1 <= depth <= 3 or place == len(depths) - 2:  # the end may have cut the last round
                continue
            was_accepted = depths[place + 1] == depth + 1
            assert (int(said[depth - 1][place - 1 - depth]) == row["input_ids"][place]) == was_accepted
            right, wrong = right + was_accepted, wrong + (not was_accepted)
    assert min(right, wrong) > 20
    assert train(second, target).steps == 2


@pytest.mark.parametrize("drafter", [{"type": "draft_model"}, {"type": "self_speculative"}], ids=["lm", "self"])
def test_a_drafter_that_cannot_tell_depths_apart_is_refused_before_anything_is_loaded(follow, drafter):
    with pytest.raises(BadInputError, match=r"data\.verified is 0\.5, but a .* has nothing to weigh.* eagle3"):
        check(follow("run", 0.5, drafter))


def test_a_change_of_a_drafter_follows_rounds_if_that_does(follow, target, tmp_path):
    for name, works in (("eagle3", True), ("draft_model", False)):
        drafter_in_training(target, KINDS[name]).save(tmp_path / name)
        drafter = LowRank.over(tmp_path / name, target, 2)
        if works:
            check(follow("run", 0.5), drafter)
            assert train(follow("low", 0.5, max_steps=2), target, drafter).steps == 2
        else:
            with pytest.raises(BadInputError, match="a draft_model drafter reads the text itself"):
                check(follow("run", 0.5), drafter)


def test_responses_without_rounds_are_refused_before_anything_is_loaded(recipe, data):
    with pytest.raises(BadInputError, match=rf"the responses in {data} were written without a drafter .* delete that"):
        check(recipe("run", data_changes={"verified": 0.5}))


def test_responses_that_were_finished_without_a_drafter_are_refused_when_they_are_there(recipe, target, tmp_path):
    """The drafter came too late: all batches but the writing of the data set were done."""
    Ngram().save(tmp_path / "ngram")
    (tmp_path / "prompts.txt").write_text("def add(a, b):\nfor name in\n")
    data = {"responses": None, "prompts": [str(tmp_path / "prompts.txt")], "max_new_tokens": 8, "holdout": 0.0}
    folder = distill(recipe("late", data_changes=data), target)
    late = recipe("late", data_changes=data | {"drafter": str(tmp_path / "ngram"), "verified": 0.5})
    with pytest.raises(BadInputError, match=rf"the responses in {folder} were written without a drafter"):
        train(late, target)
