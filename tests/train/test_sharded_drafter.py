"""A drafter that engines may spread gives the same loss, and its optimizer's state has the names of its weights.

What only real processes show is in test_launches.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.heads import Drafter, DraftModel, Eagle3, TargetBatch, drafter_config
from outrider.targets import Target
from outrider.train import optimizer_state
from outrider.train.optimizer_state import WholeStates, is_named, read_schedule, read_state, remove_empty_groups
from outrider.train.sharded_drafter import ShardedDrafter, WholeDrafter, _fit_fsdp, loss_of

from ..heads.conftest import batch as all_of
from ..heads.conftest import sequences
from .conftest import built


def head(target: Target, seed: int = 0, frequent_first: bool = False, size: int = 96) -> Eagle3:
    torch.manual_seed(seed)
    drafter_class, config = drafter_config({"type": "eagle3", "steps": 2, "draft_vocab_size": size})
    counts = torch.arange(target.vocab_size)
    drafter = drafter_class.build(config, target, counts.flip(0) if frequent_first else counts)
    assert isinstance(drafter, Eagle3)
    return drafter.train()


def batch(target: Target, drafter: Drafter) -> TargetBatch:
    return all_of(target, drafter, sequences(2, 12))


def test_the_loss_its_metrics_and_its_gradients_are_the_drafters(target):
    plain, spread = head(target), head(target)
    expected, found = plain(batch(target, plain)), loss_of(ShardedDrafter(spread)(batch(target, spread)))
    assert torch.equal(found.total, expected.total)
    assert found.count == expected.count
    assert found.metrics.keys() == expected.metrics.keys()
    assert all(
        torch.equal(a, b) for n in expected.metrics for a, b in zip(found.metrics[n], expected.metrics[n], strict=True)
    )
    expected.total.backward(), found.total.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), spread.parameters(), strict=True))


def test_the_whole_drafter_is_a_copy_and_takes_the_weights_of_another(target):
    parts, other = ShardedDrafter(head(target)), head(target, seed=1, frequent_first=True)
    assert not torch.equal(parts.drafter.token_ids, other.token_ids)
    parts.take(other)
    copied = parts.whole()
    assert copied.digest() == other.digest()
    assert copied.training
    with torch.no_grad():
        next(iter(copied.parameters())).zero_()
    assert parts.whole().digest() == other.digest()
    assert parts.sizes() == WholeDrafter(other).sizes()


def test_layers_pass_on_what_autocast_gives_them(target):
    """FSDP2 would round the residual stream to bfloat16 between the layers of a draft model."""
    plugin, drafter = SimpleNamespace(), built(target, type="draft_model", model={"num_hidden_layers": 2})
    _fit_fsdp(plugin, ShardedDrafter(drafter, torch.bfloat16))
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    assert not plugin.mixed_precision_policy.cast_forward_inputs
    assert plugin.transformer_cls_names_to_wrap


def test_a_loss_that_reads_weights_outside_of_their_layers_has_the_drafter_gathered_as_one(target):
    plugin = SimpleNamespace()
    drafter = built(target, type="pard", model={"num_hidden_layers": 2}, mask_token_id=319)
    _fit_fsdp(plugin, ShardedDrafter(drafter))
    assert plugin.transformer_cls_names_to_wrap == []


def test_tied_weights_stay_tied_in_a_copy(target):
    sizes = {"num_hidden_layers": 1, "tie_word_embeddings": True}
    copied = ShardedDrafter(built(target, type="draft_model", model=sizes)).whole()
    assert isinstance(copied, DraftModel)
    assert copied.model.get_input_embeddings().weight is copied.model.get_output_embeddings().weight


def test_weights_of_other_shapes_are_refused(target):
    with pytest.raises(RuntimeError, match=r"Other names or shapes: lm_head\.weight, token_ids"):
        ShardedDrafter(head(target)).take(head(target, size=64))


def test_a_state_by_names_continues_a_whole_drafter(target, tmp_path):
    """And one by numbers, as torch writes it, is what it was."""
    drafter, again = head(target), head(target)
    optimizer = stepped(drafter, target)
    saved = optimizer.state_dict()
    torch.save(saved, tmp_path / "optimizer.pt")
    assert not is_named(tmp_path)
    for state in (saved, named(optimizer, drafter)):
        torch.save(state, tmp_path / "optimizer.pt")
        fresh = torch.optim.AdamW(again.parameters())
        read_state(WholeStates(again, fresh), tmp_path)
        found = fresh.state_dict()["state"]
        assert found.keys() == saved["state"].keys()
        assert all(torch.equal(found[n]["exp_avg"], saved["state"][n]["exp_avg"]) for n in found)
    assert is_named(tmp_path)


def named(optimizer: torch.optim.Optimizer, drafter: Drafter) -> dict[str, Any]:
    """Return the state of an optimizer as a launch in parts writes it."""
    saved, names = optimizer.state_dict(), [name for name, _ in drafter.named_parameters()]
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[n]: values for n, values in saved["state"].items()}, "param_groups": groups}


def grouped(drafter: Drafter) -> torch.optim.Optimizer:
    """An optimizer as the trainer makes it: the second group, without decay, is for norms and biases."""
    parameters = list(drafter.parameters())
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == decays]} for decays in (True, False)]
    return torch.optim.AdamW([groups[0], groups[1] | {"weight_decay": 0.0}], lr=1e-3, weight_decay=0.1)


def test_a_drafter_without_norms_and_biases_has_no_group_for_them_in_any_launch(target, tmp_path):
    """DeepSpeed keeps no group without weights: state, rates and schedule pass from launch to launch."""
    one, two = (built(target, type="medusa", num_heads=2).train() for _ in range(2))
    first, other = grouped(one), grouped(two)
    for optimizer in (first, other):
        remove_empty_groups(optimizer)
        assert [len(group["params"]) > 0 for group in optimizer.param_groups] == [True]
    stepped(one, target, first)
    left, schedule = (torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step) for o in (first, other))
    first.step(), left.step(), left.step()
    torch.save(named(first, one), tmp_path / optimizer_state.OPTIMIZER)
    torch.save(left.state_dict(), tmp_path / optimizer_state.SCHEDULE)
    read_state(WholeStates(two, other), tmp_path)
    read_schedule(schedule, other, tmp_path)
    assert {group["lr"] for group in other.param_groups} == {0.25e-3}
    schedule.step()
    saved, found = (list(o.state_dict()["state"].values()) for o in (first, other))
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(saved, found, strict=True))


def test_settings_of_groups_follow_the_names_of_their_weights(target):
    """And not their places."""
    drafter = head(target)
    optimizer = grouped(drafter)
    matrices, others = (
        [n for n, p in drafter.named_parameters() if (p.ndim > 1) == decays] for decays in (True, False)
    )
    stepped(drafter, target, optimizer)
    own = optimizer.state_dict()["param_groups"]
    groups = [{**own[1], "params": others, "lr": 0.1}, {**own[0], "params": matrices, "lr": 0.2}]
    states = WholeStates(drafter, optimizer)
    states.spread({"state": {}, "param_groups": groups})
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
    assert states.groups == [matrices, others]


def stepped(drafter: Drafter, target: Target, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.AdamW(drafter.parameters())
    drafter(batch(target, drafter)).total.backward()
    optimizer.step()
    return optimizer
