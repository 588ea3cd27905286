"""A draft model cut out of the target inside its layers: attention heads, MLP neurons and hidden dimensions.

(Minitron, arXiv 2407.14679.) The most important parts stay, as measured on text that the target writes. Only where
every tensor is known: in Llama-like models (Llama, Mistral, Qwen2, Qwen3, SmolLM3, …).

Shapes: B rows, T tokens, V vocabulary, N layers, H hidden size, I neurons of an MLP, A attention heads, G groups of
them that share keys and values, D size of a head; a prime marks what stays of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..common import IncompatibleError
from ..heads.pruning import GROUPS, HEADS, HIDDEN, LAYERS, NEURONS, chosen_layers, with_sizes
from ..heads.session import required
from ..targets import RowLengths, Target, decoder_layers

# What the axes of a Llama-like layer's weights run over. A norm over hidden dimensions is a case of its own; one
# within a head is never cut.
_PROJECTIONS: dict[str, tuple[str, str]] = {
    "self_attn.q_proj": (HEADS, HIDDEN),
    "self_attn.k_proj": (GROUPS, HIDDEN),
    "self_attn.v_proj": (GROUPS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS),
    "mlp.gate_proj": (NEURONS, HIDDEN),
    "mlp.up_proj": (NEURONS, HIDDEN),
    "mlp.down_proj": (HIDDEN, NEURONS),
}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")

# The text that importance is measured on.
_ROWS = 16
_TOKENS = 64
_SEED = 0


def pruned_by_width(target: Target, sizes: Mapping[str, int], token_counts: Tensor | None) -> PreTrainedModel:
    """Return a model of these sizes, with what is worth most of the target's weights; see `heads.pruning.pruned`."""
    _require_llama_like(target)
    inside = {name: size for name, size in sizes.items() if name != LAYERS}
    small = with_sizes(target, sizes[LAYERS], **inside, head_dim=_head_size(target))
    _cut(target, small, sizes, token_counts)
    return small


def _head_size(target: Target) -> int:
    config = target.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _require_llama_like(target: Target) -> None:
    """Raise IncompatibleError unless `_cut` knows every tensor, and every norm is x / rms(x) · weight."""
    strange = next(_strange(target), None)
    if strange is not None:
        raise IncompatibleError(
            f"draft_model: {type(target.model).__name__} can be pruned by whole layers only: its {strange} is not that "
            f"of a Llama-like model. Give model.{LAYERS} alone (and merge the target's adapter first if it has one)."
        )


def _strange(target: Target) -> Iterator[str]:
    """Yield the names of parts that differ from those of a Llama-like model."""
    known = {f"{name}.{kind}" for name in _PROJECTIONS for kind in ("weight", "bias")}
    known |= {f"{name}.weight" for name in (*_NORMS, *_HEAD_NORMS)}
    layers, final = decoder_layers(target.body, target.num_layers), _final_norm(target.body)
    for name, parameter in (named for layer in layers for named in layer.named_parameters()):
        norms_heads = name.removesuffix(".weight") in _HEAD_NORMS
        if name not in known or (norms_heads and parameter.numel() != _head_size(target)):
            yield name
    if final is None:
        yield "end, without a norm,"
        return
    parts = [layers, final, target.model.get_input_embeddings(), target.model.get_output_embeddings()]
    inside = {id(parameter) for part in parts for parameter in part.parameters()}
    yield from (name for name, parameter in target.model.named_parameters() if id(parameter) not in inside)
    yield from (name for name, norm in _hidden_norms(target.body, layers) if not _divides_by_rms(norm))


def _final_norm(body: Any) -> Any:
    """Return the norm after the layers; None if it has no such name."""
    return getattr(body.get_decoder() if hasattr(body, "get_decoder") else body, "norm", None)


def _hidden_norms(body: Any, layers: nn.ModuleList) -> Iterator[tuple[str, nn.Module]]:
    """Yield every norm over hidden dimensions, with its name."""
    for layer in layers:
        yield from ((name, module) for name, module in layer.named_children() if name in _NORMS)
    yield "norm", _final_norm(body)


