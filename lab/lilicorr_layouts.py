"""LiLiCorr as engines read it: NVIDIA's layout of its files, and what engines compute of them.

It is z-lab's layout of a DFlash, with the transformer's tensors beside. NVIDIA's and SGLang's feed-forwards are
numbered, vLLM's have names, as ours.

Shapes: k drafts, C candidates, H hidden size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..formats.base_layout import DrafterFiles, ExportLayout, Unsupported
from ..formats.blocks import BlockFlags, BlockKind
from ..formats.engine_logits import ProbeSequence, Weights
from ..formats.raw_blocks import ZLab
from ..heads import DFlash, DFlashConfig
from ..targets import Target
from .lilicorr import LiLiCorr, LiLiCorrConfig

# Parts of LiLiCorr's feed-forwards where they are numbered, and their names.
_NUMBERED = {
    ".feature_mlp.0.": ".feature_norm.",
    ".feature_mlp.1.": ".feature_mlp.up_proj.",
    ".feature_mlp.3.": ".feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
_SERVED_CANDIDATES = (1, 2, 4, 8, 16)


class LiLiCorrBlocks(ZLab):
    """LiLiCorr drafters as NVIDIA exports them.

    `numbered`: whether the transformer's feed-forwards are numbered.
    """

    windows = "sliding_window: 0"

    def __init__(self, numbered: bool = False):
        super().__init__(LILICORR)
        self.numbered = numbered

    def plain_name(self, name: str) -> str:
        return _renamed(super().plain_name(name), _NUMBERED)

    def lacks(self, config: DFlashConfig, num_layers: int) -> list[Unsupported]:
        assert isinstance(config, LiLiCorrConfig)
        lacks = super().lacks(config, num_layers)
        count = config.lilicorr_candidate_topk
        if count not in _SERVED_CANDIDATES:
            nearest = max(n for n in _SERVED_CANDIDATES if n <= count)
            setting = f"lilicorr_candidate_topk: {count}"
            lacks.append(Unsupported(setting, "engines serve 1, 2, 4, 8 or 16", f"lilicorr_candidate_topk: {nearest}"))
        return lacks

    def write(self, drafter: DFlash, target: Target, depth: int) -> DrafterFiles:
        written = super().write(drafter, target, depth)
        if not self.numbered:
            return written
        numbers = {name: number for number, name in _NUMBERED.items()}
        return DrafterFiles(written.config, {_renamed(name, numbers): t for name, t in written.tensors.items()})


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    """Return the name of a tensor with `parts` renamed, if it is the transformer's."""
    for old, new in parts.items() if name.startswith("lilicorr.") else ():
        name = name.replace(old, new)
    return name


def _correlated(
    weights: Weights, flags: BlockFlags, passage: ProbeSequence, anchor: Tensor, states: Tensor, logits: Tensor
) -> Tensor:
    """Return the scores of LiLiCorr's candidates after each draft of the passage, `[k, V]`; −inf for other tokens.

    A token that is no candidate passes for the first one; no engine drafts any.

    Args:
        anchor: the fused hidden state before the root, `[H]`.
        states: of the drafts, `[k, H]`.
        logits: from which candidates are taken, `[k, V]`.
    """
    at, chosen = "lilicorr.", flags.own
    scale, eps, count = (chosen[f"lilicorr_{name}"] for name in ("logit_scale", "vector_eps", "candidate_topk"))
    heads, drafts = chosen["lilicorr_num_heads"], len(states)

    def perceptron(name: str, x: Tensor) -> Tensor:
        return weights.linear(functional.silu(weights.linear(x, f"{at}{name}.up_proj")), f"{at}{name}.down_proj")

    best, candidates = logits.log_softmax(-1).topk(count)
    ranks = torch.arange(count).to(best)
    features = [best, best.exp(), best - best[:, :1], (ranks / max(count - 1, 1)).expand_as(best)]
    read = torch.stack([*features, (ranks == 0).to(best).expand_as(best)], -1)
    weight, bias = (weights(f"{at}feature_norm.{name}") for name in ("weight", "bias"))
    hidden = perceptron("feature_mlp", functional.layer_norm(read, weight.shape, weight, bias))
    embedded = functional.embedding(candidates, passage.table.float())
    own = f"{at}token_proj"
    hidden = hidden + (weights.linear(embedded, own) if f"{own}.weight" in weights else embedded)
    hidden = hidden + weights.linear(states, f"{at}pass_hidden_proj")[:, None]
    hidden = hidden + weights(f"{at}slot_embedding")[0, 0, :drafts] + weights(f"{at}rank_embedding")[0, 0]
    hidden, slots = hidden.flatten(0, 1), torch.arange(drafts).repeat_interleave(count).to(states.device)
    apart = slots[:, None] - slots
    added = weights(f"{at}relative_slot_bias")[:, apart + flags.slots - 1]
    added = added + (apart == 0) * weights(f"{at}same_slot_bias")[:, None, None]
    for index in range(chosen["lilicorr_num_layers"]):
        layer = f"{at}layers.{index}."
        x = weights.norm(hidden, f"{layer}attn_norm")
        x = functional.linear(x, weights(f"{layer}attn.in_proj_weight"), weights(f"{layer}attn.in_proj_bias"))
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(0, 1) for y in x.chunk(3, -1))
        mixed = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + added).softmax(-1) @ v
        hidden = hidden + weights.linear(mixed.transpose(0, 1).flatten(1), f"{layer}attn.out_proj")
        hidden = hidden + perceptron(f"{layer.removeprefix(at)}mlp", weights.norm(hidden, f"{layer}mlp_norm"))
    hidden = weights.norm(hidden, f"{at}output_norm")
    anchor = weights.norm(weights.linear(anchor, f"{at}context_proj"), f"{at}anchor_norm")
    both = torch.cat([hidden, anchor.expand_as(hidden), hidden * anchor], -1)
    factors = functional.silu(weights.linear(both, f"{at}factor_input_proj"))
    first, out, entering = (
        functional.normalize(weights.linear(x, f"{at}{name}_head"), dim=-1, eps=eps)
        for name, x in (("anchor_out", anchor), ("out", factors), ("in", factors))
    )
    places = (candidates[:-1] == passage.drafts[:, None]).int().argmax(-1)  # of the drafts; 0 for any other token
    before = torch.cat([first[None], out.view(drafts, count, -1)[:-1][torch.arange(drafts - 1), places]])
    scores = scale * torch.einsum("kcf,kf->kc", entering.view(drafts, count, -1), before)
    return torch.full_like(logits, -torch.inf).scatter(1, candidates, scores)


_LATTICE = ("candidate_topk", "hidden_size", "num_layers", "num_heads", "mlp_ratio", "factor_dim")
_FIELDS: dict[str, Any] = dict.fromkeys(("conv_kernel_size", "conv_group_size"), 0)  # it may have no convolutions
_FIELDS |= {f"lilicorr_{name}": None for name in (*_LATTICE, "logit_scale", "vector_eps")}
LILICORR = BlockKind(
    LiLiCorr,
    "LiLiCorrDraftModel",
    {name: (name, missing) for name, missing in _FIELDS.items()},
    _correlated,
    whole=True,  # the candidates of all drafts are scored together
)
LAYOUTS: dict[str, dict[str, ExportLayout]] = {
    "vllm": {"lilicorr": LiLiCorrBlocks()},
    "sglang": {"lilicorr": LiLiCorrBlocks(numbered=True)},
}
