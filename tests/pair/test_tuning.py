"""Tuned plans live in pair.json: sealed like everything else there, and no part of what the pair is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from outrider.common import BadInputError
from outrider.common.machine import device_name
from outrider.decode import Control, Costs, Decoder, Plan
from outrider.eval.tuning_record import Tuning
from outrider.heads import Fusion
from outrider.pair import Pair, verify
from outrider.pair.manifest import Manifest, ServedRecord

from ..eval.conftest import make_tuning as tuning_of
from .conftest import measured_at


@pytest.fixture
def make_tuning(make_target) -> Callable[..., Tuning]:
    """`make_tuning({batch size: depth}, **changes)`: controlled chains for this machine."""
    return partial(tuning_of, device_name=device_name(make_target().device))


def test_tuning_changes_neither_identity_nor_integrity(make_pair, make_tuning):
    pair = make_pair("ngram")
    tuned = pair.store_tuning(make_tuning({1: 4}))
    again = Pair.load(pair.folder)
    assert again == tuned
    assert again.digest == pair.digest
    assert again.plan == pair.plan
    assert verify(pair.folder) == []


def test_an_altered_tuning_is_found(make_pair, make_tuning):
    file = make_pair("ngram").store_tuning(make_tuning({1: 4})).folder / "pair.json"
    file.write_text(file.read_text().replace("0.0100001", "0.0100002"))
    assert any("checksum" in line for line in verify(file.parent))


def test_the_plan_comes_back_for_this_machine_with_its_controller(make_pair, make_tuning, make_target):
    pair = make_pair("ngram").store_tuning(make_tuning({2: 4, 8: 3}))
    control = Control(Costs(((0, 0.0100001), (8, 0.02)), (0.0, 0.001), 0.0005), (0.5, 0.25), 16.0)
    found = [Pair.load(pair.folder).tuned(make_target(), size) for size in (1, 2, 7, 8, 64)]
    plans = [tuning and tuning.plan for tuning in found]
    assert plans == [None, *[Plan(4, control=control)] * 2, *[Plan(3, control=control)] * 2]


def test_another_machine_or_dtype_has_no_plan(make_pair, make_tuning, make_target):
    pair = make_pair("ngram").store_tuning(make_tuning({1: 4}, device_name="another"))
    pair = pair.store_tuning(make_tuning({1: 4}, dtype="bfloat16"))
    assert pair.tuned(make_target()) is None
    assert len(pair.manifest.tuning) == 2


def test_tuning_again_replaces_what_was_known(make_pair, make_tuning, make_target):
    pair = make_pair("ngram")
    for depths in ({1: 4, 8: 2}, {1: 6}):
        pair = Pair.load(pair.folder).store_tuning(make_tuning(depths))
    assert [[b.batch_size for b in t.batches] for t in pair.manifest.tuning] == [[8], [1]]
    assert pair.tuned(make_target()).plan.depth == 6


def served(engine: str, depth: int, agrees: bool = True) -> ServedRecord:
    return ServedRecord(created="2031-01-01", engine=engine, depth=depth, agrees=agrees, suspicions=[], figures=[])


def test_what_an_engine_made_of_the_pair_is_kept_once_for_each_engine_and_depth(make_pair):
    pair = make_pair("ngram")
    for record in (served("vllm", 4), served("vllm", 2), served("llama.cpp", 4), served("vllm", 4, agrees=False)):
        stored = Pair.load(pair.folder).store_served(record)
    again = Pair.load(pair.folder)
    assert again == stored
    kept = [(r.engine, r.depth, r.agrees) for r in again.manifest.served]
    assert kept == [("vllm", 2, True), ("llama.cpp", 4, True), ("vllm", 4, False)]
    assert again.digest == pair.digest
    assert verify(pair.folder) == []


def test_a_manifest_that_somebody_else_wrote_meanwhile_is_never_replaced(make_pair, make_tuning, monkeypatch):
    """On a disk without locks the second writer notices when it writes."""
    pair = make_pair("ngram")
    other = Pair.load(pair.folder)
    changed = Manifest.tuned

    def late(manifest: Manifest, tuning: Tuning) -> Manifest:
        monkeypatch.undo()
        other.store_served(served("vllm", 4))
        return changed(manifest, tuning)

    monkeypatch.setattr(Manifest, "tuned", late)
    said = r"pair\.json was written by somebody else at the same time; nothing was stored"
    with pytest.raises(BadInputError, match=said):
        pair.store_tuning(make_tuning({1: 4}))
    assert [r.engine for r in Pair.load(pair.folder).manifest.served] == ["vllm"]


def test_another_pair_in_the_same_folder_is_left_alone(make_pair, make_tuning, tmp_path):
    first, other = make_pair("ngram"), make_pair("eagle3", tmp_path / "other")
    (first.folder / "pair.json").write_text((other.folder / "pair.json").read_text())
    with pytest.raises(BadInputError, match="another pair by now"):
        first.store_tuning(make_tuning({1: 4}))
    assert Pair.load(first.folder, check=False).manifest.tuning == []


def test_a_new_measurement_of_the_same_pair_keeps_the_tuning(make_pair, make_tuning, recipe):
    make_pair("ngram").store_tuning(make_tuning({1: 4}))
    pair = make_pair("ngram", recipe=measured_at(recipe, repeats=2))
    assert len(pair.manifest.tuning) == 1
    assert verify(pair.folder) == []


def test_a_recipes_static_tree_becomes_the_pairs_plan(make_pair, recipe):
    pair = make_pair("draft_model", recipe=measured_at(recipe, tree=[-1, -1, 0]), calibration=[])
    assert (pair.plan.tree.parents, pair.plan.depth) == ((-1, -1, 0), 2)


def test_a_tuned_fusion_is_opened_with_the_pairs_own_drafter(make_pair, make_tuning, make_target):
    """The record says what drafts beside it; whoever opens the pair as tuned gets both, and the target's own text."""
    pair = make_pair("eagle3")
    assert pair.open_tuned(make_target())[1].name == "eagle3", "never tuned: as it is"
    tuning = make_tuning({1: 3})
    fused = tuning.batches[0].chosen.model_copy(
        update={"statistical": {"type": "ngram", "min_match": 2}, "weight": None}
    )
    batch = tuning.batches[0].model_copy(update={"chosen": fused, "candidates": [fused]})
    pair = pair.store_tuning(tuning.model_copy(update={"batches": [batch]}))
    target, drafter, plan = Pair.load(pair.folder).open_tuned(make_target())
    assert isinstance(drafter, Fusion)
    assert (drafter.statistical.name, drafter.model.name, plan) == ("ngram", "eagle3", Plan(3))
    assert pair.open(target)[1].name == "eagle3"
    assert verify(pair.folder) == []
    prompt = [[1, 2, 3, 1, 2, 3, 1, 2]]
    drafted = Decoder(target, drafter).generate(prompt, 12, plan=plan)
    assert drafted.tokens == Decoder(target).generate(prompt, 12).tokens


def test_what_was_not_tuned_is_not_mentioned(make_pair, make_tuning):
    pair = make_pair("ngram")
    assert "tuning" not in (pair.folder / "pair.json").read_text()
    pair.store_tuning(make_tuning({1: 4}))
    assert "statistical" not in (pair.folder / "pair.json").read_text(), "a plan without a fusion is written as before"


def test_many_stores_at_once_are_all_kept(make_pair, make_tuning):
    pair = make_pair("ngram")
    made = [make_tuning({1: 4}, device_name=f"machine {n}") for n in range(12)]
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(pair.store_tuning, made))
    assert {t.device_name for t in Pair.load(pair.folder).manifest.tuning} == {t.device_name for t in made}
    assert verify(pair.folder) == []
