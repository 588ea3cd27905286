"""Which rows are trained on, in which order, and which of their tokens.

Packed rows have the loss and the gradients of single ones; stored states train nearly as those of the loop.
"""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from itertools import pairwise
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from outrider.common import BadInputError, IncompatibleError
from outrider.heads import HEADS, Drafter, TargetBatch
from outrider.recipes import Recipe
from outrider.targets import PeakBytes, Target
from outrider.targets.documents import Documents
from outrider.train import run, train
from outrider.train.arguments import training_arguments
from outrider.train.check import check, check_with_target
from outrider.train.data import (
    EMPTY,
    IGNORED,
    OnlineBatches,
    Order,
    Rows,
    check_answers,
    collate,
    split,
    token_counts,
)
from outrider.train.packing import PackedBatches, Packs, packs_of
from outrider.train.resource_estimate import plan

from ..closeness import EXACT, assert_same, both_precisions, spread, terms
from ..conftest import drafter_in_training, installed
from .conftest import (
    MakeRecipe,
    in_float64,
    losses,
    of_stored,
    provenance,
    require_same_drafter,
    train_alike,
    train_in_two,
    weights,
)


def row(name: str, tokens: list[int], mask: list[int], content: str | None = None) -> dict[str, Any]:
    return {"id": name, "suite": "s", "input_ids": tokens, "loss_mask": mask, "content": content or name}


def table(*rows: tuple[list[int], list[int]]) -> Dataset:
    return Dataset.from_list([row(f"row-{i}", tokens, mask) for i, (tokens, mask) in enumerate(rows)])


def test_labels_are_the_response_tokens_and_padding_is_on_the_right():
    """No head can predict a row's first two tokens, so no drafter counts them, even after a prompt of one token."""
    rows = Rows(table(([5, 6, 7, 8], [0, 0, 1, 1]), ([1, 2, 3], [0, 1, 1])), [0, 1])
    batch = collate([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, 7, 8], [IGNORED, IGNORED, 3, IGNORED]]
    assert batch["index"].tolist() == [0, 1]
    assert rows[EMPTY] == {"index": EMPTY, "input_ids": [0, 0], "labels": [IGNORED, IGNORED]}


def test_an_epoch_holds_every_row_once_and_is_filled_up_with_empty_rows():
    order = Order(10, 4, seed=3)
    positions = list(order)
    assert sorted(positions[:10]) == list(range(10))
    assert positions[10:] == [EMPTY, EMPTY]
    assert len(order) == 12


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    order, same = Order(50, 1, seed=3), Order(50, 8, seed=3)
    first = list(order)
    torch.rand(7)  # other randomness in between
    assert list(order) == first == list(same)[:50]
    order.set_epoch(1)
    assert list(order) != first
    assert list(Order(50, 1, seed=4)) != first


def test_held_out_rows_do_not_depend_on_the_order_or_on_other_rows():
    rows = table(*[([1, 2, 3], [0, 0, 1])] * 200)
    held, shuffled = split(rows, 0.1)[1], split(rows.select(range(199, 49, -1)), 0.1)[1]
    names = {held.table[i]["id"] for i in held.indices}
    assert 5 < len(names) < 40
    late = {n for n in names if int(n.removeprefix("row-")) >= 50}
    assert {shuffled.table[i]["id"] for i in shuffled.indices} == late


def test_what_is_asked_decides_what_is_held_out_whatever_the_ids():
    rows = [row(f"a/{i}", [1, 2, 3], [0, 0, 1], f"question {i}") for i in range(100)]
    numbered_anew = [{**row, "id": f"a/{i}"} for i, row in enumerate([{**rows[0], "content": "new"}, *rows])]
    held, later = (split(Dataset.from_list(given), 0.2)[1] for given in (rows, numbered_anew))
    asked = {held.table[i]["content"] for i in held.indices}
    assert 5 < len(asked) < 40
    assert {later.table[i]["content"] for i in later.indices} - {"new"} == asked


