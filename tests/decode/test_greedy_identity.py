"""Temperature 0: token for token what `transformers.generate` writes, whatever drafts, at any depth, in any batch.

Every architecture in the table is one that users' targets have; adding one is one row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from outrider.common import IncompatibleError
from outrider.decode import Decoder, Plan, Sampling, Tree, rules
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config, Ngram
from outrider.targets import RaggedCache, RowLengths, Target
from outrider.targets.cache_slots import Placement

from .conftest import COMMON, Scripted, blurred, library_texts, random_model, random_prompts

Plant = Callable[[pytest.MonkeyPatch], None]

VOCAB, NEW = COMMON["vocab_size"], 14
SLIDING = {"sliding_window": 3}  # shorter than every text below, and than the deepest paths of drafts
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Gemma scales its embeddings up: with random weights that are also the output's, a text would only repeat its last
# token.
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
GEMMA3 = {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2, **SLIDING}
SEEING = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, **EXPERTS},
    "mistral": SLIDING,
    "mixtral": EXPERTS,
    "gemma2": {**GEMMA, "final_logit_softcapping": 3.0, **SLIDING},
    "gemma3": {
        "text_config": COMMON | GEMMA3,
        "vision_config": SEEING,
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
    },
    "phi3": {},
    "olmo2": {},
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "glm4": {"head_dim": 8},
    "gpt_oss": {"head_dim": 8, **EXPERTS, **SLIDING},
    "gpt2": {},
    "gpt_neox": {},
}
# More of the same kinds; run before a release.
MORE: dict[str, dict[str, Any]] = {
    "phi3 sliding": SLIDING,
    "mistral against its word": {"use_sliding_window": False, **SLIDING},
    "qwen2 sliding": {"use_sliding_window": True, "max_window_layers": 2, **SLIDING},
    "llama tied, with biases": {"attention_bias": True, "tie_word_embeddings": True},
    "gemma": {"head_dim": 8, "tie_word_embeddings": False},
    "gemma3_text": GEMMA3,
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, **SLIDING},
    "olmo3": SLIDING,
    "exaone4": SLIDING,
    "starcoder2": SLIDING,
    "smollm3": {},
    "stablelm": {},
    "phi": {},
    "glm": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gptj": {"rotary_dim": 4},
    "gpt_bigcode": {},
    "falcon": {},
    "llama4_text": {
        "attention_chunk_size": 4,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "head_dim": 8,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
    },
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "tie_word_embeddings": False},
    "deepseek_v3": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
GATED = LINEAR | {"linear_num_key_heads": 2, "head_dim": 8}
# A chunk shorter than some prompts, so that states move on inside a pass, too.
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
# States that no position rewinds: `targets/recurrent.py`.
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": GATED | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": GATED,
    "olmo_hybrid": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "falcon_h1": {"mamba_d_ssm": 64, **MAMBA},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4, **MAMBA},
}
MORE |= RECURRENT

RAGGED = [5, 1, 9, 13, 2, 7, 16, 3]
PROMPTS = random_prompts(*RAGGED, vocab=VOCAB)


def make(name: str) -> PreTrainedModel:
    return random_model(name.split()[0], (ARCHITECTURES | MORE)[name])


def with_adapter(model: PreTrainedModel, merged: bool) -> Any:
    """Return a model with a LoRA that changes what it says."""
    torch.manual_seed(3)
    adapter = LoraConfig(r=2, lora_alpha=1, target_modules="all-linear", init_lora_weights=False)
    changed = get_peft_model(model, adapter).eval()
    return changed.merge_and_unload() if merged else changed


reference = partial(library_texts, new=NEW)


def prophet(texts: list[list[int]]) -> Scripted:
    """A drafter that knows the texts and lies now and then: rounds of one batch accept different numbers of drafts."""

    def drafts(row: int, known: int, number: int, depth: int) -> list[int]:
        true = (texts[row] + [0] * 2 * depth)[known + 1 : known + 1 + depth]
        lie_at = (number * 7 + row * 3) % (depth + 2)  # beyond depth: no lie
        return [(t + 1) % VOCAB if j == lie_at else t for j, t in enumerate(true)]

    return Scripted(drafts)


def every_drafter(target: Target, texts: list[list[int]]) -> dict[str, Drafter | None]:
    torch.manual_seed(1)
    return {
        "none": None,
        "ngram": Ngram(),
        "draft_model": DraftModel(blurred(target.model)),
        "eagle3": Eagle3.build(Eagle3Config(taps=(0, 2, 4)), target),
        "prophet": prophet([p + t for p, t in zip(PROMPTS, texts, strict=True)]),
    }


SHAPES = {
    **{f"depth {depth}": Plan(depth) for depth in (1, 3, 5)},
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2, 2, 5))),
    "dynamic tree": Plan(4, width=3, nodes=9),
}
TREES = ("static tree", "dynamic tree")
# Each shape with a drafter that makes a difference to it; `EVERY` is all of them with all.
SOME = {
    "ngram": ["depth 3"],
    "prophet": ["depth 1", "depth 5"],
    "draft_model": ["depth 3", *TREES],
    "eagle3": ["depth 5", *TREES],
}
FEW = {"draft_model": ["depth 3"], "eagle3": ["dynamic tree"]}
EVERY = {name: list(SHAPES) for name in SOME}


def differing(
    target: Target,
    texts: list[list[int]],
    drafts: dict[str, list[str]],
    drafters: dict[str, Drafter | None] | None = None,
) -> list[str]:
    """Which drafters, shapes and batches write something else than `texts`."""
    drafters = drafters or every_drafter(target, texts)

    def same(drafter: Drafter | None, plan: Plan, rows: int) -> bool:
        out = Decoder(target, drafter).generate(PROMPTS[:rows], len(texts[0]), plan=plan, ignore_eos=True)
        return out.tokens == texts[:rows]

    found = [] if same(None, Plan(), len(PROMPTS)) else ["no drafts"]
    for name, shapes in drafts.items():
        for shape in shapes:
            for rows in (len(PROMPTS), 1) if shape in ("depth 3", "dynamic tree") else (len(PROMPTS),):
                found += [] if same(drafters[name], SHAPES[shape], rows) else [f"{name}, {shape}, batch of {rows}"]
    return found


# ALiBi counts slots of the cache, where the nodes of a tree stand side by side; states have no branches.
CHAINS_ONLY = {"mpt", *RECURRENT}


@pytest.mark.parametrize("architecture", sorted(CHAINS_ONLY - RECURRENT.keys()))
def test_a_model_without_position_ids_is_not_given_trees(architecture):
    model = make(architecture)
    drafter = DraftModel(copy.deepcopy(model))
    with pytest.raises(IncompatibleError, match=r"takes no position ids.*draft chains"):
        Decoder(Target(model), drafter).generate(PROMPTS, NEW, plan=SHAPES["dynamic tree"])
    assert differing(Target(model), reference(model, PROMPTS), {"ngram": ["dynamic tree"]}) == []


def test_the_architectures_that_people_ask_for_are_in_the_table():
    wanted = "llama qwen2 qwen3 qwen3_moe mistral mixtral gemma2 gemma3 phi3 olmo2 granite glm4 gpt_oss gpt2 gpt_neox"
    assert set(wanted.split()) == ARCHITECTURES.keys()
    assert Target(make("mistral")).config.sliding_window < min(4, NEW), "shorter than the texts and than the trees"


def varied(texts: list[list[int]], tokens: float = 5) -> bool:
    """Whether the texts differ (all but two), and hold so many different tokens on average."""
    return len({tuple(t) for t in texts}) >= len(texts) - 1 and sum(len(set(t)) for t in texts) / len(texts) >= tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_the_librarys(architecture):
    model = make(architecture)
    texts = reference(model, PROMPTS)
    assert varied(texts), "a degenerate model proves nothing"
    assert differing(Target(model), texts, EVERY if architecture == "llama" else SOME) == []


def test_a_window_is_the_librarys_whatever_a_config_says_beside_it():
    """Mistral has no `use_sliding_window`: the library leaves what it does not know in the config."""
    model = make("mistral against its word")
    assert not model.config.use_sliding_window
    assert differing(Target(model), reference(model, PROMPTS), SOME) == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MORE)
def test_greedy_text_is_the_librarys_on_more_architectures(architecture):
    model = make(architecture)
    texts = reference(model, PROMPTS)
    assert varied(texts, 2.5)
    shapes = [shape for shape in SHAPES if architecture not in CHAINS_ONLY or shape not in TREES]
    assert differing(Target(model), texts, dict.fromkeys(EVERY, shapes)) == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "llama"])
def test_greedy_text_is_the_librarys_with_every_drafter_in_every_shape(architecture):
    model = make(architecture)
    assert differing(Target(model), reference(model, PROMPTS), EVERY) == []


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_the_librarys_with_a_peft_adapter(architecture, merged):
    """The draft model was made for the target as it was before."""
    plain = make(architecture)
    before, drafter = reference(plain, PROMPTS[:3], new=8), DraftModel(copy.deepcopy(plain))
    model = with_adapter(plain, merged)
    texts = reference(model, PROMPTS, new=8)
    assert texts[:3] != before
    target = Target(model)
    drafters = {"draft_model": drafter, "eagle3": Eagle3.build(Eagle3Config(taps=(0, 2, 4)), target)}
    assert differing(target, texts, FEW, drafters) == []


def test_the_drafters_above_are_partly_right():
    model = make("llama")
    target, texts = Target(model), reference(model, PROMPTS)
    for name, drafter in every_drafter(target, texts).items():
        if name in ("draft_model", "prophet"):
            rate = Decoder(target, drafter).generate(PROMPTS, NEW, plan=Plan(3), ignore_eos=True).stats.acceptance_rate
            assert 0.2 < rate < 0.9, name


def tied(model: PreTrainedModel) -> PreTrainedModel:
    """With every logit twice, at neighbouring tokens, to the last bit."""
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[1::2] = head[0::2]
    return model


def test_of_tied_tokens_the_first_wins_as_in_the_library():
    """In passes of any width, for chains and trees, and for a drafter that knows only the second of each pair."""
    model = tied(make("llama"))
    texts = reference(model, PROMPTS)
    assert {t % 2 for text in texts for t in text} == {0}
    target = Target(model)
    pruned = Eagle3.build(Eagle3Config(taps=(0, 2, 4), draft_vocab_size=32), target, torch.arange(VOCAB) % 2)
    drafters = {**every_drafter(target, texts), "itself": DraftModel(copy.deepcopy(model)), "pruned": pruned}
    assert differing(target, texts, {name: list(SHAPES) for name in drafters if name != "none"}, drafters) == []
    for plan in (Plan(4), Plan(tree=Tree((-1, -1, 0, 0, 2, 4)))):
        out = Decoder(target, drafters["itself"]).generate(PROMPTS, NEW, plan=plan, ignore_eos=True)
        accepted = {one.accepted for row in out.rounds for one in row}
        assert accepted == {plan.depth}, "drafter and target break a tie alike"


def test_a_target_that_breaks_ties_the_other_way_is_noticed(monkeypatch):
    model = tied(make("llama"))
    texts = reference(model, PROMPTS)
    honest = rules._matched
    monkeypatch.setattr(rules, "_matched", lambda proposal, wanted: honest(proposal, wanted + 1 - wanted % 2))
    assert differing(Target(model), texts, {"ngram": ["depth 3"]}) != []


def refused_drafts_stay(patch: pytest.MonkeyPatch) -> None:
    honest = RaggedCache.advance

    def advance(cache: RaggedCache, counts: RowLengths) -> None:
        if cache.used - cache.longest >= 2:
            counts = RowLengths.of([2 if n == 1 else n for n in counts.values], counts.tensor.device)
        honest(cache, counts)

    patch.setattr(RaggedCache, "advance", advance)


def the_path_is_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RaggedCache, "keep", lambda cache, path: None)


def siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    honest = RaggedCache.visible

    def visible(cache: RaggedCache) -> Tensor:
        seen = honest(cache)
        return seen if cache.placed.nodes is None else torch.ones_like(seen)

    patch.setattr(RaggedCache, "visible", visible)


def nodes_stand_in_their_order(patch: pytest.MonkeyPatch) -> None:
    honest = RaggedCache.place

    def place(cache: RaggedCache, num_new: int, *arguments: Any, **named: Any) -> Tensor:
        honest(cache, num_new, *arguments, **named)
        cache.placed = replace(cache.placed, positions=cache.placed.slots)
        return cache.placed.positions

    patch.setattr(RaggedCache, "place", place)


def the_window_counts_slots(patch: pytest.MonkeyPatch) -> None:
    def within(placed: Placement, window: int) -> Tensor:
        return torch.arange(placed.used)[None, None] > placed.positions[:, :, None] - window

    patch.setattr(Placement, "within", within)


def second_thoughts(model: PreTrainedModel, texts: list[list[int]]) -> DraftModel:
    """Drafts a token that stands in no text, and as its second choice what the model itself would say."""
    unwritten = min(set(range(VOCAB)) - {t for text in texts for t in text})
    copied = copy.deepcopy(model)
    bias = torch.zeros(VOCAB).index_fill(0, torch.tensor(unwritten), 1e3)
    copied.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return DraftModel(copied)


SECOND_CHILDREN = Plan(tree=Tree((-1, -1, 1, 1, 3, 3, 5, 5)))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_oss", "gemma3"])
def test_a_path_of_second_children_is_kept_as_if_it_stood_alone(architecture):
    """None of its nodes stands in the cache where it would in a chain, and it is longer than the sliding windows."""
    model = make(architecture)
    texts = reference(model, PROMPTS)
    decoder = Decoder(Target(model), second_thoughts(model, texts))
    out = decoder.generate(PROMPTS, NEW, plan=SECOND_CHILDREN, ignore_eos=True)
    assert out.tokens == texts
    assert out.stats.alpha() == [1.0] * 4


IN_THE_CACHE: dict[str, tuple[Plant, str, Plan]] = {
    "refused drafts stay in the cache": (refused_drafts_stay, "llama", Plan(3)),
    "the kept path is not moved to the front": (the_path_is_not_moved, "llama", SECOND_CHILDREN),
    "siblings see each other": (siblings_see_each_other, "llama", SECOND_CHILDREN),
    "positions follow the order of the nodes": (nodes_stand_in_their_order, "llama", SECOND_CHILDREN),
    "a sliding window counts slots of the cache": (the_window_counts_slots, "mistral", SECOND_CHILDREN),
}


@pytest.mark.parametrize("bug", IN_THE_CACHE)
def test_a_bug_planted_in_the_cache_is_noticed(bug, monkeypatch):
    plant, architecture, plan = IN_THE_CACHE[bug]
    model = make(architecture)
    texts = reference(model, PROMPTS)
    decoder = Decoder(Target(model), second_thoughts(model, texts) if plan.is_tree else DraftModel(blurred(model)))
    assert decoder.generate(PROMPTS, NEW, plan=plan, ignore_eos=True).tokens == texts
    plant(monkeypatch)
    assert decoder.generate(PROMPTS, NEW, plan=plan, ignore_eos=True).tokens != texts


def processed(texts: list[list[int]]) -> dict[str, Sampling]:
    """Processors that each get in the way of the plain `texts`, alone and together."""
    words = (
        (PROMPTS[0][-1], texts[0][0]),  # begun by the prompt
        (PROMPTS[7][-1], *texts[7][:3]),  # begun by the prompt, or later
        tuple(texts[2][2:4]),
        tuple(texts[3][1:5]),
        (texts[4][6],),
        (ENDS[0],),  # an end token alone is no bad word
    )
    kinds: dict[str, dict[str, Any]] = {
        "penalty": {"repetition_penalty": 1.5},
        "bad words": {"bad_words": words},
        "min_new_tokens": {"min_new_tokens": 9},
        "suppress": {"suppress": (texts[5][3], texts[6][0], texts[7][8])},
    }
    together = {name: value for settings in kinds.values() for name, value in settings.items()}
    return {name: Sampling(**settings) for name, settings in (kinds | {"all": together}).items()}


def library_arguments(sampling: Sampling) -> dict[str, Any]:
    return {
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": sampling.min_new_tokens,
        "bad_words_ids": [list(w) for w in sampling.bad_words] or None,
        "suppress_tokens": list(sampling.suppress) or None,
    }


ENDS = [7, 29, 41]


@pytest.mark.parametrize("kind", ["penalty", "bad words", "min_new_tokens", "suppress", "all"])
def test_greedy_text_is_the_librarys_under_processors(kind):
    """Words begin in the prompt or in a draft, rounds end at an end token, and one draft vocabulary is pruned."""
    model = make("qwen2")
    sampling = processed(reference(model, PROMPTS))[kind]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ENDS, 0
    plain, texts = reference(model, PROMPTS), reference(model, PROMPTS, **library_arguments(sampling))
    assert texts != plain
    target = Target(model)
    pruned = Eagle3.build(Eagle3Config(taps=(0, 2, 4), draft_vocab_size=20), target, torch.arange(VOCAB))
    drafters = every_drafter(target, texts) | {"itself": DraftModel(copy.deepcopy(model)), "eagle3": pruned}
    tried = {
        "none": ["depth 1"],
        "ngram": ["depth 3"],
        "prophet": ["depth 1", "depth 5"],
        "draft_model": ["depth 3", *TREES],
        "eagle3": ["depth 1", *TREES],
    }
    for name, shapes in (tried | {"itself": ["depth 3"]}).items():
        decoder = Decoder(target, drafters[name])
        for shape in shapes:
            out = decoder.generate(PROMPTS, NEW, sampling, SHAPES[shape])
            assert out.tokens == texts, f"{name}, {shape}, batch of 8"
            assert name != "itself" or out.stats.acceptance_rate == 1
        alone = decoder.generate(PROMPTS[:1], NEW, sampling, SHAPES[shapes[-1]])
        assert alone.tokens == texts[:1], f"{name}, {shapes[-1]}, alone"


@pytest.mark.parametrize("kind", ["mamba", "bloom"])
def test_an_architecture_that_cannot_be_rewound_by_position_is_refused(kind):
    """Recurrent state, and position biases built from a padding mask: an error before any text."""
    model = random_model(kind)
    with pytest.raises(IncompatibleError, match=f"{type(model).__name__}.*"):
        Decoder(Target(model)).generate([[1, 2, 3]], 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_drafter_that_is_the_target_has_tau_k_plus_1(depth, rule, temperature):
    """For single and ragged prompts; also with attention that must be told what is causal (gemma2)."""
    for architecture in ("llama", "gemma2"):
        model = make(architecture)
        decoder = Decoder(Target(model), DraftModel(copy.deepcopy(model)))
        for prompts in (PROMPTS, [[7]], [[7], [9]]):
            plan, new = Plan(depth, verify=rule), 1 + 3 * (depth + 1)
            out = decoder.generate(prompts, new, Sampling(temperature), plan, ignore_eos=True)
            assert out.stats.tau == depth + 1
            assert out.stats.histogram() == [0] * depth + [3 * len(prompts)]
