"""Faults as exports have in the field, planted into an EAGLE-3 export in the `speculators` layout.

`FAULTS[name](folder)` changes the files in `folder`, and leaves the files beside them (written.json, served.json) as
they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Plant = Callable[[Path], None]
Tensors = dict[str, Tensor]
TAPS = "eagle_aux_hidden_state_layer_ids"


def edit_config(change: Callable[[dict[str, Any]], object], name: str = "config.json") -> Plant:
    def plant(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return plant


def edit_tensors(change: Callable[[Tensors], object]) -> Plant:
    """Return a fault of the weights; `change` may return other tensors, or change those that it is given."""

    def plant(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        changed = change(tensors)
        kept: Tensors = changed if isinstance(changed, dict) else tensors
        save_file({n: t.contiguous() for n, t in kept.items()}, file, metadata={"format": "pt"})

    return plant


def renamed(name: Callable[[str], str]) -> Plant:
    return edit_tensors(lambda tensors: {name(n): t for n, t in tensors.items()})


def _exchange(one: str, other: str) -> Plant:
    return edit_tensors(lambda t: t | {one: t[other], other: t[one]})


def _replace(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    return edit_tensors(lambda t: t | {name: change(t[name])})


def _shift_taps(by: int) -> Plant:
    return edit_config(lambda config: config.update({TAPS: [tap + by for tap in config[TAPS]]}))


def _flip(flag: str) -> Plant:
    return edit_config(lambda config: config.update({flag: not config[flag]}))


def _interleaved(weight: Tensor) -> Tensor:
    """Return a projection's rows in the order of interleaved rotary positions (heads of the embedded recipe: 32)."""
    size = 32 if len(weight) % 32 == 0 else 8
    heads = weight.view(len(weight) // size, 2, size // 2, -1)
    return heads.transpose(1, 2).reshape(weight.shape)


def _rope_base(config: dict[str, Any]) -> None:
    layer = config["transformer_layer_config"]
    layer["rope_parameters"]["rope_theta"] = layer["rope_theta"] = 100.0


def _rolled(d2t: Tensor) -> Tensor:
    """Return the offsets by which each draft id stands for the token of the one before it."""
    numbers = torch.arange(len(d2t))
    return (numbers + d2t).roll(1) - numbers


def _untrained(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name.endswith("norm.weight") or "norm." in name:
            tensors[name] = torch.ones_like(tensor)
        elif tensor.is_floating_point():
            generator = torch.Generator().manual_seed(7)
            tensors[name] = (torch.rand(tensor.shape, generator=generator) - 0.5) * 0.1


def _stale_embeddings(tensors: Tensors) -> None:
    rows, width = tensors["lm_head.weight"].shape
    shape = (len(tensors["t2d"]) if "t2d" in tensors else rows, width)
    tensors["embed_tokens.weight"] = torch.randn(shape, generator=torch.Generator().manual_seed(5))


def _deeper(launch: dict[str, Any]) -> None:
    launch["settings"]["num_speculative_tokens"] += 1


FAULTS: dict[str, Plant] = {
    "taps one too low": _shift_taps(-1),
    "taps one too high": _shift_taps(1),
    "taps missing": edit_config(lambda config: config.pop(TAPS)),
    "taps' columns in another order": _replace("fc.weight", lambda w: w.roll(w.shape[1] // 3, 1)),
    "norm of the taps flipped": _flip("fc_norm"),
    "norm of the output flipped": _flip("norm_output"),
    "norm before the residual flipped": _flip("norm_before_residual"),
    "norm before the residual missing": edit_config(lambda config: config.pop("norm_before_residual")),
    "d2t as ids": _replace("d2t", lambda d2t: d2t + torch.arange(len(d2t))),
    "d2t rolled by one": _replace("d2t", _rolled),
    "rope base": edit_config(_rope_base),
    "rope interleaved": edit_tensors(
        lambda t: t | {n: _interleaved(t[n]) for n in t if n.endswith(("q_proj.weight", "k_proj.weight"))}
    ),
    "depth off by one": edit_config(_deeper, "launch.json"),
    "gate and up swapped": _exchange("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"),
    "norms of the first layer swapped": _exchange("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"),
    "o_proj transposed": _replace("layers.0.self_attn.o_proj.weight", lambda w: w.T),
    "stale embeddings": edit_tensors(_stale_embeddings),
    "final norm lost": _replace("norm.weight", torch.ones_like),
    "output rows shuffled": _replace("lm_head.weight", lambda w: w.roll(1, 0)),
    "untrained weights": edit_tensors(_untrained),
}
assert len(FAULTS) == 20
