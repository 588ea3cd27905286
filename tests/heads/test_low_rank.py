"""A low-rank change of a drafter: it learns nothing else, drafts as a plain one, and peft reads what it saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.common import BadInputError, IncompatibleError
from outrider.heads import Drafter, LowRank, Ngram, load_drafter, restore_drafter
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from ..conftest import drafter_in_training
from .conftest import batch, sequences


@pytest.fixture(params=[{"type": "eagle3", "steps": 2}, {"type": "medusa", "num_heads": 2}], ids=str)
def saved(request: pytest.FixtureRequest, tiny_target: Target, tmp_path: Path) -> Path:
    drafter_in_training(tiny_target, request.param).save(tmp_path / "saved")
    return tmp_path / "saved"


def loss(target: Target, drafter: Drafter) -> Tensor:
    return drafter.loss(batch(target, drafter, sequences(2, 12, 300))).total


def moved(drafter: LowRank) -> LowRank:
    for weight in drafter.up:
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(1))
    return drafter


def test_a_new_change_changes_nothing(saved, tiny_target):
    base, changed = load_drafter(saved, tiny_target), LowRank.over(saved, tiny_target, 4)
    assert torch.equal(loss(tiny_target, base), loss(tiny_target, changed))
    assert LowRank.over(saved, tiny_target, 4).plain().digest() == base.digest()


def test_only_the_change_learns(saved, tiny_target):
    changed = moved(LowRank.over(saved, tiny_target, 4))
    loss(tiny_target, changed).backward()
    learning = {name for name, p in changed.named_parameters() if p.requires_grad}
    assert {name.partition(".")[0] for name in learning} == {"down", "up"}
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in changed.parameters() if p.requires_grad)
    assert 2 * sum(p.numel() for p in changed.down) < sum(p.numel() for p in changed.base.parameters())


@both_precisions
def test_what_learns_is_what_drafts(saved, tiny_target, tmp_path):
    """Saved and loaded to draft it is a plain drafter of the base's type, with the same loss."""
    changed = moved(LowRank.over(saved, tiny_target, 4))
    expected = loss(tiny_target, changed)
    changed.save(tmp_path / "changed")
    plain = load_drafter(tmp_path / "changed", tiny_target)
    assert type(plain) is type(restore_drafter(saved))
    assert_same(loss(tiny_target, plain), expected)
    again = restore_drafter(tmp_path / "changed")
    assert isinstance(again, LowRank)
    assert all(torch.equal(w, again.state_dict()[n]) for n, w in changed.state_dict().items())


def test_the_base_is_saved_as_it_was(saved, tiny_target, tmp_path):
    """So that a registry stores it once for all the changes of it."""
    moved(LowRank.over(saved, tiny_target, 4)).save(tmp_path / "changed")
    for file in saved.iterdir():
        assert (tmp_path / "changed" / "base" / file.name).read_bytes() == file.read_bytes()


@both_precisions
def test_peft_reads_it(saved, tiny_target, tmp_path):
    """The same drafter comes of peft's own injection and merge."""
    moved(LowRank.over(saved, tiny_target, 4)).save(tmp_path / "changed")
    config = LoraConfig(**json.loads((tmp_path / "changed" / "adapter_config.json").read_text()))
    base = restore_drafter(saved)
    inject_adapter_in_model(config, base)
    weights = load_file(tmp_path / "changed" / "adapter_model.safetensors")
    short = {name.removeprefix("base_model.model."): weight for name, weight in weights.items()}
    found = set_peft_model_state_dict(base, short)
    assert not found.unexpected_keys
    layers = [module for module in base.modules() if hasattr(module, "merge")]
    for layer in layers:
        layer.merge()
    merged = {name.replace(".base_layer", ""): w for name, w in base.state_dict().items() if "lora_" not in name}
    ours = load_drafter(tmp_path / "changed").state_dict()
    assert len(layers) == len(weights) // 2
    assert_same(merged, ours, sums=4 + 1)  # of the rank, and the weight


def test_a_change_of_the_same_rank_goes_on_and_of_another_begins_anew(saved, tiny_target, tmp_path):
    moved(LowRank.over(saved, tiny_target, 4)).save(tmp_path / "changed")
    assert all(up.abs().sum() > 0 for up in LowRank.over(tmp_path / "changed", tiny_target, 4).up)
    other = LowRank.over(tmp_path / "changed", tiny_target, 2)
    assert all(up.abs().sum() == 0 for up in other.up)
    assert other.base.digest() == restore_drafter(saved).digest()


def test_what_cannot_be_changed_is_refused(saved, tiny_target, tmp_path):
    with pytest.raises(BadInputError, match="rank must be at least 1"):
        LowRank.over(saved, tiny_target, 0)
    with pytest.raises(BadInputError, match="larger than rank"):
        LowRank.over(saved, tiny_target, 100_000)
    Ngram().save(tmp_path / "ngram")
    with pytest.raises(BadInputError, match="has no weights"):
        LowRank.over(tmp_path / "ngram", tiny_target, 4)
    moved(LowRank.over(saved, tiny_target, 4)).save(tmp_path / "changed")
    adapter = tmp_path / "changed" / "adapter_model.safetensors"
    weights = load_file(adapter)
    save_file({name: weight.to(torch.int8) for name, weight in weights.items()}, adapter)
    with pytest.raises(IncompatibleError, match="or of another shape or type"):
        load_drafter(tmp_path / "changed", tiny_target)
    save_file(weights, adapter)
    config = tmp_path / "changed" / "config.json"
    config.write_text(config.read_text().replace('"rank": 4', '"rank": 5'))
    with pytest.raises(IncompatibleError, match="does not fit its base drafter"):
        load_drafter(tmp_path / "changed", tiny_target)
    (tmp_path / "changed" / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(BadInputError, match="damaged"):
        load_drafter(tmp_path / "changed", tiny_target)
