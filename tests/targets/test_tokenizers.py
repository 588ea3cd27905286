"""Two vocabularies agree, or the first token they disagree about is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.common import IncompatibleError
from outrider.heads import DraftModel, DraftModelConfig, load_drafter
from outrider.targets import TokenDifference, first_difference, require_same_vocabulary


def vocabulary(*tokens: str, **placed: int) -> Any:
    """Return the one method of a tokenizer that a comparison needs."""
    return SimpleNamespace(get_vocab=lambda: {t: i for i, t in enumerate(tokens)} | placed)


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        pytest.param(vocabulary("a", "b"), vocabulary(b=1, a=0), None, id="none"),
        pytest.param(vocabulary(*"abcd"), vocabulary(*"aBCd"), TokenDifference(1, "b", "B"), id="the lowest"),
        pytest.param(vocabulary("a"), vocabulary("a", "<new>"), TokenDifference(1, None, "<new>"), id="an added token"),
    ],
)
def test_the_lowest_differing_id_is_found(first, second, difference):
    assert first_difference(first, second) == difference


def test_a_refusal_names_id_and_both_tokens():
    with pytest.raises(IncompatibleError, match="id 1 is 'b' in mine and missing in the target") as caught:
        require_same_vocabulary(vocabulary("a", "b"), vocabulary("a"), "mine")
    assert caught.value.exit_code == 3


@pytest.fixture
def draft_folder(
    tmp_path: Path, tiny_llama: Callable[..., LlamaForCausalLM], tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """A saved draft model with a vocabulary of the same size, whose tokenizer has one more token than the target's."""
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str()))
    other.add_tokens(["<other>"])
    tiny_llama(layers=1, vocab=len(tiny_tokenizer)).save_pretrained(tmp_path / "draft")
    other.save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def test_a_draft_model_with_another_tokenizer_is_refused_when_it_meets_a_target(draft_folder, tiny_target):
    named = rf"id {len(tiny_target.require_tokenizer())} is '<other>' in the draft model"
    with pytest.raises(IncompatibleError, match=named):
        load_drafter(draft_folder, tiny_target)
    with pytest.raises(IncompatibleError, match=named):
        DraftModel.build(DraftModelConfig(path=str(draft_folder)), tiny_target)


def test_a_draft_model_with_the_targets_tokenizer_loads(draft_folder, tiny_target):
    tiny_target.require_tokenizer().save_pretrained(draft_folder)
    assert load_drafter(draft_folder, tiny_target).name == "draft_model"
