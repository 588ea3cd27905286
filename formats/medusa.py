"""Medusa heads in the layout of the method's own repository, and in vLLM's.

The repository's (TGI reads it, too) is `medusa_lm_head.safetensors` with `{head}.{block}.linear.weight`,
`{head}.{block}.linear.bias` and, after the L blocks, `{head}.{L}.weight`; every head has an output embedding of its
own over the whole vocabulary. vLLM's has `blocks.{head}.layers.{block}`, `lm_heads.{head}` (or `lm_heads.0` for all of
them) and, of a pruned vocabulary, `token_map` with the target id of each row.

Shapes: H hidden size, V target vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common import BadInputError, IncompatibleError
from ..heads import Drafter, DrafterConfig, Medusa, MedusaConfig
from ..heads.medusa import Head, MedusaBlock
from ..targets import Target
from .drafter_files import DrafterFiles, fill
from .layout import ExportLayout, Unsupported
from .reading import ProbeSequence, medusa_logits, output_table

FILE = "medusa_lm_head.safetensors"


class MedusaRepository(ExportLayout):
    """Medusa heads as the method's own repository, and TGI, read them."""

    name = "medusa"
    drafter = "medusa"

    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        assert isinstance(config, MedusaConfig)
        if config.draft_vocab_size in (0, config.vocab_size):
            return []
        why = "its heads speak of the whole vocabulary"
        return [
            Unsupported(f"draft_vocab_size: {config.draft_vocab_size}", why, "draft_vocab_size: 0, or export to vllm")
        ]

    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        assert isinstance(drafter, Medusa)
        tensors: dict[str, Tensor] = {}
        for i, head in enumerate(_heads(drafter)):
            for j, block in enumerate(_blocks(head)):
                weight = block.linear.weight
                tensors[f"{i}.{j}.linear.weight"] = weight
                bias = block.linear.bias
                tensors[f"{i}.{j}.linear.bias"] = weight.new_zeros(len(weight)) if bias is None else bias
            tensors[f"{i}.{drafter.config.num_layers}.weight"] = _output(head, drafter, target)
        config = {
            "medusa_num_heads": drafter.config.num_heads,
            "medusa_num_layers": drafter.config.num_layers,
            "base_model_name_or_path": target.source.get("path") or "",
        }
        return DrafterFiles(config, tensors)

    def save(self, drafter: Drafter, target: Target, folder: Path, depth: int) -> None:
        self.write(drafter, target, depth).save(folder, FILE)

    def logits(self, found: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        return medusa_logits(*as_vllm(found), passage)

    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        return "medusa_num_heads" in config

    def read(self, found: DrafterFiles, target: Target) -> Medusa:
        tensors, config = as_vllm(found)
        return _read(tensors, config, target, found)

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        return {}  # its config.json says no sizes


class MedusaVllm(ExportLayout):
    """Medusa heads as vLLM names them."""

    name = "medusa-vllm"
    drafter = "medusa"
    optional = ("token_map",)

    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        return []

    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        assert isinstance(drafter, Medusa)
        shared, pruned = drafter.config.share_lm_head, drafter.output_ids is not None
        tensors: dict[str, Tensor] = {}
        for i, head in enumerate(_heads(drafter)):
            for j, block in enumerate(_blocks(head)):
                tensors |= {f"blocks.{i}.layers.{j}.{n}": t for n, t in block.linear.named_parameters()}
            if not shared or i == 0:
                output = _output(head, drafter, target)
                tensors[f"lm_heads.{i}.weight"] = output if shared else _widened(output, drafter)
        if pruned:
            tensors["token_map"] = drafter.token_ids
        return DrafterFiles(_vllm_config(drafter, target), tensors)

    def logits(self, found: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        logits = medusa_logits(found.tensors, found.config, passage)
        return _proposable(logits, found.tensors.get("token_map"))

    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        return config.get("model_type") == "medusa" and "medusa_num_heads" not in config

    def read(self, found: DrafterFiles, target: Target) -> Medusa:
        return _read(found.tensors, found.config, target, found)

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        size, heads, shared = config["hidden_size"], range(config["num_heads"]), bool(config.get("original_lm_head"))
        # Of embeddings of the heads' own, vLLM makes room for the whole vocabulary.
        rows = (config.get("truncated_vocab_size") if shared else None) or config["vocab_size"]
        blocks = [f"blocks.{i}.layers.{j}" for i in heads for j in range(config["num_hidden_layers"])]
        found: dict[str, tuple[int, ...]] = {f"{block}.weight": (size, size) for block in blocks}
        found |= {f"{block}.bias": (size,) for block in blocks if config.get("medusa_fc_bias")}
        return found | {f"lm_heads.{i}.weight": (rows, size) for i in heads if i == 0 or not shared}


# ------------------------------------------------------------ writing


def _heads(drafter: Medusa) -> list[Head]:
    return [drafter.head(i) for i in range(drafter.config.num_heads)]


def _blocks(head: Head) -> Iterator[MedusaBlock]:
    yield head.first
    for block in head.others:
        assert isinstance(block, MedusaBlock)
        yield block


def _output(head: Head, drafter: Medusa, target: Target) -> Tensor:
    """Return the output embedding that a head uses, `[V', H]`: its own, or rows of the target's."""
    if head.lm_head is not None:
        return head.lm_head.weight
    table = output_table(target)
    return table if drafter.output_ids is None else table[drafter.token_ids.to(table.device)]


def _widened(output: Tensor, drafter: Medusa) -> Tensor:
    """Return a head's own output embedding `[V', H]` as `[V, H]`, for vLLM makes room for the whole vocabulary there.

    Every token that is not the head's gets the mean of all rows: its logit is the mean of theirs, hence never the
    highest, and vLLM proposes nothing but the highest.
    """
    if drafter.output_ids is None:
        return output
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


def _vllm_config(drafter: Medusa, target: Target) -> dict[str, Any]:
    config = drafter.config
    return {
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
        "logit_scale": logit_scale(target),
    }


def logit_scale(target: Target) -> float:
    """Return the factor that the target multiplies its logits with, which vLLM reads from a head's config.json."""
    divisor = getattr(target.config, "logits_scaling", None) or 1.0
    return float((getattr(target.config, "logit_scale", None) or 1.0) / divisor)


# ------------------------------------------------------------ reading


def as_vllm(found: DrafterFiles) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and config of the repository's layout under vLLM's names, as vLLM reads it.

    Raises:
        BadInputError: the config names no heads.
    """
    heads, layers = (found.config.get(f"medusa_num_{name}") for name in ("heads", "layers"))
    if not heads or not layers:
        raise BadInputError(f"{found.config_file}: medusa_num_heads and medusa_num_layers must be 1 or more.")
    tensors = {_vllm_name(name): tensor for name, tensor in found.tensors.items()}
    bias = any(name.endswith(".bias") for name in tensors)
    return tensors, {"num_heads": heads, "num_hidden_layers": layers, "medusa_fc_bias": bias}


def _vllm_name(name: str) -> str:
    plain = name.removeprefix("medusa_head.").removeprefix("medusa_heads.")
    head, block, *rest = [*plain.split("."), ""]
    if not (head.isdigit() and block.isdigit()):
        return name
    if rest[0] == "linear":
        return f"blocks.{head}.layers.{block}.{rest[1]}"
    return f"lm_heads.{head}.{rest[0]}"


def _read(tensors: dict[str, Tensor], config: dict[str, Any], target: Target, found: DrafterFiles) -> Medusa:
    """Return the heads that vLLM's names and config say."""
    if config.get("logit_scale", 1.0) != logit_scale(target):
        raise IncompatibleError(f"{found.config_file}: logit_scale differs from the target's, {logit_scale(target)}.")
    ids, shared = tensors.get("token_map"), bool(config.get("original_lm_head"))
    settings = MedusaConfig(
        num_heads=int(config["num_heads"]),
        num_layers=int(config["num_hidden_layers"]),
        bias=any(name.endswith(".bias") and tensors[name].any() for name in tensors),
        share_lm_head=shared,
        draft_vocab_size=0 if ids is None else len(ids),
    )
    drafter = Medusa(Medusa.fitted(settings, target))
    _require_target_rows(tensors, ids, shared, target, found)
    order = slice(None) if ids is None else ids.argsort()
    weights = {ours: tensors[theirs] for ours, theirs in _names(drafter, shared) if theirs in tensors}
    for name in [name for name in weights if name.endswith("lm_head.weight")]:
        wide = ids is not None and len(weights[name]) > len(ids)  # as `_widened` has them
        weights[name] = (weights[name][ids] if wide else weights[name])[order]
    weights["token_ids"] = torch.arange(target.vocab_size) if ids is None else ids[order]
    known = {theirs for _, theirs in _names(drafter, shared)} | {"token_map"}
    known |= {"lm_heads.0.weight"} if shared else set()
    # Blocks without a bias are written with one of zeros, which says the same.
    known |= {name for name in tensors if name.endswith(".bias") and not settings.bias}
    fill(drafter, weights, [name for name in tensors if name not in known], str(found.folder))
    drafter.check(target)
    return drafter.eval()


def _names(drafter: Medusa, shared: bool) -> list[tuple[str, str]]:
    """Return our name and vLLM's of every tensor of these heads."""
    found = []
    for i in range(drafter.config.num_heads):
        for j in range(drafter.config.num_layers):
            ours = f"heads.{i}.{f'others.{j - 1}' if j else 'first'}.linear"
            kinds = ("weight", "bias") if drafter.config.bias else ("weight",)
            found += [(f"{ours}.{kind}", f"blocks.{i}.layers.{j}.{kind}") for kind in kinds]
        if not shared:
            found.append((f"heads.{i}.lm_head.weight", f"lm_heads.{i}.weight"))
    return found


def _require_target_rows(
    tensors: dict[str, Tensor], ids: Tensor | None, shared: bool, target: Target, found: DrafterFiles
) -> None:
    """Refuse a shared output embedding that is not the target's: ours is the target's own."""
    if not shared or "lm_heads.0.weight" not in tensors:
        return
    table = output_table(target).cpu()
    theirs, own = tensors["lm_heads.0.weight"], table if ids is None else table[ids]
    if theirs.shape != own.shape or not torch.allclose(theirs.float(), own.float(), rtol=2e-2, atol=1e-6):
        raise IncompatibleError(
            f"{found.folder}: its shared output embedding is not the target's: it was made for another target."
        )
