"""A drafter that engines may spread gives the same loss, and its optimizer's state has the names of its weights.

What only real processes show is in test_launches.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.heads import DraftModel, DraftModelConfig, Eagle3, Eagle3Config, TargetBatch
from outrider.targets import Target
from outrider.train.parts import Parts, Undivided, loss_of
from outrider.train.states import WholeStates, is_named, read_state


def head(target: Target, seed: int = 0, **changes: int) -> Eagle3:
    torch.manual_seed(seed)
    config = Eagle3Config(**{"steps": 2, "draft_vocab_size": 96} | changes)
    counts = torch.arange(target.vocab_size)
    return Eagle3.build(config, target, counts).train()


def batch(target: Target, drafter: Eagle3) -> TargetBatch:
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = target.forward(tokens, taps=drafter.taps)
    return TargetBatch(target, tokens, torch.ones_like(tokens, dtype=torch.bool), out.hidden, out.last)


def test_the_loss_its_metrics_and_its_gradients_are_the_drafters(target: Target) -> None:
    plain, spread = head(target), head(target)
    expected, found = plain(batch(target, plain)), loss_of(Parts(spread)(batch(target, spread)))
    assert torch.equal(found.total, expected.total)
    assert found.count == expected.count
    assert found.metrics.keys() == expected.metrics.keys()
    assert all(
        torch.equal(a, b) for n in expected.metrics for a, b in zip(found.metrics[n], expected.metrics[n], strict=True)
    )
    expected.total.backward(), found.total.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), spread.parameters(), strict=True))


def test_the_whole_drafter_is_a_copy_and_takes_the_weights_of_another(target: Target) -> None:
    parts, other = Parts(head(target)), head(target, seed=1)
    parts.take(other)
    copied = parts.whole()
    assert copied.digest() == other.digest()
    assert copied.training
    with torch.no_grad():
        next(iter(copied.parameters())).zero_()
    assert parts.whole().digest() == other.digest()
    assert parts.sizes() == Undivided(other).sizes()


def test_tied_weights_stay_tied_in_a_copy(target: Target) -> None:
    config = DraftModelConfig(model={"num_hidden_layers": 1, "tie_word_embeddings": True})
    copied = Parts(DraftModel.build(config, target)).whole()
    assert copied.model.get_input_embeddings().weight is copied.model.get_output_embeddings().weight


def test_weights_of_other_shapes_are_refused(target: Target) -> None:
    with pytest.raises(RuntimeError, match=r"Other names or shapes: lm_head\.weight, token_ids"):
        Parts(head(target)).take(head(target, draft_vocab_size=64))


def test_a_state_by_names_continues_a_whole_drafter(target: Target, tmp_path: Path) -> None:
    """And one by numbers, as torch writes it, is what it was."""
    drafter, again = head(target), head(target)
    optimizer = stepped(drafter, target)
    saved = optimizer.state_dict()
    torch.save(saved, tmp_path / "optimizer.pt")
    assert not is_named(tmp_path)
    names = [name for name, _ in drafter.named_parameters()]
    named = {
        "state": {names[number]: values for number, values in saved["state"].items()},
        "param_groups": [{**group, "params": [names[n] for n in group["params"]]} for group in saved["param_groups"]],
    }
    for state in (saved, named):
        torch.save(state, tmp_path / "optimizer.pt")
        fresh = torch.optim.AdamW(again.parameters())
        read_state(WholeStates(again, fresh), tmp_path)
        found = fresh.state_dict()["state"]
        assert found.keys() == saved["state"].keys()
        assert all(torch.equal(found[n]["exp_avg"], saved["state"][n]["exp_avg"]) for n in found)
    assert is_named(tmp_path)


def stepped(drafter: Eagle3, target: Target) -> torch.optim.Optimizer:
    """An optimizer that has taken a step."""
    optimizer = torch.optim.AdamW(drafter.parameters())
    drafter(batch(target, drafter)).total.backward()
    optimizer.step()
    return optimizer
