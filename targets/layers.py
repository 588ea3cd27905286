"""The layers of a Hugging Face model: where they are, their hidden states, and which models are plain Llamas.

Shapes: B rows, Q tokens per row, K taps, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation

from ..common.errors import IncompatibleError

# Models that our own runners compute as well, and modules that do the same in all of them.
_LLAMA_KINDS = ("llama", "mistral", "qwen2", "qwen3")
LLAMA_HOMES = tuple(f"transformers.models.{kind}.modeling_{kind}" for kind in _LLAMA_KINDS)
_PARTS = {nn.Linear, nn.Embedding, nn.ModuleList, SiLUActivation, nn.SiLU}
# Types of rotary positions whose angles depend on nothing but the position: what each must have, and what it may.
ROPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Leave out dropout and activation checkpointing inside, and give the model's mode back after."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its output embedding and without PEFT's wrapper; the layers of an adapter stay.

    Some models name their body wrongly (Llama 4's text model): it is their part that has the input embedding.
    """
    unwrap = getattr(model, "get_base_model", None)
    whole = model if unwrap is None else unwrap()
    if whole.base_model is not whole or not hasattr(whole, "lm_head"):
        return cast(PreTrainedModel, whole.base_model)
    embedding = whole.get_input_embeddings()
    return cast(PreTrainedModel, next((part for part in whole.children() if embedding in part.modules()), whole))


def decoder_layers(body: nn.Module, count: int) -> nn.ModuleList:
    """Return the list of a model's `count` decoder layers; raises IncompatibleError if there is none."""
    # A vision tower may be as deep as the decoder.
    decoder = body.get_decoder() if isinstance(body, PreTrainedModel) else body
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise IncompatibleError(f"{type(body).__name__} has no list of {count} layers; taps cannot be read from it.")


def first_layers(body: PreTrainedModel, layers: nn.ModuleList, count: int) -> PreTrainedModel:
    """Return a copy of `body` that has only the first `count` of its `layers`, and shares every module with it."""
    return cast(PreTrainedModel, _with_part(body, _path(body, layers), layers[:count]))


@torch.no_grad()
def find_final_norm(body: PreTrainedModel, layers: nn.ModuleList) -> nn.Module | None:
    """Return the module that turns the output of `layers` into the body's last hidden state; None if it is not one.

    Models name it differently, so one pass finds it: it is a sibling of the layers, and is called last.
    """
    *above, _ = _path(body, layers)
    neighbours = [part for part in body.get_submodule(".".join(above)).children() if part is not layers]
    called: list[nn.Module] = []
    given: list[Tensor] = []
    handles = [part.register_forward_hook(lambda part, *_: called.append(part)) for part in neighbours]
    handles.append(layers[-1].register_forward_hook(lambda *call: given.append(hidden_states(call[-1]))))
    token = torch.zeros(1, 1, dtype=torch.long, device=next(body.parameters()).device)
    last = body(input_ids=token, use_cache=False).last_hidden_state
    for handle in handles:
        handle.remove()
    return called[-1] if called and torch.equal(called[-1](given[-1]).view_as(last), last) else None


def hidden_states(output: Tensor | tuple[Any, ...]) -> Tensor:
    """Return the hidden states in a layer's output, which is a tensor or a tuple that begins with it."""
    return output[0] if isinstance(output, tuple) else output


def _path(body: nn.Module, part: nn.Module) -> list[str]:
    """Return the names that lead from `body` to its `part`."""
    return next(name for name, module in body.named_modules() if module is part).split(".")


def _with_part(module: nn.Module, path: list[str], part: nn.Module) -> nn.Module:
    """Return a copy of `module` that has `part` at `path` and shares everything else."""
    if not path:
        return part
    if "forward" in vars(module):
        raise IncompatibleError(
            f"the forward of {type(module).__name__} was replaced (by accelerate's hooks, for example): "
            "it cannot be run in part."
        )
    copied = copy.copy(module)
    copied._modules = module._modules | {path[0]: _with_part(getattr(module, path[0]), path[1:], part)}
    return copied


