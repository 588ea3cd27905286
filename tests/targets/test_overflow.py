"""Weights so large that a norm writes zeros: every logit is the same then, finite, and no text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common import BadInputError
from outrider.decode import Decoder
from outrider.heads import drafter_config, load_drafter
from outrider.targets import Target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"])
def test_a_target_whose_logits_are_all_the_same_is_refused(
    tiny_llama: Callable[..., Any], weight: str, dtype: torch.dtype
) -> None:
    model = tiny_llama().to(dtype)
    with torch.no_grad():
        model.get_parameter(weight).mul_(1e30)
    with pytest.raises(BadInputError, match=rf"the same for every token.* Its {weight} holds .*e\+2\d"):
        Decoder(Target(model)).generate([[1, 2, 3]], max_new_tokens=2)


def test_a_drafter_with_such_a_weight_is_refused_when_it_is_loaded(tiny_target: Target, tmp_path: Path) -> None:
    head, config = drafter_config({"type": "eagle3"})
    drafter = head.build(config, tiny_target, torch.arange(tiny_target.vocab_size))
    drafter.save(tmp_path / "good")
    load_drafter(tmp_path / "good", tiny_target)
    with torch.no_grad():
        name, weight = next(iter(drafter.named_parameters()))
        weight.fill_(3e38)
    drafter.save(tmp_path / "bad")
    with pytest.raises(BadInputError, match=rf"cannot be used. Its {name} holds 3.0e\+38"):
        load_drafter(tmp_path / "bad", tiny_target)