def test_prompts_are_learned_on_request_but_never_held_out():
    """And no row is both trained on and held out."""
    training, held = split(table(*[([5, 6, 7, 8], [0, 0, 0, 1])] * 50), 0.3, prompts=True)
    assert sorted(training.indices + held.indices) == list(range(50))
    assert training[0]["labels"] == [IGNORED, IGNORED, 7, 8]
    assert held[0]["labels"] == [IGNORED, IGNORED, IGNORED, 8]


@pytest.mark.parametrize("masks", [[0, 0, 0], [1, 1, 0]])
def test_data_without_a_response_is_an_error_that_says_so(masks):
    with pytest.raises(BadInputError, match="of 1 rows 0 have a response"):
        split(table(([1, 2, 3], masks)), 0.0)


@pytest.mark.parametrize(("name", "least"), [("dflash", 2), ("uno", 3), ("eagle3", 1)])
def test_answers_too_short_to_teach_a_drafter_anything_are_refused(caplog, name, least):
    def rows(*answers: list[int]) -> Rows:
        return Rows(table(*[([5] * (3 + len(mask)), [0, 0, 0, *mask]) for mask in answers]), range(len(answers)))

    drafter = HEADS[name].__new__(HEADS[name])
    short, long = [1, 0] * least * (least > 1), [1] * least
    if least > 1:
        with pytest.raises(
            BadInputError, match=rf"fewer than {least} tokens, and of 2 rows 2 have no longer one\. Take"
        ):
            check_answers(rows(short, [1]), drafter)
    check_answers(rows(long, [1]), drafter)
    assert not caplog.records
    check_answers(rows(long, [1], [1]), drafter)
    assert ["of 3 rows 2 have" in record.getMessage() for record in caplog.records] == [True] * (least > 1)


def test_token_counts_are_of_learned_tokens_only_and_those_beyond_the_vocabulary_are_refused():
    rows = table(([1, 1, 2, 3], [0, 0, 1, 1]), ([4, 4, 3], [0, 0, 1]), ([1, 1, 9], [0, 0, 1]))
    assert token_counts(Rows(rows, [0, 1]), 6).tolist() == [0, 0, 1, 2, 0, 0]
    with pytest.raises(IncompatibleError, match="token 9, the target's vocabulary has 6"):
        token_counts(Rows(rows, [2]), 6)


def test_a_float32_target_may_run_in_less_its_output_embedding_never_does(target):
    inputs = collate([{"index": 0, "input_ids": [1, 2, 3, 4], "labels": [IGNORED, IGNORED, 3, 4]}])
    own, less = OnlineBatches(target, (1,)).of(inputs), OnlineBatches(target, (1,), torch.bfloat16).of(inputs)
    assert own.hidden is not None
    assert less.hidden is not None
    assert not torch.equal(own.last, less.last)
    # In each of six layers nine values are rounded on the way to a state: of norms, products, attention and sums.
    assert (less.hidden - own.hidden).norm() < spread(torch.bfloat16, 6 * 9) * own.hidden.norm()
    assert target.lm_head(less.last).dtype == torch.float32


# A few anchors of each text are drawn, so that another draw would be another loss.
DFLASH = {"type": "dflash", "num_layers": 2, "block_size": 5, "taps": [2, 4], "num_anchors": 2}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"type": "eagle3", "steps": 3, "draft_vocab_size": 96},
    "eagle3 of two layers": {"type": "eagle3", "steps": 4, "num_layers": 2, "norm_output": True, "norm_taps": True},
    "eagle1": {"type": "eagle1", "steps": 2, "noise": 0.0},
    "medusa": {"type": "medusa", "num_heads": 3},
    "hydra": {"type": "hydra", "num_heads": 3},
    "dflash": DFLASH,
    "dflash with a window": {**DFLASH, "sliding_window": 6, "causal": True, "weighting": "dpace"},
    "dflash2": {**DFLASH, "type": "dflash2", "selector_rank": 8},
    "dspark": {**DFLASH, "type": "dspark", "from_anchor": True},
    "lilicorr": {**DFLASH, "type": "lilicorr", "lilicorr_hidden_size": 16, "lilicorr_num_heads": 2},
    "draft_model": {"type": "draft_model", "model": {"num_hidden_layers": 1}},
    "mtp": {"type": "mtp", "steps": 3, "draft_vocab_size": 96, "loss": "soft_ce"},
    "mtp of two modules": {"type": "mtp", "recursive": False, "depth": 2},
    # Some rollouts are dropped, by chance.
    "pard": {"type": "pard", "model": {"num_hidden_layers": 1}, "steps": 4, "mask_token_id": 319},
    "peagle": {"type": "peagle", "steps": 4, "mask_token_id": 319},
    "self_speculative": {"type": "self_speculative", "exit_layer": 2},
    "tli": {"type": "tli", "tokenizer": "embedded", "model": {"num_hidden_layers": 1}},
    "uno": {"type": "uno", "steps": 4, "loss": "forward_kl"},
}
KINDS = installed(KINDS)