@dataclass(frozen=True)
class Tap:
    """A hook that records a layer's input in `seen` under `index`, and changes nothing."""

    seen: dict[int, Tensor]
    index: int

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen[self.index] = hidden_states(args[0] if args else kwargs["hidden_states"])


class TapReader:
    """Collects the hidden states that a pass is asked for, by hooks on the model's layers.

    A tap is what the layer of its number reads, as engines have it: some models add features of images to what the
    layer before it wrote. A layer gets its hook when it is first asked for, and keeps it. The last tap needs none: a
    pass returns it.
    """

    def __init__(self, body: nn.Module, num_layers: int):
        self.seen: dict[int, Tensor] = {}  # of the running pass so far, by tap; empty between passes
        self._body, self._num_layers = body, num_layers
        self._hooked: set[int] = set()

    def watch(self, taps: Sequence[int]) -> None:
        """Hook the layers that read these taps."""
        new = set(taps) - self._hooked - {self._num_layers}
        if not new:
            return
        layers = decoder_layers(self._body, self._num_layers)
        for tap in new:
            layers[tap].register_forward_pre_hook(Tap(self.seen, tap), with_kwargs=True)
        self._hooked |= new

    def collect(self, taps: Sequence[int], last: Tensor) -> Tensor | None:
        """Return the pass's hidden states at `taps`, `[B, Q, K, H]`, and forget them; None if there are no taps.

        The pass returned the `last` ones, `[B, Q, H]`. Raises IncompatibleError if others are missing or have another
        shape.
        """
        self.seen[self._num_layers] = last
        try:
            self._check(taps, last)
            return torch.stack([self.seen[tap] for tap in taps], dim=2) if taps else None
        finally:
            self.seen.clear()

    def _check(self, taps: Sequence[int], last: Tensor) -> None:
        if missing := [tap for tap in taps if tap not in self.seen]:
            raise IncompatibleError(
                f"{type(self._body).__name__} does not run the layers that hidden states {missing} would be read from; "
                "take a drafter that reads the last one only, or none."
            )
        if others := [list(self.seen[tap].shape) for tap in taps if self.seen[tap].shape != last.shape]:
            raise IncompatibleError(
                f"layers of {type(self._body).__name__} hand on states of shape {others[0]}, and a drafter reads "
                f"{list(last.shape)}; take a drafter that reads the last one only, or none."
            )


def is_of_llama_kind(model: Any) -> bool:
    """Return whether a model is a Llama, Mistral, Qwen2 or Qwen3 with unmodified modules.

    Adapters, quantised weights, hooks, and weights split over processes are modifications.
    """
    home = type(model).__module__
    if home not in LLAMA_HOMES or not type(model).__name__.endswith("ForCausalLM"):
        return False
    config, parameters = model.config, list(model.parameters())
    return (
        all(type(p) is nn.Parameter and type(p.data) is Tensor for p in parameters)
        and len({(p.dtype, p.device) for p in parameters}) == 1
        and all(type(module) in _PARTS or type(module).__module__ == home for module in model.modules())
        and all(is_as_made(module) for module in model.modules())
        and not getattr(config, "is_heterogeneous", False)
        and type(model.model.layers[0].mlp.act_fn) in _PARTS
        and model.model.rotary_emb.rope_type in ROPES
        and not (model.training and config.attention_dropout)
    )


def is_as_made(module: nn.Module) -> bool:
    """Return whether a module has its own `forward` and no hooks, except taps, which only read."""
    if "forward" in vars(module):
        return False
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return all(isinstance(hook, Tap) for hook in hooks)


def usual_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config that has one value for each size: of layers that differ, that of the commonest kind."""
    if not config.is_heterogeneous:
        return config
    layers, names = list(config.per_layer_config), sorted(config.per_layer_attributes or ())
    kinds = [repr([getattr(layer, name, None) for name in names]) for layer in layers]
    return layers[kinds.index(max(kinds, key=kinds.count))]


def layer_windows(model: Any) -> list[int]:
    """Return the sliding window of each layer of such a model; 0 for full attention."""
    config = model.config
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None) or 0
    return [window if kinds is None or kinds[i] == "sliding_attention" else 0 for i in range(config.num_hidden_layers)]
