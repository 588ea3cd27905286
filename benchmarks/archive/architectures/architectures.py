"""Try every causal language model type of the installed `transformers`, built small with random weights.

    python -m benchmarks.architectures --out benchmarks/results/architectures.json

Of each: can a small one be built; does the library generate with it; is Outrider's text the library's, token for token,
plainly, with drafts in a chain, in a tree, and with an EAGLE-3 head; and if it is refused, the sentence. A text that
differs, or an error that is no refusal, is a finding: exit code 1.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.common import IncompatibleError, OutriderError
from outrider.decode import Decoder, Plan
from outrider.heads import Drafter, Eagle3, Eagle3Config, Ngram, Suffix, SuffixConfig
from outrider.targets import Target

from .report import NOTHING, options, publish, table, write

VOCAB, NEW, LAYERS = 192, 24, 6
PROMPTS = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() * 2 for n in (7, 4, 11)]
_MOST_PARAMETERS = 50_000_000
SECONDS = 120  # of the processor, for one type
EXACT, REFUSED, WRONG, CRASH, NOT_BUILT = "exact", "refused", "wrong text", "crash", "not buildable here"

# What makes a config small, by the names that configs have for it.
_SIZES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input audio_vocab_size",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers",
    64: "hidden_size n_embd d_model dim embedding_size input_embedding_size adapter_in_dim adapter_out_dim",
    128: "intermediate_size ffn_dim n_inner dim_ff d_ff dff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts",
    2: "num_key_value_heads num_kv_heads n_head_kv num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k",
    32: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size intermediate_size_mlp",
    1: "n_group topk_group num_shared_experts n_shared_experts",
    16: "head_dim attention_head_dim d_kv v_head_dim qk_nope_head_dim global_head_dim kv_lora_rank q_lora_rank "
    "sliding_window attention_chunk_size",
    8: "qk_rope_head_dim rotary_dim",
    512: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}


# What some types need beside that: defaults that say nothing, or that no small model fulfils.
_THETA = {"rope_type": "default", "rope_theta": 10_000.0}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 4], **_MAMBA2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _THETA, "sliding_attention": _THETA}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128, **_MAMBA2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2), **_MAMBA2},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "shared_experts_intermediate_size": 32,
    },
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"rope_parameters": _THETA, "head_dim": 16},
    "hunyuan_v1_moe": {"rope_parameters": _THETA, "head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "ministral": {"rope_parameters": _THETA},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"] * (LAYERS // 3),
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 8,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"] * (LAYERS // 3),
        "mamba_d_state": 16,
        "chunk_size": 8,
        "num_key_value_heads": 4,
    },
}


def small(kind: str) -> PreTrainedConfig:
    """Return the config of a type with small sizes, its parts' too.

    It is made with them, where it can be, so that what it derives of them fits; then what it ignored is set.
    """
    config = usual = _open(AutoConfig.for_model(kind))
    with suppress(Exception):
        config = _open(AutoConfig.for_model(kind, **_sizes(usual) | _small_parts(usual) | _MORE.get(kind, {})))
    for part in (config, *_parts(config)):
        derived = getattr(part, "is_heterogeneous", False)  # layers differ, and say so for each
        for name, size in {} if derived else _sizes(part).items():
            _set(part, name, size)
        for name in ("layer_types", "layers_block_type", "block_types", "mlp_layer_types"):
            kinds = getattr(part, name, None)
            if isinstance(kinds, list) and kinds and name not in _MORE.get(kind, {}) and not derived:
                _set(part, name, _some_of_each([*kinds, *(getattr(usual, name, None) or [])]))
        for number, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
            if hasattr(part, name):
                _set(part, name, number)
    for name, value in _MORE.get(kind, {}).items():
        if not isinstance(getattr(config, name, None), PreTrainedConfig):
            _set(config, name, value)
    return config


def _open(config: PreTrainedConfig) -> PreTrainedConfig:
    """Let sizes be read that may differ from layer to layer."""
    for part in (config, *_parts(config)):
        if hasattr(part, "allow_global_per_layer_attribute_access"):
            part.allow_global_per_layer_attribute_access = True
    return config


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the sizes that a config knows, small."""
    found = {name: size for name, size in _SMALL.items() if type(getattr(config, name, None)) is int}
    if isinstance(getattr(config, "qk_rope_head_dim", None), int):  # MLA: heads share no keys, and turn in a part only
        found |= {name: size for name, size in (("head_dim", 8), ("num_key_value_heads", 4)) if name in found}
    return found


def _small_parts(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the small sizes of a config's parts."""
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    return {name: _sizes(part) | _MORE.get(part.model_type, {}) for name, part in parts.items()}


def _set(config: PreTrainedConfig, name: str, value: Any) -> None:
    """Set what can be set: some configs derive a value from others."""
    with suppress(AttributeError):
        setattr(config, name, value)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield value
            yield from _parts(value)


def _some_of_each(kinds: list[str]) -> list[str]:
    """Return as many kinds of layers as a small model has layers, every kind among them if they fit."""
    different = list(dict.fromkeys(kinds))[:LAYERS]
    return (different * LAYERS)[:LAYERS]


def build(kind: str) -> PreTrainedModel:
    """Return a small model of this type, with weights so wide that no two tokens tie."""
    config = small(kind)
    with torch.device("meta"):
        sketch = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    if (count := sum(weight.numel() for weight in sketch.parameters())) > _MOST_PARAMETERS:
        raise ValueError(f"it has {count:,} parameters at small sizes")
    torch.manual_seed(0)
    model: PreTrainedModel = (
        AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval().requires_grad_(False)
    )
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "norm" not in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@torch.no_grad()
def library_text(model: PreTrainedModel) -> list[list[int]]:
    """Return what `generate` says after each prompt, one at a time."""
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)  # type: ignore[operator]
        found.append(out[0, len(prompt) :].tolist())
    return found


