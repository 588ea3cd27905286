"""Draft models of another tokenizer: which tokens are shared, what the others get, and that text stays the target's."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from outrider.common import IncompatibleError
from outrider.decode import Decoder, Plan
from outrider.heads import load_drafter
from outrider.heads.draft_model import DraftModel
from outrider.lab.transplant import token_pieces, transplant
from outrider.targets import Target

from ..closeness import assert_same, terms
from ..conftest import byte_level_bpe
from ..scripts.conftest import Command, failed, succeeded

OTHER_TEXT = ["import os, sys", "the other words of another vocabulary", "größer als 20 €"] * 4


def renumbered(tokenizer: PreTrainedTokenizerFast, order: list[int]) -> PreTrainedTokenizerFast:
    """Return the same tokenizer with id `order[i]` in place of i."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    parts["model"]["vocab"] = {token: order[i] for token, i in parts["model"]["vocab"].items()}
    for added in parts["added_tokens"]:
        added["id"] = order[added["id"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)), eos_token="<|end|>", pad_token="<|pad|>"
    )


def other_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of other words, whose end has another name."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(["</s>", "<pad>"], OTHER_TEXT), eos_token="</s>", pad_token="<pad>"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_whose_ids_are_only_numbered_otherwise_computes_the_same(tiny_llama, tiny_tokenizer, tied):
    size = len(tiny_tokenizer)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
    theirs = Target(tiny_llama(vocab=size, layers=2), renumbered(tiny_tokenizer, order))
    model = tiny_llama(vocab=size, layers=2, seed=1, tie_word_embeddings=tied)
    tokens = torch.randint(size, (2, 9), generator=torch.Generator().manual_seed(1))
    before = model(tokens).logits
    changed, shared = transplant(model, tiny_tokenizer, theirs)
    assert shared == size
    places = torch.tensor(order)
    assert_same(changed(places[tokens]).logits[..., places], before, terms(changed))


def test_tokens_are_spelled_by_their_bytes_in_either_kind_of_vocabulary():
    """A SentencePiece vocabulary beside one of bytes: spaces, single bytes and ends are found by what they are."""
    words = {"<unk>": 0, "</s>": 1, "\u2581the": 2, "he": 3, "\u2581": 4, "t": 5, "<0x0A>": 6, "h": 7, "e": 8}
    pieces = Tokenizer(models.BPE(words, []))
    pieces.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces.add_special_tokens(["</s>"])
    ours = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="</s>")
    bytewise = Tokenizer(models.BPE({"Ġthe": 0, "Ġthe\u010a": 1, "the": 2, "q": 3, "eq": 4, "<|end|>": 5}, []))
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<|end|>"])
    theirs = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|end|>")
    found = token_pieces(ours, theirs, 7)
    assert found.pieces == [[2], [2, 6], [5, 3], [], [8], [1], []]
    assert found.shared == [0, 5]
    rows = found.mean_rows(torch.arange(9.0)[:, None])
    assert rows[:, 0].tolist() == [2, 4, 4, 4, 8, 1, 4]


@pytest.mark.parametrize("bytes_first", [False, True])
def test_a_letter_and_its_byte_token_are_told_apart_in_any_order(bytes_first):
    byte_tokens = {"<0x61>": 0, "<0x62>": 1}
    letters = {"a": 0, "b": 1}
    first, second = (byte_tokens, letters) if bytes_first else (letters, byte_tokens)
    words = {"<unk>": 0} | {t: i + 1 for t, i in first.items()} | {t: i + 3 for t, i in second.items()}
    own = PreTrainedTokenizerFast(tokenizer_object=with_bytes(words))
    theirs = PreTrainedTokenizerFast(tokenizer_object=with_bytes({"<unk>": 0, "a": 1, "ab": 2}))
    assert token_pieces(own, theirs, 3).pieces[1:] == [[words["a"]], [words["a"], words["b"]]]


def with_bytes(words: dict[str, int]) -> Tokenizer:
    pieces = Tokenizer(models.BPE(words, []))
    pieces.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return pieces


def test_added_tokens_that_are_not_special_are_spelled_and_ids_beyond_the_target_refused(tiny_tokenizer):
    theirs = copy.deepcopy(tiny_tokenizer)
    theirs.add_tokens(["    ", "<think>"])
    found = token_pieces(tiny_tokenizer, theirs, len(theirs))
    spelled = [tiny_tokenizer.decode(found.pieces[i]) for i in range(len(tiny_tokenizer), len(theirs))]
    assert spelled == ["    ", "<think>"]
    with pytest.raises(IncompatibleError, match="has ids up to 321, and the target 320 outputs"):
        token_pieces(tiny_tokenizer, theirs, len(tiny_tokenizer))


def test_a_token_that_begins_and_ends_texts_gets_the_models_end():
    both = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(["<x>"], OTHER_TEXT), bos_token="<x>", eos_token="<x>"
    )
    own = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(["<s>", "</s>"], OTHER_TEXT), bos_token="<s>", eos_token="</s>"
    )
    assert token_pieces(own, both, 320).pieces[both.eos_token_id] == [own.eos_token_id]


def test_text_drafted_by_a_model_of_another_tokenizer_is_the_targets(tiny_llama, tiny_target):
    model = tiny_llama(vocab=320, layers=2, seed=2)
    changed, shared = transplant(model, other_tokenizer(), tiny_target)
    assert 256 <= shared < 320  # the bytes, and some words
    assert changed.config.eos_token_id == tiny_target.config.eos_token_id
    prompts = [[7, 20, 30], [9, 11, 40, 41, 5]]
    plain = Decoder(tiny_target).generate(prompts, max_new_tokens=24)
    drafted = Decoder(tiny_target, DraftModel(changed)).generate(prompts, plan=Plan(3), max_new_tokens=24)
    assert drafted.tokens == plain.tokens


def test_vocabularies_that_share_nothing_are_refused(tiny_llama, tiny_target):
    alone = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"\u2603\u2603": 0}, [])))
    with pytest.raises(IncompatibleError, match="share no token"):
        transplant(tiny_llama(vocab=1, layers=1), alone, tiny_target)


def test_the_command_writes_a_model_that_drafts_for_the_target(outrider: Command, tiny_llama, tiny_target, tmp_path):
    draft, target, out = (tmp_path / name for name in ("draft", "target", "out"))
    tiny_llama(vocab=320, layers=1, seed=3).save_pretrained(draft)
    other_tokenizer().save_pretrained(draft)
    tiny_target.model.save_pretrained(target)
    tiny_target.require_tokenizer().save_pretrained(target)
    said = succeeded(outrider("lab", "transplant", str(draft), str(target), "--out", str(out))).stdout
    assert "are one token in both" in said
    loaded = Target.load(target, device="cpu")
    load_drafter(out, loaded).check(loaded)
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size == loaded.vocab_size
    failed(outrider("lab", "transplant", str(draft), str(target), "--out", str(out)), "out")
