"""The record of a tuning: what replaces what, which plan is nearest, and that a stored plan is the measured one."""

from __future__ import annotations

from outrider.costs.round_timing import RoundTimes
from outrider.decode import Control, Costs, Plan, Tree
from outrider.eval.tuner import Option
from outrider.eval.tuning_record import merged, nearest

from .conftest import make_tuning

TREE = Plan(tree=Tree((-1, -1, 0)))


def test_a_new_tuning_replaces_what_it_measured_again():
    known = [
        make_tuning({1: 1, 4: 4}),
        make_tuning({1: 1, 4: 4}, device_name="a GPU"),
        make_tuning({1: 1, 4: 4}, temperature=1.0),
    ]
    found = merged(known, make_tuning({4: 4, 8: 8}))
    assert [(t.device_name, t.temperature, [b.batch_size for b in t.batches]) for t in found] == [
        ("a CPU", 0.0, [1]),
        ("a GPU", 0.0, [1, 4]),
        ("a CPU", 1.0, [1, 4]),
        ("a CPU", 0.0, [4, 8]),
    ]
    assert len(merged(found[:1], make_tuning({1: 1, 2: 2}))) == 1


def test_the_nearest_batch_size_below_is_used_and_then_the_nearest_temperature():
    known = [
        make_tuning({1: 1, 4: 4}),
        make_tuning({1: 1}, temperature=1.0),
        make_tuning({16: 16}, device_name="a GPU"),
    ]

    def depth(machine: str, size: int, temperature: float = 0.0) -> int | None:
        found = nearest(known, (machine, "float32"), size, temperature)
        return None if found is None else found.plan.depth

    assert [depth("a CPU", size) for size in (1, 3, 4, 99)] == [1, 1, 4, 4]
    assert nearest(known, ("a CPU", "float32"), 1, 0.7) == known[1].batches[0]
    assert depth("a GPU", 8) is None
    assert depth("a TPU", 8) is None
    assert nearest(known, ("a CPU", "bfloat16"), 8, 0.0) is None


def test_the_stored_plan_is_the_one_that_was_measured():
    batch = make_tuning({3: 3}).batches[0]
    costs = Costs(((0, 0.0100001), (8, 0.02)), (0.0, 0.001), 0.0005)
    assert batch.plan == Plan(3, control=Control(costs, (0.5, 0.25), 16.0))
    tree = batch.chosen.model_copy(update={"plan": {"depth": 2, "tree": [-1, -1, 0]}, "weight": None})
    assert tree.restored(batch.costs, batch.rates) == TREE
    assert Option(batch.plan, 2.0, RoundTimes(0, 0.01), 100.0).name == "depth up to 3"
    assert str(batch) == "depth up to 3: 1.50× the plain target's speed"
