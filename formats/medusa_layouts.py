"""Medusa heads in the layout of the method's own repository, and in vLLM's.

The repository's (TGI reads it, too) is `medusa_lm_head.safetensors` with `{head}.{block}.linear.weight`,
`{head}.{block}.linear.bias` and, after the L blocks, `{head}.{L}.weight`; every head has an output embedding of its
own over the whole vocabulary. vLLM's has `blocks.{head}.layers.{block}`, `lm_heads.{head}` (or `lm_heads.0` for all of
them) and, of a pruned vocabulary, `token_map` with the target id of each row.

Shapes: H hidden size, V target vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import torch
from torch import Tensor

from ..common import BadInputError, IncompatibleError
from ..heads import Medusa, MedusaConfig
from ..targets import Target
from .base_layout import DrafterFiles, ExportLayout, Fields, Unsupported, fill, pruned_lacking
from .engine_logits import ProbeSequence, medusa_logits, output_table
from .llama import require_same_rows

FILE = "medusa_lm_head.safetensors"


class MedusaRepository(ExportLayout[Medusa, MedusaConfig]):
    """Medusa heads as the method's own repository, and TGI, read them."""

    name = "medusa"
    drafter = "medusa"

    def lacks(self, config: MedusaConfig, num_layers: int) -> list[Unsupported]:
        return pruned_lacking(config, "its heads cover the whole vocabulary", "draft_vocab_size: 0, or export to vllm")

    def write(self, drafter: Medusa, target: Target, depth: int) -> DrafterFiles:
        config = drafter.config
        state = drafter.state_dict()
        tensors = dict[str, Tensor]()
        for i in range(config.num_heads):
            for j in range(config.num_layers):
                weight = state[f"{_block(i, j)}.weight"]
                bias = state.get(f"{_block(i, j)}.bias")
                tensors[f"{i}.{j}.linear.weight"] = weight
                tensors[f"{i}.{j}.linear.bias"] = weight.new_zeros(len(weight)) if bias is None else bias
            tensors[f"{i}.{config.num_layers}.weight"] = _output(drafter, i, target)
        values = {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": target.place,
        }
        return DrafterFiles(values, tensors)

    def save(self, drafter: Medusa, target: Target, folder: Path, depth: int) -> None:
        self.write(drafter, target, depth).save(folder, FILE)

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        same = as_vllm(files)
        return medusa_logits(same.tensors, same.config, passage)

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        return "medusa_num_heads" in config

    def read(self, files: DrafterFiles, target: Target) -> Medusa:
        return MedusaVllm().read(as_vllm(files), target)