def eagle(target: Target) -> Drafter:
    torch.manual_seed(1)
    return Eagle3.build(Eagle3Config(), target)


WAYS: dict[str, tuple[Callable[[Target], Drafter | None], Plan]] = {
    "plain": (lambda _: None, Plan(0)),
    "chain": (lambda _: Ngram(), Plan(3)),
    "tree": (lambda _: Suffix(SuffixConfig(width=2)), Plan(4)),
    "eagle3": (eagle, Plan(3)),
}


def try_type(kind: str) -> dict[str, Any]:
    """Return what came of one type: `result`, and in `ways` what each way of decoding gave."""
    try:
        model = build(kind)
        expected = library_text(model)
    except Exception as error:
        return {"result": NOT_BUILT, "why": _sentence(error)}
    ways = {name: try_way(model, expected, *way) for name, way in WAYS.items()}
    results = [way["result"] for way in ways.values()]
    worst = next((bad for bad in (WRONG, CRASH) if bad in results), ways["plain"]["result"])
    return {"result": worst, "class": type(model).__name__, "ways": ways}


def try_way(
    model: PreTrainedModel, expected: list[list[int]], make: Callable[[Target], Drafter | None], plan: Plan
) -> dict[str, str]:
    """Return what one way of decoding gave, all prompts in one batch and each alone."""
    try:
        target = Target(model)
        decoder = Decoder(target, make(target))
        alone = [decoder.generate([prompt], NEW, plan=plan, ignore_eos=True).tokens[0] for prompt in PROMPTS]
    except OutriderError as error:
        return {"result": REFUSED, "why": _sentence(error)}
    except TimeoutError:
        raise
    except Exception as error:
        return {"result": CRASH, "why": _sentence(error)}
    if alone != expected:
        return {"result": WRONG, "why": f"alone: {_difference(alone, expected)}"}
    try:
        together = decoder.generate(PROMPTS, NEW, plan=plan, ignore_eos=True).tokens
    except IncompatibleError as error:
        return {"result": EXACT, "why": f"one prompt at a time: {_sentence(error)}"}
    except TimeoutError:
        raise
    except Exception as error:
        return {"result": CRASH, "why": _sentence(error)}
    return {"result": EXACT} if together == expected else {"result": WRONG, "why": _difference(together, expected)}


def _difference(found: list[list[int]], expected: list[list[int]]) -> str:
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    return f"{same} of {len(expected)} texts are generate's"


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Interrupt what takes the processor longer, however busy the machine is."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def tables(result: dict[str, Any]) -> list[str]:
    """Return how many types came out how, the names of those that are exact in every way, and a row for each other."""
    types: dict[str, dict[str, Any]] = result["types"]
    counts = Counter(one["result"] for one in types.values())
    whole = [kind for kind, one in types.items() if {way["result"] for way in one.get("ways", {}).values()} == {EXACT}]
    return [
        table(["result", "types"], ([name, str(count)] for name, count in counts.most_common())),
        f"Exact in all four ways ({len(whole)}): {', '.join(f'`{kind}`' for kind in whole)}.",
        table(["the others", *WAYS, "why"], (_row(kind, one) for kind, one in types.items() if kind not in whole)),
    ]


def _row(kind: str, one: dict[str, Any]) -> list[str]:
    ways = one.get("ways", {})
    told = [one.get("why"), *(way.get("why") for way in ways.values())]
    results = [ways[name]["result"] if ways else NOTHING for name in WAYS]
    return [f"`{kind}`", *results, "; ".join(dict.fromkeys(re.sub(r"\b\w+Error: ", "", why) for why in told if why))]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--types", nargs="*", help="default: those that the file of --out does not have yet")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    conditions = {"transformers": transformers.__version__, "torch": torch.__version__, "new_tokens": NEW}
    found = _kept(arguments.out, conditions)
    for kind in arguments.types or [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in found]:
        found[kind] = _tried(kind)
        ways = " ".join(f"{name}: {way['result']}" for name, way in found[kind].get("ways", {}).items())
        print(f"{kind:28} {found[kind]['result']:20} {ways} {found[kind].get('why', '')[:110]}", flush=True)
        write({"conditions": conditions, "types": dict(sorted(found.items()))}, arguments.out)
    result = {"conditions": conditions, "types": dict(sorted(found.items()))}
    publish(result, arguments.out, tables(result))
    counts = Counter(one["result"] for one in found.values())
    return 1 if counts[WRONG] or counts[CRASH] else 0


def _kept(out: Path | None, conditions: dict[str, Any]) -> dict[str, Any]:
    """Return what an earlier run under the same conditions found."""
    if out is None or not out.is_file():
        return {}
    earlier = json.loads(out.read_text(encoding="utf-8"))
    return dict(earlier["types"]) if earlier["conditions"] == conditions else {}


def _tried(kind: str) -> dict[str, Any]:
    try:
        with limited(SECONDS):
            return try_type(kind)
    except TimeoutError as error:
        return {"result": NOT_BUILT, "why": str(error)}


if __name__ == "__main__":
    sys.exit(main())
