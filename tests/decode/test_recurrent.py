"""Targets with states that no position rewinds write what `transformers.generate` writes, in chains, in any batch.

More of these architectures, with every drafter and at every depth: `test_greedy_identity.py`.
"""

from __future__ import annotations

import pytest

from outrider.common import IncompatibleError
from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.heads import Drafter, DraftModel, Ngram
from outrider.targets import Target

from .conftest import blurred, library_texts, random_model, random_prompts
from .test_greedy_identity import RECURRENT

NEW = 40
CHANGES = {"head_dim": 8, "max_position_embeddings": 256}
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
QWEN3_NEXT = RECURRENT["qwen3_next"] | CHANGES | {"layer_types": LAYERS}
# The second and third are further behind the first than a pass reads again.
PROMPTS = random_prompts(50, 7, 26)
CHAIN, TREE = Plan(4), Plan(3, width=2)


@pytest.fixture(scope="module")
def target() -> Target:
    """Three layers of linear attention, and one of full attention."""
    made = Target(random_model("qwen3_next", QWEN3_NEXT))
    assert made.config.layer_types == LAYERS
    return made


@pytest.fixture(scope="module")
def texts(target) -> list[list[int]]:
    return library_texts(target.model, PROMPTS, NEW, eos_token_id=None, pad_token_id=0)


def drafters(target: Target) -> dict[str, Drafter | None]:
    return {
        "none": None,
        "ngram": Ngram(),
        "llama": DraftModel(random_model("llama", CHANGES)),
        "itself": DraftModel(target.model),
        "blurred": DraftModel(blurred(target.model, 0.03)),
    }


@pytest.mark.parametrize("name", ["none", "ngram"])
def test_a_requests_states_end_with_it(target, name, caches):
    Decoder(target, drafters(target)[name]).generate(PROMPTS[:2], 4, plan=CHAIN)
    assert caches
    assert all(cache() is None for cache in caches)


@pytest.mark.parametrize("name", ["none", "ngram", "llama", "itself", "blurred"])
def test_chains_write_the_librarys_greedy_text(target, texts, name):
    """Together, ragged, and each prompt alone."""
    decoder = Decoder(target, drafters(target)[name])
    out = decoder.generate(PROMPTS, NEW, plan=CHAIN, ignore_eos=True)
    assert out.tokens == texts
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert decoder.generate([prompt], NEW, plan=CHAIN, ignore_eos=True).tokens == [text]
    if name == "itself":
        assert out.stats.tau > 4.5, "a target that drafts for itself is always right"
    if name == "blurred":
        assert len([n for n in out.stats.histogram() if n]) > 3, "rounds keep different numbers of drafts"


def test_text_that_is_drawn_depends_on_the_target_alone(target):
    """Under the coupled rule: with and without drafts, in a batch and alone."""
    sampling, plan = Sampling(temperature=1.0, seed=3), Plan(4, verify="coupled")
    plain = Decoder(target).generate(PROMPTS, NEW, sampling, plan, ignore_eos=True).tokens
    decoder = Decoder(target, drafters(target)["blurred"])
    assert decoder.generate(PROMPTS, NEW, sampling, plan, ignore_eos=True).tokens == plain
    assert decoder.generate(PROMPTS[1:2], NEW, sampling, plan, ignore_eos=True, sequence_ids=[1]).tokens == plain[1:2]


def test_trees_are_refused_before_anything_runs(target):
    decoder = Decoder(target, drafters(target)["llama"])
    for plan in (TREE, Plan(tree=Tree((-1, -1, 0)))):
        message = r"Qwen3NextForCausalLM has recurrent layers.*draft chains"
        with pytest.raises(IncompatibleError, match=message) as caught:
            decoder.generate(PROMPTS, NEW, plan=plan)
        assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["ngram", "itself"])
def test_drafters_that_grow_no_trees_draft_chains_instead(target, texts, name):
    """A draft model with recurrent layers is one of them."""
    assert Decoder(target, drafters(target)[name]).generate(PROMPTS, NEW, plan=TREE, ignore_eos=True).tokens == texts


def test_rounds_of_fixed_shapes_are_not_for_such_targets(target, texts):
    """Asking for them changes nothing."""
    decoder = Decoder(target, drafters(target)["llama"], static=True)
    assert decoder.generate(PROMPTS, NEW, plan=CHAIN, ignore_eos=True).tokens == texts
    assert decoder.static_batches.kept == {}


def test_such_a_draft_model_drafts_for_a_plain_target():
    target = Target(random_model("llama", CHANGES))
    plain = Decoder(target).generate(PROMPTS, NEW, ignore_eos=True).tokens
    for static in (False, True):
        decoder = Decoder(target, DraftModel(random_model("qwen3_next", QWEN3_NEXT)), static)
        assert decoder.generate(PROMPTS, NEW, plan=CHAIN, ignore_eos=True).tokens == plain