def _divides_by_rms(norm: nn.Module) -> bool:
    """Return whether it is x / rms(x) · weight: Gemma adds 1 to its weights, others subtract the mean."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.dim() != 1:
        return False
    probe = torch.linspace(-3, 5, weight.numel(), device=weight.device, dtype=torch.float32)[None]
    expected = probe / probe.square().mean(-1, keepdim=True).sqrt() * weight.float()
    return torch.allclose(norm(probe).float(), expected, rtol=1e-2, atol=1e-2)


def _spread(index: Tensor, size: int) -> Tensor:
    """Return the entries of the blocks of `size` with these indices."""
    return (index[:, None] * size + torch.arange(size, device=index.device)).flatten()


def _cut(target: Target, model: PreTrainedModel, sizes: Mapping[str, int], token_counts: Tensor | None) -> None:
    """Fill `model` from the target, index by index.

    A norm over H' of H dimensions divides by a mean over fewer; its weight is multiplied by √(H / H'), so that it
    changes nothing to drop dimensions that hold nothing.
    """
    theirs, own = decoder_layers(target.body, target.num_layers), decoder_layers(model.base_model, sizes[LAYERS])
    worth = _importance(target, _own_text(target, token_counts))
    hidden = _best(worth[HIDDEN], sizes[HIDDEN])
    shared, head_size = sizes[HEADS] // sizes[GROUPS], _head_size(target)
    scale = (target.hidden_size / sizes[HIDDEN]) ** 0.5
    for new, index in zip(own, chosen_layers(len(theirs), len(own)), strict=True):
        groups = _best(worth[GROUPS][index], sizes[GROUPS])
        axes = {
            HIDDEN: hidden,
            NEURONS: _best(worth[NEURONS][index], sizes[NEURONS]),
            HEADS: _spread(_spread(groups, shared), head_size),
            GROUPS: _spread(groups, head_size),
        }
        _cut_layer(theirs[index], new, axes, scale)
    _final_norm(model.base_model).weight.copy_(_final_norm(target.body).weight[hidden].float() * scale)
    for get in ("get_input_embeddings", "get_output_embeddings"):
        part, old = getattr(model, get)(), getattr(target.model, get)()
        part.weight.copy_(old.weight[:, hidden])
        if getattr(part, "bias", None) is not None:
            part.bias.copy_(old.bias)


def _cut_layer(theirs: nn.Module, own: nn.Module, axes: dict[str, Tensor], scale: float) -> None:
    """Fill a layer with the entries of the other's weights that stay on each kind of axis."""
    weights = dict(theirs.named_parameters())
    for name, parameter in own.named_parameters():
        module = name.rpartition(".")[0]
        if module in _NORMS:
            parameter.copy_(weights[name][axes[HIDDEN]].float() * scale)
        elif module in _HEAD_NORMS:
            parameter.copy_(weights[name])
        else:
            weight = weights[name].data  # [out, in], or a bias [out]
            for dimension, kind in enumerate(_PROJECTIONS[module][: weight.dim()]):
                weight = weight.index_select(dimension, axes[kind])
            parameter.copy_(weight)


def _best(worth: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest, ascending; of equal ones the first."""
    return worth.argsort(descending=True, stable=True)[:count].sort().values


def _importance(target: Target, tokens: Tensor) -> dict[str, Tensor]:
    """Return the importance of hidden dimensions `[H]`, neurons `[N, I]` and groups of heads `[N, G]`.

    It is measured in one pass over `tokens` `[B, T]`. Of a hidden dimension: mean |output| of all norms (Minitron,
    section 2.2). Of a neuron or a head: mean |activation| times the norm of the weights that read it (Wanda, arXiv
    2306.11695); of the heads of a group the sum.
    """
    layers, config = decoder_layers(target.body, target.num_layers), target.config
    groups = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    hidden = torch.zeros(target.hidden_size, device=target.device)
    neurons: list[Tensor] = []
    heads: list[Tensor] = []

    def of_norm(*call: Any) -> None:
        hidden.add_(call[-1].float().abs().mean((0, 1)))

    def of_input(collected: list[Tensor]) -> Any:
        return lambda module, args: collected.append(
            args[0].float().abs().mean((0, 1)) * module.weight.float().norm(dim=0)
        )

    with ExitStack() as hooks:
        for _, norm in _hidden_norms(target.body, layers):
            hooks.enter_context(norm.register_forward_hook(of_norm))
        for layer in layers:
            for name, collected in (("mlp.down_proj", neurons), ("self_attn.o_proj", heads)):
                module = layer.get_submodule(name)
                hooks.enter_context(module.register_forward_pre_hook(of_input(collected)))
        target.forward(tokens, logits=False)
    by_group = torch.stack(heads).reshape(len(layers), groups, -1).sum(-1)
    return {HIDDEN: hidden, NEURONS: torch.stack(neurons), GROUPS: by_group}


def _own_text(target: Target, token_counts: Tensor | None) -> Tensor:
    """Return text that the target writes at temperature 1 after frequent tokens, `[B, T]` (arXiv 2410.17170)."""
    generator = torch.Generator().manual_seed(_SEED)
    counts = torch.ones(target.vocab_size) if token_counts is None else token_counts.cpu().float() + 1e-6
    tokens = torch.multinomial(counts, _ROWS, replacement=True, generator=generator)[:, None].to(target.device)
    cache, one = target.new_cache(_ROWS, _TOKENS), RowLengths.of([1] * _ROWS, target.device)
    while tokens.shape[1] < min(_TOKENS, target.max_context or _TOKENS):
        logits = required(target.forward(tokens[:, -1:], cache).logits, "pruning: a pass without logits")
        cache.advance(one)
        following = torch.multinomial(logits[:, 0].float().softmax(-1).cpu(), 1, generator=generator)
        tokens = torch.cat([tokens, following.to(tokens)], 1)
    return tokens