class MedusaVllm(ExportLayout[Medusa, MedusaConfig]):
    """Medusa heads as vLLM names them."""

    name = "medusa-vllm"
    drafter = "medusa"
    optional = ("token_map",)

    def write(self, drafter: Medusa, target: Target, depth: int) -> DrafterFiles:
        config, state = drafter.config, drafter.state_dict()
        tensors = {theirs: state[ours] for ours, theirs in _names(drafter)}
        if config.share_lm_head:
            tensors["lm_heads.0.weight"] = _output(drafter, 0, target)
        elif drafter.output_ids is not None:
            heads = [f"lm_heads.{i}.weight" for i in range(config.num_heads)]
            tensors |= {name: _widened(tensors[name], drafter) for name in heads}
        if drafter.output_ids is not None:
            tensors["token_map"] = drafter.token_ids
        values = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.draft_vocab_size if config.share_lm_head else config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "max_paths": 64,
            "topk": 10,
            "medusa_fc_bias": config.bias,
            "original_lm_head": config.share_lm_head,
            "logit_scale": target.logit_scale,
        }
        return DrafterFiles(values, tensors)

    def logits(self, files: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        logits = medusa_logits(files.tensors, files.config, passage)
        return _proposable(logits, files.tensors.get("token_map"))

    def recognises(self, config: Fields, names: Set[str]) -> bool:
        return config.get("model_type") == "medusa" and "medusa_num_heads" not in config

    def read(self, files: DrafterFiles, target: Target) -> Medusa:
        config, tensors = files.config, files.tensors
        if config.get("logit_scale", 1.0) != target.logit_scale:
            raise IncompatibleError(
                f"{files.config_file}: logit_scale differs from the target's, {target.logit_scale}."
            )
        ids, shared = tensors.get("token_map"), bool(config.get("original_lm_head"))
        settings = MedusaConfig(
            num_heads=int(config["num_heads"]),
            num_layers=int(config["num_hidden_layers"]),
            bias=any(name.endswith(".bias") and tensors[name].any() for name in tensors),
            share_lm_head=shared,
            draft_vocab_size=0 if ids is None else len(ids),
        )
        drafter = Medusa(Medusa.fitted(settings, target))
        if shared and (output := tensors.get("lm_heads.0.weight")) is not None:
            rows = output_table(target).cpu()
            require_same_rows(output, rows if ids is None else rows[ids], "shared lm_heads.0", files.folder, 2e-2)
        order = slice(None) if ids is None else ids.argsort()
        weights = {ours: tensors[theirs] for ours, theirs in _names(drafter) if theirs in tensors}
        for name in [name for name in weights if name.endswith("lm_head.weight")]:
            wide = ids is not None and len(weights[name]) > len(ids)  # as `_widened` has them
            weights[name] = (weights[name][ids] if wide else weights[name])[order]
        weights["token_ids"] = torch.arange(target.vocab_size) if ids is None else ids[order]
        known = {theirs for _, theirs in _names(drafter)} | {"token_map"}
        known |= {"lm_heads.0.weight"} if shared else set()
        # Blocks without a bias are written with one of zeros, which is the same.
        known |= {name for name in tensors if name.endswith(".bias") and not settings.bias}
        fill(drafter, weights, [name for name in tensors if name not in known], str(files.folder))
        return drafter

    def shapes(self, config: Fields) -> dict[str, tuple[int, ...]]:
        size = config["hidden_size"]
        heads = range(config["num_heads"])
        shared = bool(config.get("original_lm_head"))
        # Of embeddings of the heads' own, vLLM makes room for the whole vocabulary.
        rows = (config.get("truncated_vocab_size") if shared else None) or config["vocab_size"]
        blocks = [f"blocks.{i}.layers.{j}" for i in heads for j in range(config["num_hidden_layers"])]
        shapes: dict[str, tuple[int, ...]] = {f"{block}.weight": (size, size) for block in blocks}
        shapes |= {f"{block}.bias": (size,) for block in blocks if config.get("medusa_fc_bias")}
        return shapes | {f"lm_heads.{i}.weight": (rows, size) for i in heads if i == 0 or not shared}


def _block(head: int, index: int) -> str:
    """Return our name of the product of a head's block."""
    return f"heads.{head}.{f'others.{index - 1}' if index else 'first'}.linear"


def _names(drafter: Medusa) -> list[tuple[str, str]]:
    """Return our name and vLLM's of every tensor that the heads have of their own."""
    config, names = drafter.config, list[tuple[str, str]]()
    for i in range(config.num_heads):
        for j in range(config.num_layers):
            kinds = ("weight", "bias") if config.bias else ("weight",)
            names += [(f"{_block(i, j)}.{kind}", f"blocks.{i}.layers.{j}.{kind}") for kind in kinds]
        if not config.share_lm_head:
            names.append((f"heads.{i}.lm_head.weight", f"lm_heads.{i}.weight"))
    return names


def _output(drafter: Medusa, index: int, target: Target) -> Tensor:
    """Return the output embedding of the head at `index`, `[V', H]`: its own, or rows of the target's."""
    own = drafter.head(index).lm_head
    if own is not None:
        return own.weight
    table = output_table(target)
    return table if drafter.output_ids is None else table[drafter.token_ids.to(table.device)]


def _widened(output: Tensor, drafter: Medusa) -> Tensor:
    """Return a head's own output embedding `[V', H]` as the `[V, H]` that vLLM expects.

    Every token that is not the head's gets the mean of all rows: its logit is the mean of theirs, hence never the
    highest, and vLLM proposes nothing but the highest.
    """
    wide = output.float().mean(0).to(output.dtype).expand(drafter.config.vocab_size, -1)
    return wide.index_copy(0, drafter.token_ids.to(output.device), output)


def _proposable(logits: Tensor, ids: Tensor | None) -> Tensor:
    """Return logits `[k, V]` with −inf for tokens that are not the heads' own, if those are never the highest."""
    if ids is None:
        return logits
    others = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
    others[ids.to(logits.device)] = False
    if not others.any():
        return logits
    never = logits[:, others].amax(-1) < logits[:, ~others].amax(-1)
    return logits.masked_fill(others & never[:, None], -torch.inf)


def as_vllm(files: DrafterFiles) -> DrafterFiles:
    """Return a checkpoint of the repository under vLLM's names, as vLLM reads it.

    Raises BadInputError if the config names no heads.
    """
    heads, layers = (files.config.get(f"medusa_num_{name}") for name in ("heads", "layers"))
    if not heads or not layers:
        raise BadInputError(f"{files.config_file}: medusa_num_heads and medusa_num_layers must be 1 or more.")
    tensors = {_vllm_name(name): tensor for name, tensor in files.tensors.items()}
    bias = any(name.endswith(".bias") for name in tensors)
    return DrafterFiles(
        {"num_heads": heads, "num_hidden_layers": layers, "medusa_fc_bias": bias}, tensors, files.folder
    )


def _vllm_name(name: str) -> str:
    plain = name.removeprefix("medusa_head.").removeprefix("medusa_heads.")
    head, block, *rest = [*plain.split("."), ""]
    if not (head.isdigit() and block.isdigit()):
        return name
    return f"blocks.{head}.layers.{block}.{rest[1]}" if rest[0] == "linear" else f"lm_heads.{head}.{rest[0]}"
