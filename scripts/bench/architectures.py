"""Try every causal language model type of the installed `transformers`, built small with random weights.

    python -m outrider.scripts.bench.architectures --out scripts/bench/results/architectures.json

Of each: can a small one be built; does the library generate with it; is Outrider's text the library's, token for token,
plainly, with drafts in a chain, in a tree, and with an EAGLE-3 head; and if it is refused, the sentence. A text that
differs, or an error that is no refusal, is a finding: exit code 1.
"""

from __future__ import annotations

import argparse
import json
import logging
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

from outrider.decode import Decoder, Plan
from outrider.ground import IncompatibleError, OutriderError
from outrider.ground.files import write_atomically
from outrider.heads import Drafter, Eagle3, Eagle3Config, Ngram, Suffix, SuffixConfig
from outrider.targets import Target

VOCAB, NEW, LAYERS = 192, 24, 6
PROMPTS = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() * 2 for n in (7, 4, 11)]
SECONDS = 120  # for one type
EXACT, REFUSED, WRONG, CRASH, NOT_BUILT = "exact", "refused", "wrong text", "crash", "not buildable here"

# What makes a config small, by the names that configs have for it.
_SIZES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input audio_vocab_size",
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers",
    64: "hidden_size n_embd d_model dim embedding_size input_embedding_size",
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


def small(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config with small sizes, its parts' too."""
    for part in (config, *_parts(config)):
        if hasattr(part, "allow_global_per_layer_attribute_access"):
            part.allow_global_per_layer_attribute_access = True
        rotated = isinstance(getattr(part, "qk_rope_head_dim", None), int)  # MLA: `head_dim` is that of what is rotated
        for name, size in _SMALL.items():
            if type(getattr(part, name, None)) is int:
                _set(part, name, 8 if rotated and name == "head_dim" else size)
        for name in ("layer_types", "layers_block_type", "block_types", "mlp_layer_types"):
            kinds = getattr(part, name, None)
            if isinstance(kinds, list) and kinds:
                _set(part, name, _some_of_each(kinds))
        for number, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
            if hasattr(part, name):
                _set(part, name, number)
    return config


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
    config = small(AutoConfig.for_model(kind))
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
    except Exception as error:
        return {"result": CRASH, "why": _sentence(error)}
    if alone != expected:
        return {"result": WRONG, "why": f"alone: {_difference(alone, expected)}"}
    try:
        together = decoder.generate(PROMPTS, NEW, plan=plan, ignore_eos=True).tokens
    except IncompatibleError as error:
        return {"result": EXACT, "why": f"one prompt at a time: {_sentence(error)}"}
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
    """Interrupt what takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for kind in arguments.types:
        try:
            with limited(SECONDS):
                found[kind] = try_type(kind)
        except TimeoutError as error:
            found[kind] = {"result": NOT_BUILT, "why": str(error)}
        ways = " ".join(f"{name}: {way['result']}" for name, way in found[kind].get("ways", {}).items())
        print(f"{kind:28} {found[kind]['result']:20} {ways} {found[kind].get('why', '')[:110]}", flush=True)
    counts = Counter(one["result"] for one in found.values())
    print(dict(counts))
    if arguments.out is not None:
        conditions = {"transformers": transformers.__version__, "torch": torch.__version__, "new_tokens": NEW}
        write_atomically(arguments.out, json.dumps({"conditions": conditions, "types": found}, indent=1) + "\n")
    return 1 if counts[WRONG] or counts[CRASH] else 0


if __name__ == "__main__":
    sys.exit(main())
