"""`outrider lab grow`: folders that other programs read, and errors before anything is made."""

from __future__ import annotations

import json

import pytest
import torch

from outrider.common.locks import lock_file
from outrider.heads import Eagle3, Eagle3Config, load_drafter
from outrider.targets import Target

from ..closeness import assert_same, terms
from ..scripts.conftest import Command, failed, succeeded

SIZES = ["hidden_size=1024", "num_hidden_layers=13", "intermediate_size=768", "vocab_size=5000"]


@pytest.fixture(scope="module")
def embedded() -> Target:
    return Target.load("embedded", device="cpu", dtype="float32")


def test_target_and_drafter_are_read_again_and_compute_the_same(outrider: Command, embedded, tmp_path):
    head = Eagle3.build(Eagle3Config(draft_vocab_size=300), embedded, torch.randperm(embedded.vocab_size))
    head.save(tmp_path / "head")
    out = tmp_path / "grown"
    options = ["--like", "0.4b", "--out", str(out), "--drafter", str(tmp_path / "head"), "--draft-vocab", "400"]
    said = succeeded(outrider("lab", "grow", "embedded", *options, "--dtype", "float32", *SIZES)).stdout
    assert "LlamaForCausalLM" in said
    grown = Target.load(out, device="cpu")
    tokens = torch.tensor([embedded.require_tokenizer()("def add(first, second):")["input_ids"]])
    after, before = grown.forward(tokens).logits, embedded.forward(tokens).logits
    assert_same(after[..., : embedded.vocab_size], before, terms(grown.model), apart=5e-6)  # the epsilons of norms
    drafter = load_drafter(out / "drafter", grown)
    drafter.check(grown)
    assert drafter.output_ids is not None
    assert len(drafter.output_ids) == 400
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 13
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--like", "9b"], "no shape is called '9b'; there are llama-0.4b"),
        (["--like", "8b", "num_layers=3"], "did you mean 'num_hidden_layers'"),
        (["--like", "8b", "hidden_size=wide"], "expected KEY=VALUE with a whole number"),
        (["--like", "8b", "num_attention_heads=31"], "must be a multiple"),
    ],
)
def test_bad_shapes_are_refused_before_anything_is_made(outrider: Command, tmp_path, options, words):
    failed(outrider("lab", "grow", "embedded", "--out", str(tmp_path / "grown"), *options), words)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_left_alone(outrider: Command, tmp_path):
    """What a dead process left beside it goes."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "mine").write_text("kept")
    lock_file(own).touch()
    failed(
        outrider("lab", "grow", "embedded", "--like", "0.4b", "--out", str(own)), "is not empty; nothing was written"
    )
    assert [file.name for file in own.iterdir()] == ["mine"]
    assert list(tmp_path.iterdir()) == [own]
