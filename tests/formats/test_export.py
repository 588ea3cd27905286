"""A pair leaves for an engine: read back as that engine reads it, it drafts what it drafted here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.formats import export_drafter
from outrider.ground import BadInputError, IncompatibleError
from outrider.heads import Eagle3, Eagle3Config
from outrider.targets import Target


@pytest.fixture
def target(tiny_llama: Callable) -> Target:
    return Target(tiny_llama(layers=6))


def eagle3(target: Target, **changes: Any) -> Eagle3:
    """A head whose every weight is random, norms included."""
    torch.manual_seed(0)
    counts = torch.arange(target.vocab_size)
    head = Eagle3.build(Eagle3Config(**{"taps": (1, 3, 5), "draft_vocab_size": 20} | changes), target, counts)
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head.eval()


VARIANTS = [
    {},
    {"norm_taps": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
    {"norm_taps": True, "num_layers": 2, "draft_vocab_size": 0},
    {"taps": (1, 4), "norm_output": True, "num_attention_heads": 2, "head_dim": 16},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_an_eagle3_export_read_back_as_the_engine_reads_it_has_its_logits(
    target: Target, tmp_path: Path, to: str, changes: dict[str, Any]
) -> None:
    made = export_drafter(eagle3(target, **changes), target, to, tmp_path / "out", 3)
    assert made.difference < 1e-4
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"taps": (4, 2, 1)}, r"taps: \[4, 2, 1\].*nearest that can be served: taps: \[1, 2, 4\]"),
        ({"taps": (1, 3, 6)}, r"taps: \[1, 3, 6\].*nearest that can be served: taps: \[1, 3, 5\]"),
    ],
)
def test_what_an_engine_lacks_is_refused_with_the_nearest_setting(
    target: Target, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(IncompatibleError, match=words):
        export_drafter(eagle3(target, **changes), target, "vllm", tmp_path / "out", 3)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(target: Target, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    with pytest.raises(BadInputError, match="not empty"):
        export_drafter(eagle3(target), target, "vllm", tmp_path / "out", 3)
    assert (tmp_path / "out" / "precious").read_text() == "kept"


def test_an_unknown_engine_is_refused_with_the_known_ones(target: Target, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="unknown format or engine 'vlm'; known: vllm"):
        export_drafter(eagle3(target), target, "vlm", tmp_path / "out", 3)
