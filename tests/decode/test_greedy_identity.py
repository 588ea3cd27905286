"""Temperature 0: token for token what `transformers.generate` writes, whatever drafts, at any depth, in any batch.

Every architecture in the table is one that users' targets have; adding one is one row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.decode import Decoder, Plan, Sampling, Tree
from outrider.heads import Choose, Drafter, DrafterConfig, DraftModel, Eagle3, Eagle3Config, Ngram, Proposal
from outrider.target import Counts, IncompatibleError, Target

VOCAB, NEW = 64, 14
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING = {"sliding_window": 6}  # shorter than every text below
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, **SLIDING},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, **SLIDING},
    "mistral": SLIDING,
    "gpt2": {},
    "gpt_neox": {},
    "phi3": {},
    "olmo2": {},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
}
# More of the same kinds; run before a release.
MORE: dict[str, dict[str, Any]] = {
    "phi3 sliding": SLIDING,
    "qwen2 sliding": {"use_sliding_window": True, "max_window_layers": 2, **SLIDING},
    "llama tied, with biases": {"attention_bias": True, "tie_word_embeddings": True},
    "gemma": {"head_dim": 8},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, **SLIDING},
    "olmo3": SLIDING,
    "exaone4": SLIDING,
    "starcoder2": SLIDING,
    "smollm3": {},
    "stablelm": {},
    "phi": {},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "nemotron": {"head_dim": 8},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gptj": {"rotary_dim": 4},
    "gpt_bigcode": {},
    "falcon": {},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4},
    "mixtral": EXPERTS,
    "qwen3_moe": {"head_dim": 8, **EXPERTS},
    "gpt_oss": {"head_dim": 8, **EXPERTS, **SLIDING},
    "deepseek_v3": {
        **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
EAGER = {"gemma2"}

RAGGED = [5, 1, 9, 13, 2, 7, 16, 3]
PROMPTS = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in RAGGED]


def make(name: str) -> PreTrainedModel:
    changes = (ARCHITECTURES | MORE)[name]
    kind = name.split()[0]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager" if kind in EAGER else None).eval().requires_grad_(False)


def reference(model: PreTrainedModel, prompts: list[list[int]], **arguments: Any) -> list[list[int]]:
    """`transformers.generate`, one prompt at a time."""
    texts = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False, **arguments)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


class Prophet(Drafter):
    """Knows the texts and lies now and then, so that rounds of one batch accept different numbers of drafts."""

    name = "prophet"

    def __init__(self, texts: list[list[int]]):
        super().__init__(DrafterConfig())
        self.texts = texts

    def open(self, target: Target, batch_size: int, max_length: int) -> dict[str, Any]:
        return {"rows": list(range(batch_size)), "known": [0] * batch_size, "round": 0}

    def absorb(self, state: dict[str, Any], tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None) -> None:
        state["known"] = [n + c for n, c in zip(state["known"], counts.values, strict=True)]

    def propose(self, state: dict[str, Any], root: Tensor, depth: int, choose: Choose, ended: Callable[[], bool] | None = None) -> Proposal:
        state["round"] += 1
        drafts = []
        for row, known in zip(state["rows"], state["known"], strict=True):
            true = (self.texts[row] + [0] * depth)[known + 1 : known + 1 + depth]
            lie_at = (state["round"] * 7 + row * 3) % (depth + 2)  # beyond depth: no lie
            drafts.append([(t + 1) % VOCAB if j == lie_at else t for j, t in enumerate(true + [0] * (depth - len(true)))])
        return Proposal.chain(torch.tensor(drafts), deterministic=True)

    def select(self, state: dict[str, Any], rows: list[int]) -> None:
        state["rows"], state["known"] = [state["rows"][r] for r in rows], [state["known"][r] for r in rows]


def blurred(model: PreTrainedModel, by: float = 0.012) -> PreTrainedModel:
    """A copy that agrees with the model often, not always."""
    copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.add_(by * torch.randn(weight.shape, generator=generator))
    return copied


def every_drafter(target: Target, texts: list[list[int]]) -> dict[str, Drafter | None]:
    torch.manual_seed(1)
    return {
        "none": None,
        "ngram": Ngram(),
        "draft_model": DraftModel(blurred(target.model)),
        "eagle3": Eagle3.build(Eagle3Config(taps=(0, 2, 4)), target),
        "prophet": Prophet([p + t for p, t in zip(PROMPTS, texts, strict=True)]),
    }


SHAPES = {
    **{f"depth {depth}": Plan(depth) for depth in (1, 3, 5)},
    "static tree": Plan(tree=Tree((-1, -1, 0, 0, 1, 2, 2, 5))),
    "dynamic tree": Plan(4, width=3, nodes=9),
}


def differing(target: Target, texts: list[list[int]], trees: bool = True) -> list[str]:
    """Which drafters, shapes and batches write something else than `texts`."""
    found = []
    for name, drafter in every_drafter(target, texts).items():
        decoder = Decoder(target, drafter)
        fitting = {name: plan for name, plan in SHAPES.items() if trees or not plan.is_tree}
        for shape, plan in fitting.items() if drafter is not None else [("no drafts", Plan())]:
            together = decoder.generate(PROMPTS, NEW, plan=plan, ignore_eos=True).tokens
            found += [f"{name}, {shape}, batch of 8"] * (together != texts)
        for shape in fitting.keys() & {"depth 3", "dynamic tree"}:
            alone = decoder.generate(PROMPTS[:1], NEW, plan=SHAPES[shape], ignore_eos=True).tokens
            found += [f"{name}, {shape}, alone"] * (alone != texts[:1])
    return found


CHAINS_ONLY = {"mpt"}  # ALiBi counts slots of the cache, where the nodes of a tree stand side by side


@pytest.mark.parametrize("architecture", sorted(CHAINS_ONLY))
def test_a_model_without_position_ids_is_not_given_trees(architecture):
    model = make(architecture)
    drafter = DraftModel(copy.deepcopy(model))
    with pytest.raises(IncompatibleError, match=r"takes no position ids.*draft chains"):
        Decoder(Target(model), drafter).generate(PROMPTS, NEW, plan=SHAPES["dynamic tree"])
    assert Decoder(Target(model), Ngram()).generate(PROMPTS, NEW, plan=SHAPES["dynamic tree"], ignore_eos=True).tokens == reference(model, PROMPTS)


@pytest.fixture(scope="module")
def ticks() -> Iterator[dict[str, bool]]:
    """What was found for each architecture; written to build/architectures.md when all ran."""
    found: dict[str, bool] = {}
    yield found
    file = Path(__file__).parents[2] / "build" / "architectures.md"
    file.parent.mkdir(exist_ok=True)
    drafts = f"{len(SHAPES)} shapes of chains and trees, every drafter, batch 1 and ragged 8"
    rows = [f"| {name} | {'✓' if same else '✗'}{' chains only' if name in CHAINS_ONLY else ''} |" for name, same in sorted(found.items())]
    file.write_text("\n".join([f"Greedy text equal to `transformers.generate`'s, fp32, CPU ({drafts}):", "", "| architecture | |", "|---|---|", *rows, ""]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_is_the_librarys(architecture, ticks):
    model = make(architecture)
    texts = reference(model, PROMPTS)
    assert len({tuple(t) for t in texts}) > 4, "a degenerate model proves nothing"
    found = differing(Target(model), texts)
    ticks[architecture] = not found
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MORE)
def test_greedy_text_is_the_librarys_on_more_architectures(architecture, ticks):
    model = make(architecture)
    found = differing(Target(model), reference(model, PROMPTS), trees=architecture not in CHAINS_ONLY)
    ticks[architecture] = not found
    assert found == []


def test_the_drafters_above_are_partly_right():
    model = make("llama")
    target, texts = Target(model), reference(model, PROMPTS)
    for name, drafter in every_drafter(target, texts).items():
        if name in ("draft_model", "prophet"):
            rate = Decoder(target, drafter).generate(PROMPTS, NEW, plan=Plan(3), ignore_eos=True).stats.acceptance_rate
            assert 0.2 < rate < 0.9, name


@pytest.mark.parametrize("merged", [False, True])
def test_greedy_text_is_the_librarys_with_a_peft_adapter(merged):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    plain = make("llama")
    before = reference(plain, PROMPTS)
    model = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)).eval()
    model = model.merge_and_unload() if merged else model
    texts = reference(model, PROMPTS)
    assert texts != before
    assert differing(Target(model), texts) == []


def processed(texts: list[list[int]]) -> dict[str, Sampling]:
    """Processors that each get in the way of the plain `texts`, alone and together."""
    words = (
        (PROMPTS[0][-1], texts[0][0]),  # begun by the prompt
        (*PROMPTS[1], *texts[1][:3]),  # begun by the prompt, or later
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
    found: dict[str, Any] = {"repetition_penalty": sampling.repetition_penalty, "min_new_tokens": sampling.min_new_tokens}
    return (
        found
        | ({"bad_words_ids": [list(w) for w in sampling.bad_words]} if sampling.bad_words else {})
        | ({"suppress_tokens": list(sampling.suppress)} if sampling.suppress else {})
    )


ENDS = [7, 29, 41]


@pytest.mark.parametrize("kind", ["penalty", "bad words", "min_new_tokens", "suppress", "all"])
def test_greedy_text_is_the_librarys_under_processors(kind):
    """Some words begin in the prompt and some in a draft, some rounds end at an end token, one draft vocabulary is pruned."""
    model = make("qwen2")
    sampling = processed(reference(model, PROMPTS))[kind]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ENDS, 0
    plain, texts = reference(model, PROMPTS), reference(model, PROMPTS, **library_arguments(sampling))
    assert texts != plain
    target = Target(model)
    pruned = Eagle3.build(Eagle3Config(taps=(0, 2, 4), draft_vocab_size=20), target, torch.arange(VOCAB))
    for name, drafter in (every_drafter(target, texts) | {"itself": DraftModel(copy.deepcopy(model)), "eagle3": pruned}).items():
        decoder = Decoder(target, drafter)
        for depth in (1, 2, 3, 4) if drafter is not None else (1,):
            out = decoder.generate(PROMPTS, NEW, sampling, Plan(depth))
            assert out.tokens == texts, f"{name} at depth {depth}, batch of 8"
            assert name != "itself" or out.stats.acceptance_rate == 1
        assert decoder.generate(PROMPTS[:1], NEW, sampling, Plan(3)).tokens == texts[:1], f"{name}, alone"


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("mamba", {}), ("llama4_text", {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8}), ("bloom", {})],
)
def test_an_architecture_that_cannot_be_rewound_by_position_is_refused(kind, changes):
    """Recurrent state, chunked attention, position biases built from a padding mask: an error that says so, before any text."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(COMMON | changes)))
    with pytest.raises(IncompatibleError, match=f"{type(model).__name__}.*"):
        Decoder(Target(model)).generate([[1, 2, 3]], 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_drafter_that_is_the_target_has_tau_k_plus_1(depth, rule, temperature):
    """Exactly, for one token, ragged and single prompts, and attention that must be told what is causal (gemma2, eager)."""
    for architecture in ("llama", "gemma2"):
        model = make(architecture)
        decoder = Decoder(Target(model), DraftModel(copy.deepcopy(model)))
        for prompts in (PROMPTS, [[7]], [[7], [9]]):
            out = decoder.generate(prompts, 1 + 3 * (depth + 1), Sampling(temperature), Plan(depth, verify=rule), ignore_eos=True)
            assert out.stats.tau == depth + 1
            assert out.stats.histogram() == [0] * depth + [3 * len(prompts)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_filters_and_processors_apply_to_drafter_and_target_alike_along_the_path(temperature):
    """Otherwise a drafter that is the target would be refused now and then."""
    model = make("llama")
    words = (*((a, b) for a in range(VOCAB) for b in range(a % 3, VOCAB, 3)), (5, 6, 7), (9,))
    sampling = Sampling(temperature, 30, 0.9, 0.01, repetition_penalty=1.4, bad_words=words, min_new_tokens=6, suppress=(11, 12))
    model.generation_config.eos_token_id = list(range(0, VOCAB, 5))
    for rule in ("rejection", "coupled"):
        out = Decoder(Target(model), DraftModel(copy.deepcopy(model))).generate(PROMPTS, 16, sampling, Plan(4, verify=rule))
        assert out.stats.acceptance_rate == 1
        assert min(map(len, out.tokens)) >= 6
