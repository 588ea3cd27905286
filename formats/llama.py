"""Parts that layouts of Llama-like heads share: the config of their layers, and copies of the target's embeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from ..common import BadInputError, IncompatibleError
from ..heads.decoder_layer import LayerConfig, LayerDrafter, full_rope
from ..targets import Target
from ..targets.layers import ROPES

EMBEDDINGS, SLIDING = "embed_tokens.weight", "sliding_attention"
# Sizes by their names in a Llama's config.json; ours has one of them under another name.
_SIZES: tuple[str, ...] = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_SIZES += ("num_attention_heads", "num_key_value_heads", "head_dim")
_OURS = {"num_hidden_layers": "num_layers"}


def llama_config(config: LayerConfig, window: int = 0) -> dict[str, Any]:
    """Return a Llama's config.json for a head's layers, all with this sliding window, as engines read it.

    Rotary positions are written twice: as `transformers` 5 has them, and as older readers look for them.
    """
    sliding = {"layer_types": [SLIDING] * config.num_layers, "sliding_window": window, "use_sliding_window": True}
    rope = config.rope
    is_scaled = rope["rope_type"] != "default"
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **{name: getattr(config, _OURS.get(name, name)) for name in _SIZES},
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if is_scaled else None,
        **(sliding if window else {}),
    }


def require_fields(config: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Refuse a config.json without one of these fields."""
    for name in names:
        if config.get(name) is None:
            raise BadInputError(f"{where}: {name} is missing; nothing else says what the drafter reads.")


def layer_sizes(layer: dict[str, Any], where: str, problems: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sizes of our layers, from the config of theirs.

    `problems`: other features of the head that ours lacks.

    Raises IncompatibleError if there are problems, layers of another kind than Llama's, or with what ours do not have.
    """
    # The library writes into what it is given.
    llama: Any = LlamaConfig(**copy.deepcopy({k: v for k, v in layer.items() if k != "model_type"}))
    for name in _SIZES:
        size = getattr(llama, name, None)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise BadInputError(f"{where}: {name} must be a whole number of 1 or more, found {size!r}.")
    if problems := [*problems, *_unknown_to_layers(layer, llama)]:
        raise IncompatibleError(
            f"{where}: {'; '.join(problems)}. Our head cannot do that; train it without, or import another one."
        )
    return {
        **{_OURS.get(name, name): getattr(llama, name) for name in _SIZES},
        "rms_norm_eps": llama.rms_norm_eps,
        "rope_parameters": full_rope(llama.rope_parameters, llama.max_position_embeddings),
        "max_position_embeddings": llama.max_position_embeddings,
        **({"sliding_window": int(layer.get("sliding_window") or 0)} if SLIDING in _kinds(layer) else {}),
    }


def _kinds(layer: dict[str, Any]) -> set[str]:
    """Return the kinds of attention of their layers."""
    return set(layer.get("layer_types") or [])


def _unknown_to_layers(layer: dict[str, Any], llama: Any) -> list[str]:
    """Return the abilities of their layers that ours lack, each in a few words."""
    problems = [f"{name}: true" for name in ("attention_bias", "mlp_bias") if getattr(llama, name, False)]
    if (kind := layer.get("model_type", "qwen3")) != "llama":
        problems.append(f"layers of the kind {kind!r} instead of 'llama'")
    if llama.hidden_act != "silu":
        problems.append(f"hidden_act: {llama.hidden_act!r} instead of 'silu'")
    if len(_kinds(layer)) > 1:
        problems.append("layers with a sliding window and layers without one")
    return problems + _unknown_to_rotary(layer, llama.rope_parameters)


def _unknown_to_rotary(layer: dict[str, Any], rope: dict[str, Any]) -> list[str]:
    """Return the abilities of their rotary positions that ours lack, each in a few words."""
    if any(isinstance(part, dict) for part in rope.values()):
        return ["rope_parameters by kinds of layers, which engines read as a base of 10,000"]
    problems = []
    if (kind := rope.get("rope_type")) not in list(ROPES):
        problems.append(f"rotary positions of the type {kind!r} instead of {', '.join(ROPES)}")
    turned = layer.get("partial_rotary_factor") or rope.get("partial_rotary_factor")
    if turned not in (None, 1, 1.0):
        problems.append(f"partial_rotary_factor: {turned}, so that positions turn a part of each head")
    if not layer.get("is_neox_style", True):
        problems.append("is_neox_style: false, so that neighbours turn in pairs")
    problems += [f"{name}: {rope[name]}, of positions in images" for name in sorted(rope) if name.startswith("mrope")]
    return problems


@torch.no_grad()
def check_embeddings(theirs: Tensor | None, target: Target, folder: Path) -> None:
    """Refuse another target's embeddings: ours are the target's own, and the copy must be the same up to rounding."""
    if theirs is not None:
        own = target.embed(torch.arange(target.vocab_size, device=target.device)[None])[0]
        require_same_rows(theirs, own, EMBEDDINGS, folder)


def require_same_rows(theirs: Tensor, own: Tensor, name: str, folder: Path, tolerance: float | None = None) -> None:
    """Refuse a copy of the target's embeddings or output embedding that is another target's.

    Args:
        own: the target's rows, `[V, H]`.
        tolerance: the relative difference that passes; None for the rounding of the coarser dtype.
    """
    if theirs.shape != own.shape:
        raise IncompatibleError(
            f"{folder}: its {name} has the shape {tuple(theirs.shape)}, the target's {tuple(own.shape)}: it was made "
            "for another target."
        )
    rounding = 2 * max(torch.finfo(theirs.dtype).eps, torch.finfo(own.dtype).eps)
    if not torch.allclose(theirs.float(), own.float().cpu(), rtol=tolerance or rounding, atol=1e-6):
        raise IncompatibleError(f"{folder}: its {name} differs from the target's: it was made for another target.")


def shapes_of(
    head: type[LayerDrafter], settings: LayerConfig, named: Callable[[str], str] = str
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a head's tensors, by the names that `named` makes of ours; by default the same."""
    with torch.device("meta"):
        made = head(settings)
    return {named(name): tuple(t.shape) for name, t in made.state_dict().items() if name != "token_ids"}