@pytest.fixture(scope="module")
def learned(target: Target) -> Rows:
    """Twelve rows with prompts of many lengths; one has a single token to learn."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for _ in range(12):
        prompt, response = (int(torch.randint(1, high, (1,), generator=generator)) for high in (14, 22))
        count = max(3, prompt + response)
        tokens = torch.randint(0, target.vocab_size // 4, (count,), generator=generator).tolist()
        rows.append((tokens, [0] * prompt + [1] * (count - prompt)))
    return split(table(*rows, ([1, 2, 3, 4, 5], [0, 0, 0, 0, 1])), 0.0)[0]


def lesson(drafter: Drafter[Any], batch: TargetBatch) -> list[Tensor]:
    """The loss, the number of tokens learned, all metrics, and all gradients."""
    drafter.zero_grad()
    found = drafter.loss(batch)
    found.total.backward()
    values = [found.total.detach(), found.count, *(value for pair in found.metrics.values() for value in pair)]
    return values + [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


def require_same_lesson(drafter: Drafter[Any], one: TargetBatch, other: TargetBatch) -> None:
    """What two batches teach is the same; gradients go the way of a pass twice."""
    places = one.tokens.numel() + other.tokens.numel()
    sums = 2 * terms(one.target.model, drafter, places=places)
    assert_same(lesson(drafter, one), lesson(drafter, other), sums)


@both_precisions
@pytest.mark.parametrize("values", KINDS.values(), ids=KINDS)
def test_packed_rows_have_the_loss_the_metrics_and_the_gradients_of_single_ones(tried, learned, values):
    """Packs of several texts, and an empty row beside them; without their documents it would be another loss."""
    drafter, packs = drafter_in_training(tried, values), Packs(learned, 64)
    assert len(packs) < len(learned) / 2
    assert max(map(len, packs.groups)) > 2
    online = OnlineBatches(tried, drafter.taps)
    single = online.of(collate([learned[i] for i in range(len(learned))]))
    packed = PackedBatches(online).of(collate([packs[i] for i in [*range(len(packs)), EMPTY]]))
    require_same_lesson(drafter, packed, single)
    apart, packed.documents = float(drafter.loss(packed).total), None
    reads_its_own_place_alone = values["type"] == "self_speculative"
    assert reads_its_own_place_alone or abs(float(drafter.loss(packed).total) - apart) > 1e-3


def test_the_kinds_above_are_those_that_say_that_they_pack():
    assert {values["type"] for values in KINDS.values()} == {name for name, kind in HEADS.items() if kind.packs}


def test_texts_are_placed_longest_first_each_in_the_fullest_pack_with_room():
    """6 | 5 | 4, then 3 fits beside 5 and 2 beside 6."""
    assert packs_of([5, 3, 4, 2, 6], 8) == [[4, 3], [0, 1], [2]]
    assert packs_of([9, 1], 8) == [[0], [1]], "a longer text has a pack of its own"


def test_a_pass_has_texts_of_about_one_length_once_it_has_enough_tokens():
    """On a CPU few are enough, on a GPU many are; `most` ends a pass, too."""
    documents = Documents([[300, 40, 250], [100, 30]], 590)
    assert list(documents.passes(torch.device("cpu"))) == [[0, 2], [3, 1, 4]]
    assert list(documents.passes(torch.device("cpu"), most=2)) == [[0, 2], [3, 1], [4]]
    assert list(documents.passes(torch.device("cuda"))) == [[0, 2, 3, 1, 4]]
    assert list(documents.passes(torch.device("cpu"), together=True)) == [[0, 2, 3, 1, 4]]


def test_packs_hold_every_text_once_and_are_nearly_full():
    lengths = torch.randint(1, 400, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    packs = packs_of(lengths, 512)
    assert sorted(text for pack in packs for text in pack) == list(range(2000))
    sizes = [sum(lengths[text] for text in pack) for pack in packs]
    assert max(sizes) <= 512
    assert sum(sizes) > 0.99 * 512 * len(packs)


def test_labels_of_packs_are_those_of_their_texts(learned):
    packs = Packs(learned)
    assert packs.size == max(len(learned[i]["input_ids"]) for i in range(len(learned)))
    labels = [label for i in range(len(packs)) for label in packs[i]["labels"]]
    alone = [label for i in range(len(learned)) for label in learned[i]["labels"]]
    assert sorted(labels) == sorted(alone)
    assert packs[EMPTY] == {"index": [EMPTY], "lengths": [2], "input_ids": [0, 0], "labels": [IGNORED, IGNORED]}


@pytest.mark.parametrize(
    "values", [KINDS["eagle3 of two layers"], {**DFLASH, "num_anchors": 64}], ids=["eagle3", "dflash"]
)
def test_a_steps_memory_grows_with_the_length_of_packs_and_not_with_its_square(target, values):
    """From 1024 tokens to 2048 and 4096, in texts of 128: no scores and no mask of a whole row are ever in memory."""
    drafter, peaks = drafter_in_training(target, values), []
    rows = table(*(([i % 90] * 128, [0] * 20 + [1] * 108) for i in range(32)))
    for count in (8, 16, 32):
        packs = Packs(Rows(rows, range(count)), 128 * count)
        batch = PackedBatches(OnlineBatches(target, drafter.taps)).of(collate([packs[0]]))
        assert batch.tokens.shape == (1, 128 * count)
        with PeakBytes() as memory:
            drafter.loss(batch).total.backward()
        drafter.zero_grad()
        peaks.append(memory.peak)
    assert all(after < 2.1 * before for before, after in pairwise(peaks)), peaks


def whole_batches(recipe: MakeRecipe, name: str, rows: int, data: dict[str, Any] | None = None, **more: Any) -> Recipe:
    """A training whose batches are the whole data set: packed or not, a step learns the same."""
    settings = {"per_device_train_batch_size": rows, "max_steps": 5, "save_steps": 5, "per_device_eval_batch_size": 4}
    return recipe(name, KINDS["eagle3"], {"holdout": 0.1, **(data or {})}, **settings | more)


def learn_alike(runs: list[Recipe], target: Target) -> None:
    train_alike(runs[0], runs[1:], target)
    expected, *evaluated = [provenance(made)["metrics"]["eval_loss"] for made in runs]
    assert_same(evaluated, [expected] * len(evaluated))


def test_packed_training_is_training(recipe, target):
    """Loss by loss, with states from the loop or from disk, in accumulated batches, too; figures as well."""
    packed = {"packing": True, "max_length": 48}
    runs = [
        whole_batches(recipe, "single", 64),
        whole_batches(recipe, "packed", 32, **packed),
        whole_batches(recipe, "cached", 32, {"features": "cached"}, **packed),
        whole_batches(recipe, "accumulated", 8, gradient_accumulation_steps=4, **packed),
    ]
    learn_alike(runs, target)
    facts = [provenance(made)["training"] for made in runs]
    assert facts[1]["rows"] == facts[0]["rows"] > 2 * facts[1]["packs"]
    assert "packs" not in facts[0]


def test_states_of_packs_are_kept_for_later_epochs_which_learn_bit_for_bit_the_same(recipe, target, monkeypatch):
    """With room for none, for some, and for all; a target's pass is made once for what is kept."""
    settings = {"packing": True, "max_length": 48, "per_device_train_batch_size": 1, "max_steps": -1}
    rooms, passes = {"none": 0, "some": 40_000, "all": 10**9}, dict.fromkeys(("none", "some", "all"), 0)
    forward, found = target.forward, set()
    for name, room in rooms.items():

        def counted(*args: Any, name: str = name, **values: Any) -> Any:
            passes[name] += 1
            return forward(*args, **values)

        monkeypatch.setattr(target, "forward", counted)
        monkeypatch.setattr(run, "free_bytes", lambda device, room=room: 4 * room)
        made = recipe(name, KINDS["eagle3"], {"holdout": 0.0}, num_train_epochs=3, **settings)
        found.add(weights(train(made, target)))
    assert len(found) == 1
    assert passes["all"] < passes["some"] < passes["none"] == 3 * passes["all"]


