"""Which rows, in which order, and which of their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

from outrider.common import BadInputError, IncompatibleError
from outrider.targets import Target
from outrider.train.data import EMPTY, IGNORED, OnlineBatches, Order, Rows, collate, split, token_counts


def table(*rows: tuple[list[int], list[int]]) -> Dataset:
    return Dataset.from_list(
        [{"id": f"r{i}", "suite": "s", "input_ids": tokens, "loss_mask": mask} for i, (tokens, mask) in enumerate(rows)]
    )


def test_labels_are_the_response_tokens_and_padding_is_on_the_right() -> None:
    rows = Rows(table(([5, 6, 7, 8], [0, 0, 1, 1]), ([1, 2, 3], [0, 0, 1])), [0, 1])
    batch = collate([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [1, 2, 3, 0]]
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, 7, 8], [IGNORED, IGNORED, 3, IGNORED]]
    assert batch["index"].tolist() == [0, 1]


def test_the_first_two_tokens_of_a_row_are_never_learned() -> None:
    """No head can predict them, so no drafter counts them, even after a prompt of one token."""
    rows = Rows(table(([5, 6, 7], [0, 1, 1])), [0])
    assert rows[0]["labels"] == [IGNORED, IGNORED, 7]


def test_an_empty_row_has_nothing_to_learn() -> None:
    empty = Rows(table(([5, 6, 7], [0, 0, 1])), [0])[EMPTY]
    assert empty["index"] == EMPTY
    assert set(empty["labels"]) == {IGNORED}


def test_an_epoch_holds_every_row_once_and_is_filled_up_with_empty_rows() -> None:
    order = Order(10, 4, seed=3)
    positions = list(order)
    assert sorted(positions[:10]) == list(range(10))
    assert positions[10:] == [EMPTY, EMPTY]
    assert len(order) == 12


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    order, same = Order(50, 1, seed=3), Order(50, 8, seed=3)
    first = list(order)
    torch.rand(7)  # other randomness in between
    assert list(order) == first == list(same)[:50]
    order.set_epoch(1)
    assert list(order) != first
    assert list(Order(50, 1, seed=4)) != first


def test_held_out_rows_do_not_depend_on_the_order_or_on_other_rows() -> None:
    rows = [{"id": f"row-{i}", "suite": "s", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]} for i in range(200)]
    _, held = split(Dataset.from_list(rows), 0.1)
    _, shuffled = split(Dataset.from_list(rows[::-1][:150]), 0.1)
    names = {held.table[i]["id"] for i in held.indices}
    assert 5 < len(names) < 40
    assert {shuffled.table[i]["id"] for i in shuffled.indices} == {
        n for n in names if int(n.removeprefix("row-")) >= 50
    }


def test_what_is_asked_decides_what_is_held_out_whatever_the_ids() -> None:
    rows = [
        {"id": f"a/{i}", "suite": "s", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "content": f"question {i}"}
        for i in range(100)
    ]
    numbered_anew = [{**row, "id": f"a/{i}"} for i, row in enumerate([{**rows[0], "content": "new"}, *rows])]
    held, later = (split(Dataset.from_list(given), 0.2)[1] for given in (rows, numbered_anew))
    asked = {held.table[i]["content"] for i in held.indices}
    assert 5 < len(asked) < 40
    assert {later.table[i]["content"] for i in later.indices} - {"new"} == asked


def test_no_row_is_both_trained_on_and_held_out() -> None:
    rows = [{"id": f"row-{i}", "suite": "s", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]} for i in range(50)]
    training, held = split(Dataset.from_list(rows), 0.3)
    assert sorted(training.indices + held.indices) == list(range(50))


def test_prompts_are_learned_on_request_but_never_held_out() -> None:
    rows = [{"id": f"row-{i}", "suite": "s", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 0, 1]} for i in range(50)]
    training, held = split(Dataset.from_list(rows), 0.3, prompts=True)
    assert training[0]["labels"] == [IGNORED, IGNORED, 7, 8]
    assert held[0]["labels"] == [IGNORED, IGNORED, IGNORED, 8]


@pytest.mark.parametrize("masks", [[0, 0, 0], [1, 1, 0]])
def test_data_without_a_response_is_an_error_that_says_so(masks: list[int]) -> None:
    with pytest.raises(BadInputError, match="of 1 rows 0 have a response"):
        split(table(([1, 2, 3], masks)), 0.0)


def test_token_counts_are_of_learned_tokens_only() -> None:
    counted = token_counts(Rows(table(([1, 1, 2, 3], [0, 0, 1, 1]), ([4, 4, 3], [0, 0, 1])), [0, 1]), 6)
    assert counted.tolist() == [0, 0, 1, 2, 0, 0]


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    rows: Any = Rows(table(([1, 1, 9], [0, 0, 1])), [0])
    with pytest.raises(IncompatibleError, match="token 9, the target's vocabulary has 6"):
        token_counts(rows, 6)


def test_a_float32_target_may_run_in_less_its_output_embedding_never_does(target: Target) -> None:
    inputs = collate([{"index": 0, "input_ids": [1, 2, 3, 4], "labels": [IGNORED, IGNORED, 3, 4]}])
    own, less = OnlineBatches(target, (1,)).of(inputs), OnlineBatches(target, (1,), torch.bfloat16).of(inputs)
    assert own.hidden is not None
    assert less.hidden is not None
    assert not torch.equal(own.last, less.last)
    torch.testing.assert_close(less.hidden, own.hidden, rtol=0.05, atol=0.05, check_dtype=False)
    assert target.lm_head(less.last).dtype == torch.float32
