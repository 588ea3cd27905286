"""A separate small language model as the drafter, distilled from the target (DistillSpec, arXiv 2310.08461).

Shapes: B rows, T positions, Q tokens of one pass, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..target import (
    BadInputError,
    Counts,
    IncompatibleError,
    RaggedCache,
    Target,
    decoder_layers,
    load_causal_lm,
    load_tokenizer,
    refuse_unknown_keys,
    require_same_vocabulary,
)  # fmt: skip
from .base import Branches, Drafter, DrafterConfig, DrafterLoss, TargetBatch
from .losses import LossName, acceptance_metrics, ahead, chunked_compare, divergence

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class DraftModelConfig(DrafterConfig):
    """How a draft model is made and trained. The saved form is a plain Hugging Face checkpoint.

    Attributes:
        path: a pretrained model to start from; None makes a new one from `model`.
        model: fields of the target's config to change for a new draft model, e.g. `{num_hidden_layers: 2}`.
        prune: start from the target's embeddings, norms and output, and `num_hidden_layers` of its layers from first to last.
        loss: see `losses.divergence`.
        depths: depths up to which the simulated tau multiplies alphas (metrics only).
    """

    path: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    prune: bool = False
    loss: LossName = "forward_kl"
    depths: int = 4

    def __post_init__(self) -> None:
        divergence(self.loss)
        if self.prune and (self.path is not None or set(self.model) - {"num_hidden_layers"}):
            raise BadInputError("draft_model: prune takes whole layers of the target; give it model.num_hidden_layers and nothing else, and no path.")


@dataclass
class _State:
    cache: RaggedCache
    runner: Target
    unread: Tensor | None = None  # [B, P], the last tokens absorbed, which the cache may lack
    written: int = 0  # entries behind the committed ones: the root and the drafts that were read; 0 since the last `absorb`
    branches: Branches | None = None


class DraftModel(Drafter):
    """Wraps any Hugging Face causal LM that shares the target's tokenizer: `DraftModel(model)`."""

    name = "draft_model"
    config_class = DraftModelConfig
    config: DraftModelConfig

    def __init__(self, model: PreTrainedModel, config: DraftModelConfig | None = None):
        super().__init__(config or DraftModelConfig())
        self.model = model

    @classmethod
    def build(cls, config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> DraftModel:
        assert isinstance(config, DraftModelConfig)
        if config.path is not None:
            _check_tokenizer(Path(config.path).expanduser(), target)
            return cls(load_causal_lm(config.path, dtype=torch.float32, strict=True), config)
        from transformers import AutoModelForCausalLM

        changes = _pruned_layers(target, config.model) if config.prune else config.model
        model = AutoModelForCausalLM.from_config(_smaller(target.config, changes), dtype=torch.float32)
        if config.prune:
            _copy_layers(target, model)
        return cls(model, config)

    @classmethod
    def from_folder(cls, folder: Path, values: dict[str, Any], target: Target | None) -> DraftModel:
        if target is not None:
            _check_tokenizer(folder, target)
        return cls(load_causal_lm(str(folder), dtype="auto", strict=True).eval())

    def save(self, path: str | Path) -> None:
        """A plain Hugging Face checkpoint: `transformers`, vLLM, SGLang and TGI load it as it is."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(path)

    def check(self, target: Target) -> None:
        own = Target(self.model).vocab_size
        if own != target.vocab_size:
            raise IncompatibleError(f"the draft model's vocabulary has {own} entries, the target's {target.vocab_size}; they must share one tokenizer.")

    # ------------------------------------------------------------ training

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """The divergence at every position that predicts a supervised token, off-policy (on the target's responses)."""
        wanted = batch.supervised[:, 1:]
        own = Target(self.model)
        hidden = own.forward(batch.tokens, logits=False).last[:, :-1]
        result = chunked_compare(
            batch.last[:, :-1][wanted], hidden[wanted], batch.target.lm_head, own.lm_head, divergence(self.config.loss),
            parameters=list(self.model.get_output_embeddings().parameters()), following=batch.tokens[:, 1:][wanted],
        )  # fmt: skip
        count = wanted.sum()
        alpha = torch.zeros(wanted.shape, device=wanted.device)
        alpha[wanted] = result.alpha
        depths = range(self.config.depths)
        metrics = {"loss_d1": (result.loss.sum(), count), "top1_d1": (result.top1.sum(), count)}
        metrics |= acceptance_metrics([ahead(alpha, d) for d in depths], [ahead(wanted, d) for d in depths])
        return DrafterLoss(result.total, count, metrics)

    # ------------------------------------------------------------ decoding

    def open(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> _State:
        runner = self.runner
        needed = min(max_length, target.max_context or max_length)
        if runner.max_context is not None and runner.max_context < needed:
            raise BadInputError(
                f"the draft model was built for {runner.max_context} positions, this generation needs {needed}; shorten it or take another drafter."
            )
        return _State(runner.new_cache(batch_size, max_length + spare), runner)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.runner.cache_bytes(batch_size, max_length + spare)

    @cached_property
    def runner(self) -> Target:
        """The model as one that runs; kept for what it knows of its layers."""
        return Target(self.model)

    def absorb(self, state: _State, tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None) -> None:
        # The cache already holds the root and all drafts that were read: of an accepted path all but, at most, the last.
        # That one is left for `begin`, so that it costs no pass of its own; where the host may ask, only if it is missing.
        last = tokens.gather(1, counts.tensor[:, None] - 1)
        if state.unread is not None and not state.written and tokens.shape[1] == 1:  # nothing was drafted: the root, which `begin` will read
            last = torch.cat([state.unread, last], 1)
        elif state.unread is not None and not state.written:  # another's drafts
            state.runner.forward(torch.cat([state.unread, tokens], 1), state.cache, logits=False, offset=-state.unread.shape[1])
            last = last[:, :0]
        elif path is not None:
            state.cache.keep(torch.cat([torch.zeros_like(path[:, :1]), torch.where(path < 0, path, path + 1)], 1))
        elif tokens.shape[1] - state.written > 1:
            state.runner.forward(tokens, state.cache, logits=False)
            last = last[:, :0]
        elif state.cache.window is None and max(counts.values) <= state.written:
            last = last[:, :0]
        state.cache.advance(counts)
        state.unread, state.written = last, 0

    def begin(self, state: _State, root: Tensor) -> Tensor:
        assert state.unread is not None
        count = state.unread.shape[1]
        tokens = torch.cat([state.unread, root[:, None]], 1) if count else root[:, None]
        at = torch.full_like(root, count)[:, None] if count else None
        out = state.runner.forward(tokens, state.cache, at=at, offset=-count)
        assert out.logits is not None
        state.written, state.branches = 1, None
        return out.logits[:, 0]

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        nodes = None
        if parents is not None:
            state.branches = state.branches or Branches(len(tokens), 1, tokens.device)
            nodes = state.branches.grow(parents)
        out = state.runner.forward(tokens, state.cache, offset=state.written, nodes=nodes)
        assert out.logits is not None
        state.written += tokens.shape[1]
        return out.logits

    @property
    def grows(self) -> bool:
        """Not with recurrent layers: their states have no branches."""
        return self.runner.rewinds

    def caches(self, state: _State) -> list[RaggedCache]:
        return [state.cache]

    def carried(self, state: _State) -> list[Tensor]:
        assert state.unread is not None
        return [state.unread]

    def carry(self, state: _State, tensors: list[Tensor]) -> None:
        state.unread = tensors[0]

    def reset(self, state: _State) -> None:
        super().reset(state)
        state.unread, state.written, state.branches = None, 0, None

    def select(self, state: _State, rows: list[int]) -> None:
        state.cache.select(rows)
        if state.unread is not None:
            state.unread = state.unread[rows]


def _check_tokenizer(folder: Path, target: Target) -> None:
    """Refuse a draft model whose folder holds a tokenizer other than the target's."""
    own = load_tokenizer(folder)
    if own is not None and target.tokenizer is not None:
        require_same_vocabulary(own, target.tokenizer, f"the draft model in {str(folder)!r}")


def chosen_layers(of: int, count: int) -> list[int]:
    """`count` of `of` layers, evenly from the first to the last: those at the ends do what nothing else does."""
    return [round(i * (of - 1) / (count - 1)) for i in range(count)] if count > 1 else [of - 1]


def _pruned_layers(target: Target, model: dict[str, Any]) -> dict[str, Any]:
    """`model`, with what the target's config says per layer cut to the layers that stay."""
    count = model.get("num_hidden_layers")
    if not isinstance(count, int) or not 1 <= count <= target.num_layers:
        raise BadInputError(f"draft_model: prune needs model.num_hidden_layers between 1 and the target's {target.num_layers}, found {count!r}.")
    lists = {k: v for k, v in target.config.to_dict().items() if isinstance(v, list) and len(v) == target.num_layers}
    return model | {name: [values[i] for i in chosen_layers(target.num_layers, count)] for name, values in lists.items()}


@torch.no_grad()
def _copy_layers(target: Target, model: PreTrainedModel) -> None:
    """Fill `model`, the target's architecture with fewer layers, from the target.

    Raises:
        IncompatibleError: its layers are of different kinds, or it carries an adapter that is not merged.
    """
    theirs, own = decoder_layers(target.body, target.num_layers), decoder_layers(model.base_model, model.config.num_hidden_layers)
    inside = {id(p) for part in (theirs, own) for p in part.parameters()}
    rest = {name: p for name, p in target.model.named_parameters() if id(p) not in inside}
    try:
        for new, index in zip(own, chosen_layers(len(theirs), len(own)), strict=True):
            new.load_state_dict(theirs[index].state_dict())
        for name, parameter in model.named_parameters():
            if id(parameter) not in inside:
                parameter.copy_(rest[name])
    except (RuntimeError, KeyError) as error:
        raise IncompatibleError(
            f"draft_model: the layers of {type(target.model).__name__} cannot be taken over ({str(error).splitlines()[0]}). "
            "Merge the target's adapter first if it has one, or leave out prune."
        ) from error


def _smaller(config: Any, changes: dict[str, Any]) -> Any:
    """The target's config with `changes`; head sizes follow the hidden size unless they are given."""
    values = config.to_dict()
    refuse_unknown_keys(changes, values, "drafter.model")
    values = {k: v for k, v in values.items() if k not in ("architectures", "layer_types", "dtype", "torch_dtype")} | changes
    if "num_attention_heads" in changes:
        values["num_key_value_heads"] = changes.get("num_key_value_heads", changes["num_attention_heads"])
    if "head_dim" not in changes and values.get("head_dim") and {"hidden_size", "num_attention_heads"} & set(changes):
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return type(config)(**values)