def test_two_processes_with_packs_train_as_one(recipe, target):
    settings = {"packing": True, "max_length": 48, "max_steps": 6}
    one = recipe("one", KINDS["eagle3"], **settings | {"per_device_train_batch_size": 4})
    two = recipe("two", KINDS["eagle3"], **settings | {"per_device_train_batch_size": 2})
    train_alike(one, [two], target, start=train_in_two)
    require_same_drafter(one, two)


def test_a_plan_counts_packs_as_if_they_were_full(recipe, target, stored):
    """A training takes a fifth more steps at most, or fewer: its share of held-out rows is what their contents say."""
    settings = {"packing": True, "max_length": 48, "per_device_train_batch_size": 2, "max_steps": -1}
    made = recipe("planned", KINDS["eagle3"], **settings | {"num_train_epochs": 2})
    planned = plan(of_stored(made, stored))
    assert planned.tokens_per_step == 96
    assert 0.85 * planned.steps <= train(made, target).steps <= 1.2 * planned.steps


def test_a_drafter_that_does_not_say_that_it_packs_is_refused(recipe, monkeypatch):
    monkeypatch.setattr(HEADS["medusa"], "packs", False)
    with pytest.raises(BadInputError, match=r"a medusa drafter's loss does not keep the texts .* eagle3"):
        check(recipe(drafter={"type": "medusa"}, packing=True))


