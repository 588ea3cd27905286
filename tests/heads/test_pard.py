"""PARD: a draft model whose masks say, in one pass, what as many passes with masks appended would."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from outrider.common import BadInputError
from outrider.heads import DraftModel, DraftModelConfig, Pard, PardConfig, load_drafter
from outrider.heads.parallel.parallel_drafts import Rollouts
from outrider.targets import Target

from ..closeness import assert_same, both_precisions
from ..decode.conftest import random_model
from .conftest import VOCAB, batch, decoded_logits, entries_of, every, rolled
from .conftest import sequences as tokens_of

LAYERS = 4  # of the target
LENGTH = 20


@pytest.fixture(params=["llama", "qwen3"])
def drafter(request) -> Pard:
    model = random_model(request.param, {"num_hidden_layers": 2, "head_dim": 8})
    return Pard(model, PardConfig(steps=5, mask_token_id=63)).eval()


def sequences(rows: int = 3) -> Tensor:
    return tokens_of(rows, LENGTH, VOCAB - 1)


def passes(drafter: Pard, text: list[int], steps: int) -> Tensor:
    """The logits of the library's model after a text with 0, 1, …, steps − 1 masks appended, `[steps, V]`."""
    texts = [torch.tensor([text + [63] * masks]) for masks in range(steps)]
    return torch.stack([drafter.model(tokens, use_cache=False).logits[0, -1] for tokens in texts])


@both_precisions
@torch.inference_mode()
def test_a_pass_says_what_as_many_passes_of_the_library_say(drafter):
    tokens, masks = sequences(2), every(LENGTH, 5)
    logits = drafter.model.lm_head(drafter.roll(tokens, rolled(masks, 2, 16)))
    for row, place in product(range(2), (0, 3, 11, 19)):
        entries = [place] + [LENGTH + masks.index((place, d)) for d in range(1, 5)]
        expected = passes(drafter, tokens[row, : place + 1].tolist(), 5)
        assert_same(logits[row, entries], expected)


@both_precisions
@torch.inference_mode()
def test_the_decoder_says_the_same(target, drafter):
    tokens, starts = sequences(), [[1, 3, 4, 9], [5, 6, 9, 12], [2, 3, 6, 7]]
    for number, logits in enumerate(decoded_logits(drafter, target, tokens, starts, 5)):
        for row in range(3):
            expected = passes(drafter, tokens[row, : starts[row][number] + 1].tolist(), 5)
            found = torch.stack([logits[d][row] for d in range(5)])
            assert_same(found, expected)


@both_precisions
def test_one_draft_is_the_training_of_a_language_model(target, tiny_llama):
    model = tiny_llama(layers=2, seed=1)
    drafter = Pard(model, PardConfig(steps=1, mask_token_id=63, loss="forward_kl"))
    plain = DraftModel(model, DraftModelConfig(loss="forward_kl"))
    data = batch(target, drafter, sequences(1))
    mine, theirs = drafter.loss(data), plain.loss(data)
    assert_same(mine.total, float(theirs.total))
    assert mine.count == theirs.count


@both_precisions
def test_the_loss_is_a_mean_over_what_was_drawn(target, drafter):
    tokens, supervised = sequences(2), torch.zeros(2, LENGTH, dtype=torch.bool)
    supervised[0, 5:16] = supervised[1, 9:] = True
    found = drafter.loss(batch(target, drafter, tokens, supervised))
    learned, total = nn.functional.pad(supervised, (0, 1))[:, 1:], 0.0
    some = Rollouts.drawn(learned, tokens, 5, 0.7, 0.2)
    logits, own = target.model(tokens).logits, drafter.model.lm_head(drafter.roll(tokens, some))
    for row in range(2):
        losses = []
        for anchor, depth, entry in entries_of(some, learned, row):
            p, q = logits[row, anchor + depth].softmax(-1), own[row, entry].log_softmax(-1)
            losses.append(float((p * (p.log() - q)).sum()))
        total += int(supervised[row].sum()) * sum(losses) / len(losses)
    assert_same(found.total, total)


def test_it_is_saved_as_a_plain_checkpoint_that_names_its_mask(target, drafter, tmp_path):
    drafter.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["spd_type"], config["pard_token"]) == ("pard", 63)
    config.pop("drafter_type")  # as AMD's checkpoints are
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_drafter(tmp_path, target)
    assert isinstance(loaded, Pard)
    assert (loaded.config.mask_token_id, loaded.config.steps) == (63, 5)


def test_a_model_that_attends_to_a_window_is_refused(target):
    windowed = random_model("mistral", {"num_hidden_layers": 1, "sliding_window": 8})
    with pytest.raises(BadInputError, match="not of Llama's kind, with full attention"):
        Pard.build(PardConfig(mask_token_id=63), Target(windowed))
