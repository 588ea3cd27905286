"""The account of a training step's memory is that of a real step."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.grown import PRUNED
from benchmarks.training import Training, account, main, optimizer_of, random_batch
from outrider.costs.counting import Flops
from outrider.heads import Eagle3, Eagle3Config, losses
from outrider.lab.grow import shape_config
from outrider.targets import PeakBytes, Target
from outrider.targets.config_only import around_layers

ROWS, LENGTH, STEPS, OUTPUTS = 2, 300, 3, 500


def config(width: int) -> LlamaConfig:
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 4, "vocab_size": 700}
    return LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_predicted_peak_is_that_of_real_steps(width):
    """Within 5%; a real step's is counted from the first tensor on, and the second step has the optimizer's states."""
    found = account(config(width), OUTPUTS, STEPS, ROWS, LENGTH)
    model = AutoModelForCausalLM.from_config(config(width), dtype=torch.bfloat16).requires_grad_(False)
    target = Target(model)
    with PeakBytes() as measured, Flops() as flops:
        counts = torch.arange(target.vocab_size).float()
        head = Eagle3.build(Eagle3Config(draft_vocab_size=OUTPUTS, steps=STEPS), target, counts).train()
        training = Training(head, optimizer_of(head, target.device), random_batch(target, head, ROWS, LENGTH))
        training.step()
        training.step()
    around = sum(p.nbytes for p in around_layers(model))
    assert found["peak_bytes"] == pytest.approx(measured.peak + around, rel=0.05)
    assert found["flops"] == pytest.approx(flops.total / 2, rel=0.01)
    for part in ("kept", "at_peak"):
        total = found["bytes"]["kept" if part == "kept" else "step"]
        assert 0.8 * total < sum(one["bytes"] * one["count"] for one in found[part]) <= total


def test_specforges_geometry_takes_no_more_than_nine_gib_and_no_product_twice(monkeypatch):
    """Seven steps of 16,384 tokens. The least operations: of each product, its own and those of its two gradients."""
    monkeypatch.setitem(losses.CHUNKS, "cpu", losses.CHUNKS["cuda"])
    shape = shape_config("tinyllama-1.1b", num_hidden_layers=4)
    found = account(shape, PRUNED, 7, 8, 2048)
    assert found["peak_bytes"] < 9 * 2**30
    width, inner, queries = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads * shape.head_dim
    once = width * (queries + 2 * shape.num_key_value_heads * shape.head_dim)  # by an embedding, or by a state
    steps = 7 * (once + queries * width + 3 * inner * width + PRUNED * width) + once + 3 * width * width
    attention = 7 * 2048 * queries  # all scores and all results, the masked half included
    least = 2 * 16384 * (3 * (steps + 2 * attention) + PRUNED * width)
    assert found["flops"] < 1.15 * least


def test_the_account_of_every_geometry_is_one_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(losses.CHUNKS, "cpu", losses.CHUNK)
    main(["--account", "--steps", "2", "--rows", "1", "--lengths", "64", "--out", str(tmp_path / "account.json")])
    written = json.loads((tmp_path / "account.json").read_text())
    assert [one["hidden_size"] for one in written["geometries"].values()] == [2048, 4096, 8192, 4096, 256]
    assert len(capsys.readouterr().out.strip().splitlines()) == 2 + len(written["geometries"])
