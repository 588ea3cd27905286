"""What a model is, is tried before it is decoded: none writes another text than its own `generate` without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from outrider.common import IncompatibleError
from outrider.decode import Decoder, Plan
from outrider.heads import Eagle3, Eagle3Config, Ngram
from outrider.targets import Target

from .small_models import small_model

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 64, "max_position_embeddings": 128}
BART = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "d_model": 32}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 10, 9, 10, 9]]


def make(kind: str, sizes: dict[str, int] = SMALL, **changes: Any) -> PreTrainedModel:
    model: PreTrainedModel = small_model(kind, sizes=sizes, **changes)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config = GenerationConfig()  # no end, and no forced tokens
    return model


def texts(model: PreTrainedModel, count: int = 12) -> list[list[int]]:
    """Return what `generate` writes after each prompt alone."""
    written = []
    for prompt in map(torch.tensor, PROMPTS):
        settings = {"attention_mask": torch.ones_like(prompt)[None], "max_new_tokens": count, "do_sample": False}
        text = model.generate(prompt[None], **settings, pad_token_id=0)
        written.append(text[0, len(prompt) :].tolist())
    return written


def refuse(model: PreTrainedModel, said: str) -> None:
    with pytest.raises(IncompatibleError, match=said):
        Decoder(Target(model)).generate(PROMPTS, 4)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "ernie", "big_bird", "rembert"])
def test_encoders_that_load_as_causal_models_are_refused(kind):
    refuse(make(kind), r"reads a text in both directions.*is_decoder: true")


def test_the_same_as_a_decoder_writes_its_own_text():
    model = make("bert-generation", is_decoder=True)
    assert Decoder(Target(model), Ngram()).generate(PROMPTS, 12, plan=Plan(3)).tokens == texts(model)


def test_logits_that_are_not_made_by_the_output_embedding_alone_are_refused():
    """An ELECTRA decoder, as a BERT, has a layer between its states and its output embedding."""
    refuse(make("electra", embedding_size=32, is_decoder=True), "does not make its logits of its last hidden state")


def test_a_model_in_training_mode_that_drops_parts_out_is_refused_for_that():
    refuse(make("gpt2").train(), r"is in training mode.*call model.eval\(\) first")


@pytest.mark.parametrize("kind", ["gpt_neox", "mpt"])
def test_a_causal_model_that_says_it_is_no_decoder_or_needs_no_places_is_decoded_in_ragged_batches(kind):
    model = make(kind)
    assert kind == "mpt" or model.config.is_decoder is False
    assert Decoder(Target(model)).generate(PROMPTS, 12).tokens == texts(model)


def test_a_model_that_counts_places_by_the_longest_row_is_decoded_one_prompt_at_a_time():
    model = make("bart", **BART)
    decoder = Decoder(Target(model), Ngram())
    assert [decoder.generate([prompt], 12, plan=Plan(3)).tokens[0] for prompt in PROMPTS] == texts(model)
    with pytest.raises(IncompatibleError, match="one prompt at a time, not 2"):
        decoder.generate(PROMPTS, 12, plan=Plan(3))


@pytest.mark.parametrize(
    ("kind", "sizes", "said"),
    [
        ("opt", SMALL | {"word_embed_proj_dim": 16, "ffn_dim": 64}, "output embedding that reads 16"),
        ("mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4}, "no attention heads"),
    ],
)
def test_a_head_for_a_target_that_has_no_place_for_one_is_refused(kind, sizes, said):
    with pytest.raises(IncompatibleError, match=said):
        Eagle3.build(Eagle3Config(taps=(1, 2)), Target(make(kind, sizes)))


def test_attention_in_chunks_is_that_of_the_library():
    """Prompts and texts cross the ends of chunks of four."""
    changes = {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8}
    model = make("llama4_text", **changes, num_key_value_heads=2, layer_types=["chunked_attention"] * 2)
    for drafter, plan in ((None, Plan(0)), (Ngram(), Plan(3)), (Ngram(), Plan(3))):
        assert Decoder(Target(model), drafter).generate(PROMPTS, 12, plan=plan).tokens == texts(model)