# The largest relative difference of any of twelve losses from those of states that are computed in the loop.
NEAR = {"auto": EXACT, "float32": EXACT, "float16": 1e-3, "bfloat16": 1e-3, "float8_e4m3fn": 2e-2}


@pytest.mark.parametrize("dtype", NEAR)
def test_losses_of_rounded_states_are_near_those_of_the_loop(recipe, target, dtype):
    online = recipe("online")
    cached = recipe(dtype, data_changes={"features": "cached", "features_dtype": dtype})
    with in_float64(target) as doubled:
        train(online, doubled)
        train(cached, doubled)
    assert losses(cached) == pytest.approx(losses(online), rel=NEAR[dtype])
    assert (losses(cached) == pytest.approx(losses(online), rel=1e-6)) == (dtype in ("auto", "float32"))


@pytest.mark.parametrize(
    ("features", "free", "is_named"), [("cached", 10**9, False), ("cached", 10**4, True), ("online", 0, False)]
)
def test_a_disk_on_which_states_may_not_fit_is_named_before_any_prompt_is_answered(
    recipe, target, monkeypatch, caplog, features, free, is_named
):
    """Nothing is said where they are not stored."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**12, 10**12 - free, free))
    data: dict[str, Any] = {"responses": None, "features": features, "max_prompt_tokens": 40, "max_new_tokens": 60}
    made = recipe(data_changes=data)
    with caplog.at_level(logging.WARNING):
        check_with_target(made, training_arguments(made), target)
    said = "data.features: cached takes up to 32.8 kB on the disk of"  # 4 + 60 tokens of 3 taps and the last state
    assert (said in caplog.text) == ("takes up to" in caplog.text) == is_named


def test_a_plan_counts_states_as_they_are_stored(recipe, target, stored):
    def planned(dtype: str) -> int:
        made = recipe("planned", data_changes={"features": "cached", "features_dtype": dtype})
        return plan(of_stored(made, stored)).feature_bytes

    size = target.hidden_size
    assert planned("auto") == planned("float32") == 2 * planned("bfloat16")
    assert planned("float8_e4m3fn") * 4 * size == planned("float32") * (size + 4)
