"""Grow a drafter with its target: the same drafts, at the cost of one that was made for the large model.

`grow.py` says where old numbers stand in a grown model. A drafter reads that model's hidden states and
embeddings, so its weights stand in the same places; its own heads and units grow to the sizes of the model's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from ..common import IncompatibleError
from ..heads.base import Drafter, HeadDrafter
from ..heads.draft_model import DraftModel
from ..heads.mtp_checkpoint import layer_values
from ..targets import Target
from .grow import Axis, GrownWeights, Growth, Sizes, grow, place

_BLOCKS: Final = ("dflash", "dflash2", "dspark", "lilicorr")
_KINDS: Final = (*_BLOCKS, "eagle1", "eagle3", "hydra", "medusa", "mtp", "peagle", "self_speculative")
_NORMED = 2.0**-6  # of the constant channel where a norm has made it larger
_FED_BACK = 2.0**-4  # of the constant channel in a final norm whose output is read again


@torch.no_grad()
def grow_drafter(
    drafter: Drafter[Any],
    source: Target,
    grown: Target,
    draft_vocab_size: int | None = None,
    like: PreTrainedConfig | None = None,
) -> Drafter[Any]:
    """Return a drafter for the grown target that drafts as `drafter` does for the one it was grown from.

    Args:
        draft_vocab_size: of a head; None for the whole vocabulary where it drafts the whole old one, else for as many
            tokens as it has.
        like: the shape of a draft model, with the grown target's vocabulary; None for the grown target's own.

    Raises IncompatibleError if this drafter cannot be grown.
    """
    if not list(drafter.parameters()):
        return drafter
    if isinstance(drafter, DraftModel) and drafter.name != "tli":  # whose vocabulary is its own
        return type(drafter)(grow(drafter.model, like or grown.config), drafter.config)
    if not isinstance(drafter, HeadDrafter) or drafter.name not in _KINDS:
        raise IncompatibleError(f"{drafter.name}: no drafter of this type can be grown (only {', '.join(_KINDS)}).")
    return _GrownHead(drafter, source, grown, draft_vocab_size).make()


class _GrownHead:
    """Makes one grown head."""

    def __init__(self, head: HeadDrafter[Any], source: Target, grown: Target, draft_vocab_size: int | None):
        self.head = head
        self.old = dict(head.named_parameters())
        self.grown = grown
        # How the target's hidden states lie in the grown one's.
        self.target = Growth(Sizes.of(source.config), Sizes.of(grown.config))
        known = getattr(head.config, "draft_vocab_size", source.vocab_size)
        self.outputs = draft_vocab_size or (grown.vocab_size if known == source.vocab_size else known)
        most = known + grown.vocab_size - source.vocab_size
        if self.outputs > most:
            raise IncompatibleError(
                f"a draft vocabulary of {self.outputs:,} is more than the head's {known:,} and the {most - known:,} "
                f"new tokens: at most {most:,}."
            )
        self.config = replace(head.config, **self._settings())
        if getattr(head.config, "lilicorr_hidden_size", 0) == self.config.hidden_size != head.config.hidden_size:
            raise IncompatibleError("a LiLiCorr whose transformer is as wide as the grown target cannot be grown.")
        kind = next(head.parameters())
        self.weights = GrownWeights(self._layers(), kind.dtype, kind.device)  # of the head's own sizes
        self.feeds_normed = head.name != "mtp" and bool(getattr(head.config, "norm_output", False))
        sizes = self.weights.growth
        if self.feeds_normed and self.outputs != known and sizes.new.groups == sizes.old.groups:
            raise IncompatibleError(
                f"a head with norm_output needs a spare key and value head for new draft tokens: keep its {known}."
            )

    def make(self) -> HeadDrafter[Any]:
        with init_empty_weights(include_buffers=False):
            made = type(self.head)(self.config)
        for name, parameter in list(made.named_parameters()):
            place(made, name, self._weight(name, parameter.shape))
        if (kept := self.head.output_ids) is not None:  # of the old tokens; new ones follow
            more = torch.arange(self.outputs - len(kept)) + self.head.config.vocab_size
            made.token_ids.copy_(torch.cat([kept.cpu(), more]))
        return made.to(self.weights.noise.device).train(self.head.training)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that grow."""
        old, sizes = self.head.config, Sizes.of(self.grown.config)
        values = {
            "hidden_size": sizes.hidden,
            "vocab_size": self.grown.vocab_size,
            "draft_vocab_size": self.outputs,
            "target_layers": self.grown.num_layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.groups,
            "head_dim": sizes.head,
            "intermediate_size": self.grown.config.intermediate_size,
        }
        if hasattr(old, "rms_norm_eps"):
            values["rms_norm_eps"] = old.rms_norm_eps * self.target.share
        if hasattr(old, "taps"):
            values["taps"] = tuple(self.target.tap(tap) for tap in old.taps)
        if hasattr(old, "exit_layer"):
            values |= {"exit_layer": self.target.tap(old.exit_layer), "intermediate_size": sizes.hidden}
        if hasattr(old, "layer"):
            values["layer"] = layer_values(self.grown, {})
        return {name: value for name, value in values.items() if hasattr(old, name)}

    def _layers(self) -> Growth:
        """Return how the head's own layers lie in the grown ones."""
        sizes = [
            _sizes(config, any("q_norm" in name for name in self.old)) for config in (self.head.config, self.config)
        ]
        if problems := sizes[0].problems(sizes[1]):
            raise IncompatibleError(f"this {self.head.name} cannot be grown: {'; '.join(problems)}.")
        return Growth(*sizes)

    def _weight(self, name: str, shape: torch.Size) -> Tensor:
        """Return the grown weight of that name."""
        path, weights = name.split("."), self.weights
        module, is_bias = path[-2] if len(path) > 1 else name, path[-1] == "bias"
        if path[-1] == "base_kernel":
            return weights.vector(shape, self.old[name])
        if path[0] == "lilicorr":
            return self._of_correlator(name, shape)
        if module == "kernel_projection":
            residual, kernels = self.target.residual, 2 * self.config.conv_kernel_size
            groups = residual.divided(self.config.conv_group_size).repeated(kernels)
            return weights.matrix(shape, groups, residual, self.old[name])
        if "layers" in path:
            before = name[: name.index("layers.")] + f"layers.{path[path.index('layers') + 1]}."
            layer = {n.removeprefix(before): w for n, w in self.old.items() if n.startswith(before)}
            weight = weights.of_layer(name.removeprefix(before), shape, layer)
            return self._with_spare_head(name, weight) if self.feeds_normed and before == "layers.0." else weight
        old = self.old[name]
        several = max(1, old.shape[-1] // self.target.old.hidden)
        if name in ("mask", "mask_hidden"):
            return weights.vector(shape, old, self.target.level, several)
        if "norm" in name:
            weight = weights.norm(shape, old, module == "norm", several)
            if self.feeds_normed and module == "norm" and self.target.constant is not None:
                weight[self.target.constant] = _FED_BACK
            return weight
        if module == "lm_head":
            weight = weights.output_embedding(shape, old)
            if self.feeds_normed and self.target.constant is not None:
                weight[len(old) :, self.target.constant] /= _FED_BACK * _NORMED
            return weight
        if module in ("fc", "projection", "linear"):
            if is_bias:
                return weights.vector(shape, old)
            residual = self.target.residual
            return self._with_constant(module, weights.matrix(shape, residual, residual.repeated(several), old))
        if is_bias:
            return old.clone()
        rows, columns = self._axes(path, old, shape)
        return weights.matrix(shape, rows, columns, old)

    def _of_correlator(self, name: str, shape: torch.Size) -> Tensor:
        """Return a weight of LiLiCorr's transformer, which stays as wide as it was."""
        module, leaf = name.split(".")[-2:]
        old: Tensor | None = self.old.get(name)
        if old is None:  # it was as wide as the target, and read embeddings without a projection
            old = torch.eye(shape[0]) if leaf == "weight" else torch.zeros(shape)
        if module not in ("token_proj", "pass_hidden_proj", "context_proj") or leaf == "bias":
            return old.to(**self.weights.kind).clone()
        return self.weights.matrix(shape, Axis.first(shape[0], shape[0]), self.target.residual, old)

    def _axes(self, path: list[str], old: Tensor, shape: torch.Size) -> tuple[Axis, Axis]:
        """Return the spaces of a weight of a small head beside the layers."""
        residual, rows = self.target.residual, Axis.first(len(old), shape[0])
        if path[-2] == "gate_up":
            half = Axis.first(len(old) // 2, shape[0] // 2)
            return half.repeated(2), residual
        if path[-2] == "down":
            return residual, Axis.first(old.shape[1], shape[1])
        rank = Axis.first(*[getattr(self.config, "selector_rank", getattr(self.config, "markov_rank", 0))] * 2)
        columns = {
            "predecessor_codebook": [rank],
            "successor_codebook": [rank],
            "hidden_projection": [residual],
            "markov_w1": [rank],
            "markov_w2": [rank],
            "gate_proj": [residual, rank],
            "joint_proj": [rank, rank, residual],
            "proj": [residual, rank] if old.shape[1] > self.target.old.hidden else [residual],
        }[path[-2]]
        return rows, Axis.joined(*columns)

    def _with_constant(self, module: str, weight: Tensor) -> Tensor:
        """Return a product before the first layer that hands on the constant channel, which hushes new tokens.

        It comes from an input that does not change from draft to draft, or from a hidden state that keeps it.
        """
        constant, config = self.target.constant, self.config
        modules = self.head.name == "mtp"
        if module == "linear" or constant is None or self.feeds_normed:
            return weight
        second = config.hidden_first if modules else self.head.name == "eagle1"
        handed = _NORMED if modules else 1 / getattr(config, "feature_scale", 1.0)
        weight[constant, constant + second * self.target.new.hidden] = handed
        return weight

    def _with_spare_head(self, name: str, weight: Tensor) -> Tensor:
        """Return a projection of the first layer in which a head that was free brings the constant channel.

        A step that reads its own normed output would make it larger, or lose it: each step takes it from its embedding.
        """
        old = self.weights.growth.old
        new = self.weights.growth.new
        constant = self.target.constant
        if constant is None or new.groups == old.groups:
            return weight
        if name.endswith("v_proj.weight"):
            weight[old.groups * new.head] = 0
            weight[old.groups * new.head, constant] = _NORMED
        elif name.endswith("o_proj.weight"):
            weight[constant, old.groups * (new.heads // new.groups) * new.head] = 1
        return weight


def _sizes(config: Any, norms_heads: bool) -> Sizes:
    """Return the sizes of a head's layers; of a head without layers, that of its hidden states alone."""
    if layer := getattr(config, "layer", None):
        values = dict(layer)
        return replace(Sizes.of(AutoConfig.for_model(values.pop("model_type"), **values)), layers=1)
    counts: dict[str, int] = {
        ours: getattr(config, theirs, 1)
        for ours, theirs in (
            ("heads", "num_attention_heads"),
            ("groups", "num_key_value_heads"),
            ("head", "head_dim"),
            ("units", "intermediate_size"),
        )
    }
    epsilon = getattr(config, "rms_norm_eps", 1e-6)
    return Sizes(hidden=config.hidden_size, epsilon=epsilon, norms_heads=norms_heads, **counts)
