"""EAGLE-3 heads that the `speculators` package trained (the format that vLLM reads), as ours.

Its numbering of taps is ours: `eagle_aux_hidden_state_layer_ids` are HF `hidden_states` indices (SGLang and SpecForge
name the same tensors one lower: the output of layer i). Only the last one differs: it means the state before the
target's final norm, which `Target` does not give. `d2t` holds offsets: draft token i is target token i + d2t[i].
Positions start one later there, which rotary embeddings do not see.

Its own loader fills what is missing with random weights; this one refuses whatever it would have to guess or drop.

Shapes: V target vocabulary, V' draft vocabulary, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from ..ground import BadInputError, IncompatibleError
from ..heads import Eagle3, Eagle3Config
from ..heads.base import CONFIG, read_config
from ..targets import Target
from ..targets.loading import refuse_pickles

# Names in the format and ours: of single tensors, and of beginnings.
_SINGLE = ("fc.weight", "norm.weight", "lm_head.weight")
_FIRST, _FIRST_OURS = "layers.0.", "layer."
_TAP_NORMS = {False: ("fc_norm.", "tap_norms."), True: ("input_norm.", "tap_norms.0.")}  # by norm_before_fc
# What is there beside the head: the target's embeddings, two vocabulary maps, and copies that only training reads.
_EMBEDDINGS = "embed_tokens.weight"
_BESIDE = (_EMBEDDINGS, "d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def load_speculators(folder: str | Path, target: Target) -> Eagle3:
    """Return the EAGLE-3 head in `folder`, saved by `speculators`, as a drafter for `target`.

    Raises:
        BadInputError: no such checkpoint, another kind of one, or a damaged one.
        IncompatibleError: made for another target, or with an option that our head does not have.
    """
    folder = Path(folder)
    values = read_config(folder)
    kind = values.get("speculators_model_type")
    if kind != "eagle3":
        raise BadInputError(
            f"{folder / CONFIG}: expected an EAGLE-3 head (speculators_model_type: eagle3), found {kind!r}."
        )
    config = eagle3_config(values, target, str(folder / CONFIG))
    head = Eagle3(config)
    _fill(head, _read(folder), target, folder)
    head.check(target)
    return head.eval()


def eagle3_config(values: dict[str, Any], target: Target, where: str) -> Eagle3Config:
    """Return our config of theirs, a config.json of `speculators`.

    Raises:
        IncompatibleError: an option that our head does not have; all of them are named.
    """
    layer: Any = LlamaConfig(
        **{k: v for k, v in values.get("transformer_layer_config", {}).items() if k != "model_type"}
    )
    taps = values.get("eagle_aux_hidden_state_layer_ids") or (2, target.num_layers // 2, target.num_layers - 3)
    if problems := _unknown_to_us(values, layer, taps, target):
        raise IncompatibleError(
            f"{where}: {'; '.join(problems)}. Our EAGLE-3 head cannot do that; train it without, or import another one."
        )
    proposals = values.get("speculators_config", {}).get("proposal_methods") or [{}]
    return Eagle3Config(
        taps=tuple(taps),
        steps=int(proposals[0].get("speculative_tokens") or Eagle3Config.steps),
        draft_vocab_size=int(values["draft_vocab_size"]),
        vocab_size=layer.vocab_size,
        norm_taps=bool(values.get("fc_norm")),
        norm_output=bool(values.get("norm_output")),
        norm_before_fc=bool(values.get("norm_before_fc")),
        norm_before_residual=bool(values.get("norm_before_residual")),
        num_layers=layer.num_hidden_layers,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        head_dim=layer.head_dim,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=layer.num_key_value_heads,
        rms_norm_eps=layer.rms_norm_eps,
        rope_parameters=dict(layer.rope_parameters),
        max_position_embeddings=layer.max_position_embeddings,
    )


def _unknown_to_us(values: dict[str, Any], layer: Any, taps: Any, target: Target) -> list[str]:
    """Return what their head does that ours cannot, each in a few words."""
    theirs = values.get("transformer_layer_config", {})
    found = ["embed_requires_grad: true"] if values.get("embed_requires_grad") else []
    found += [f"{name}: true" for name in ("attention_bias", "mlp_bias") if getattr(layer, name, False)]
    if (kind := theirs.get("model_type", "qwen3")) != "llama":
        found.append(f"layers of the kind {kind!r} instead of 'llama'")
    if layer.hidden_act != "silu":
        found.append(f"hidden_act: {layer.hidden_act!r} instead of 'silu'")
    if "sliding_attention" in (theirs.get("layer_types") or []):
        found.append(f"a sliding window of {theirs.get('sliding_window')} tokens")
    if target.num_layers in taps:
        found.append(f"tap {target.num_layers}, the target's last state before its final norm")
    return found


def _read(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint."""
    refuse_pickles(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInputError(f"{folder}: no *.safetensors there.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise BadInputError(f"{file}: damaged or not a safetensors file ({error}).") from error
    return tensors


def _fill(head: Eagle3, theirs: dict[str, Tensor], target: Target, folder: Path) -> None:
    """Load the weights into `head`, each of them and nothing else."""
    own = head.state_dict()
    weights = {_ours(name, head.config): tensor for name, tensor in theirs.items() if name not in _BESIDE}
    weights["token_ids"] = _token_ids(theirs, head.config, folder)
    problems = [f"missing {name}" for name in own.keys() - weights.keys()] + [
        f"unexpected {name}" for name in weights.keys() - own.keys()
    ]
    problems += [
        f"{name} is {tuple(weights[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if own[name].shape != weights[name].shape
    ]
    if problems:
        raise IncompatibleError(
            f"{folder}: the tensors do not fit its {CONFIG}: {'; '.join(sorted(problems)[:4])} (names as in our head)."
        )
    _check_embeddings(theirs.get(_EMBEDDINGS), target, folder)
    # Ours are ascending: whatever the order there, ids and rows move together.
    order = weights["token_ids"].argsort()
    weights["token_ids"], weights["lm_head.weight"] = weights["token_ids"][order], weights["lm_head.weight"][order]
    head.load_state_dict(weights)


def _ours(name: str, config: Eagle3Config) -> str:
    """Return our name of their tensor; an unknown one stays as it is, and is refused as unexpected."""
    if name in _SINGLE:
        return name
    if name.startswith(_FIRST):
        return _FIRST_OURS + name.removeprefix(_FIRST)
    tap_norms, tap_norms_ours = _TAP_NORMS[config.norm_before_fc]
    if name.startswith(tap_norms):
        return tap_norms_ours + name.removeprefix(tap_norms)
    start, number, rest = [*name.split(".", 2), "", ""][:3]
    return f"others.{int(number) - 1}.{rest}" if start == "layers" and number.isdigit() else name


def _token_ids(theirs: dict[str, Tensor], config: Eagle3Config, folder: Path) -> Tensor:
    """Return the target id of each draft token, `[V']`."""
    every = torch.arange(config.draft_vocab_size)
    if "d2t" not in theirs:
        if config.draft_vocab_size < config.vocab_size:
            raise BadInputError(
                f"{folder}: d2t is missing, but the draft vocabulary has {config.draft_vocab_size} of "
                f"{config.vocab_size} tokens."
            )
        return every
    offsets = theirs["d2t"]
    if offsets.shape != every.shape:
        raise BadInputError(f"{folder}: d2t has the shape {tuple(offsets.shape)}, expected {tuple(every.shape)}.")
    ids = every + offsets.long()
    kept = torch.zeros(config.vocab_size, dtype=torch.bool)
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) < len(ids):
        raise BadInputError(
            f"{folder}: d2t does not name {len(ids)} different tokens of the {config.vocab_size} (it holds offsets: "
            "token i + d2t[i])."
        )
    kept[ids] = True
    if "t2d" in theirs and not torch.equal(kept, theirs["t2d"].bool()):
        raise BadInputError(f"{folder}: d2t and t2d name different tokens.")
    return ids


@torch.no_grad()
def _check_embeddings(theirs: Tensor | None, target: Target, folder: Path) -> None:
    """Refuse another target's embeddings: ours reads the target's own, and the copy must be the same up to rounding."""
    if theirs is None:
        return
    if theirs.shape != (target.vocab_size, target.hidden_size):
        raise IncompatibleError(
            f"{folder}: made for embeddings of the shape {tuple(theirs.shape)}, the target's is "
            f"{(target.vocab_size, target.hidden_size)}."
        )
    own = target.embed(torch.arange(target.vocab_size, device=target.device)[None])[0].float().cpu()
    rounding = max(torch.finfo(theirs.dtype).eps, torch.finfo(target.dtype).eps)
    if not torch.allclose(theirs.float(), own, rtol=2 * rounding, atol=1e-6):
        raise IncompatibleError(
            f"{folder}: its {_EMBEDDINGS} differs from the target's embeddings: it was made for another target."
        )
