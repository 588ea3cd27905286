"""A target whose layers are split over two processes is the same target: in passes, responses, and what is learned.

Both processes are real, on a CPU. Where one process works alone while the other takes part in its passes, a mistake
would hang: so would these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import debug_launcher
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError
from outrider.distill.data_set import load_responses
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import train

from ..closeness import EXACT
from .conftest import MakeRecipe, history, of_stored, require_same_drafter, train_in_two, trainings_in_float64
from .test_recipes import write_checkpoint


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable[..., Any], tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    ends = {"eos_token_id": tiny_tokenizer.eos_token_id, "pad_token_id": tiny_tokenizer.pad_token_id}
    tiny_llama(vocab=len(tiny_tokenizer), **ends).save_pretrained(made)
    tiny_tokenizer.save_pretrained(made)
    return made


def has_equal_passes(folder: Path) -> None:
    """In each of two processes."""
    from torch import distributed

    rank, whole = distributed.get_rank(), Target.load(folder, device="cpu")
    part = Target.load(folder, device="cpu", sharding="fsdp2")
    assert part.sharded
    assert part.fingerprint() == whole.fingerprint()
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in part.model.parameters())
    layers, every = (sum(p.numel() for p in m.parameters()) for m in (whole.body.layers, whole.model))
    assert held == pytest.approx(every - layers / 2, rel=0.01)
    for length in (9 + rank, 4, 7 - rank):  # rows of their own, of other lengths
        tokens = torch.randint(0, 64, (2 + rank, length), generator=torch.Generator().manual_seed(rank + length))
        with torch.no_grad():
            found, expected = part.forward(tokens, taps=(1, 2, 4)), whole.forward(tokens, taps=(1, 2, 4))
        assert torch.equal(found.hidden, expected.hidden)
        assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_each_process_holds_half_of_every_layer_and_passes_are_bit_for_bit_those_of_the_whole(
    name, tmp_path, tiny_tokenizer
):
    """Of the published architectures whose recipes split them."""
    write_checkpoint(name, tmp_path, tiny_tokenizer)
    debug_launcher(has_equal_passes, (tmp_path,), num_processes=2)


PRUNED = {"type": "draft_model", "init": "prune", "model": {"num_hidden_layers": 1}}


@pytest.mark.parametrize("drafter", [PRUNED, {"type": "self_speculative", "exit_layer": 2}], ids=str)
def test_what_needs_the_layers_themselves_is_refused(sharded, drafter):
    recipe = sharded("no").model_copy(update={"drafter": drafter})
    with pytest.raises(BadInputError, match=r"target.sharding is 'fsdp2', but .* whole layers"):
        train(recipe)


@pytest.fixture
def sharded(recipe: MakeRecipe, folder: Path, tmp_path: Path) -> MakeRecipe:
    prompts = tmp_path / "asked.txt"
    prompts.write_text("def add(\nclass Stack:\nfor name in\nreturn\nprint(\nThe target\n" * 2)
    asked = {"prompts": [str(prompts)], "responses": None, "max_new_tokens": 12, "batch_size": 5, "holdout": 0.3}

    def make(name: str, data: dict[str, Any] | None = None, **training: Any) -> Recipe:
        head = {"type": "eagle3", "steps": 2, "draft_vocab_size": 96}
        made = of_stored(recipe(name, head, asked | (data or {}), max_steps=4, eval_steps=2, **training), folder)
        return made.model_copy(update={"target": made.target.model_copy(update={"sharding": "fsdp2"})})

    return make


@pytest.mark.parametrize("features", ["online", "cached"])
def test_two_processes_with_half_a_target_each_train_as_one_with_the_whole(sharded, features):
    """The first answers, and computes what is cached, while the other takes part; they leave the same drafter."""
    one = sharded("one", per_device_train_batch_size=4, data={"features": features})
    two = sharded("two", per_device_train_batch_size=2, data={"features": features})
    with trainings_in_float64():
        train(one)
        train_in_two(two)
    responses = [load_responses(r.output_folder / "data")["input_ids"] for r in (one, two)]
    assert responses[0] == responses[1]
    for key in ("loss", "eval_loss"):
        assert len(history(one, key)) >= 2
        assert history(two, key) == pytest.approx(history(one, key), rel=EXACT)
    require_same_drafter(one, two)
