"""A separate small language model as the drafter, distilled from the target (DistillSpec, arXiv 2310.08461).

Models of one tokenizer may pad their vocabularies differently (Qwen2.5: 151,936 entries up to 3B, 152,064 above). A narrower draft model drafts
its own ids only, a wider one those of the target. Ids that it lacks are padding, which no text holds; should the target write
one all the same, it reads its last id there: the draft is poor, and the text stays the target's.

Shapes: B rows, T positions, Q tokens of one pass, V vocabulary, V' the draft model's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..ground import BadInputError, IncompatibleError, refuse_unknown_keys
from ..targets import Counts, Nodes, RaggedCache, Target, load_causal_lm, load_tokenizer, require_same_vocabulary
from .base import Drafter, DrafterConfig, DrafterLoss, TargetBatch
from .losses import LossName, acceptance_metrics, ahead, chunked_compare, divergence
from .parts.model_runner import ModelRunner, runs
from .parts.nodes import Branches
from .parts.pruning import check_names, pruned
from .session import Abilities

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class DraftModelConfig(DrafterConfig):
    """How a draft model is made and trained. The saved form is a plain Hugging Face checkpoint.

    Attributes:
        init: `random` makes a new model; `pretrained` starts from the one in `path`; `prune` from what is worth most of the target (see `pruning`).
            None: `pretrained` if there is a path, else `random`. (A recipe may also give the folder of a saved drafter here; see `train`.)
        path: the model of `init: pretrained`.
        model: fields of the target's config to change, e.g. `{num_hidden_layers: 2}`; with `prune` the sizes to keep.
        loss: see `losses.divergence`.
        depths: depths up to which the simulated tau multiplies alphas (metrics only).
    """

    init_words: ClassVar[tuple[str, ...]] = ("random", "pretrained", "prune")

    init: str | None = None
    path: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    loss: LossName = "forward_kl"
    depths: int = 4

    def __post_init__(self) -> None:
        divergence(self.loss)
        self.init = self.init or ("random" if self.path is None else "pretrained")
        if self.init not in self.init_words:
            raise BadInputError(f"draft_model: init must be one of {', '.join(self.init_words)}, found {self.init!r}.")
        if self.init == "pretrained" and (self.path is None or self.model):
            raise BadInputError(
                "draft_model: init pretrained takes a model as it is: give its folder or Hub id as path, and leave out model."
            )
        if self.init != "pretrained" and self.path is not None:
            raise BadInputError(
                f"draft_model: init {self.init} does not start from a path; leave out path, or take init pretrained."
            )
        if self.init == "prune":
            check_names(self.model)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "drafter") -> DrafterConfig:
        """As of any drafter; `prune: true` of older recipes is `init: prune`."""
        if values.get("prune") in (True, False):
            values = ({"init": "prune"} if values["prune"] else {}) | {k: v for k, v in values.items() if k != "prune"}
        return super().from_dict(values, where)


@dataclass
class _State:
    """`vocab`: V. `fused`: reads in place of `runner`, behind what is there already, where it can."""

    cache: RaggedCache
    runner: Target
    vocab: int
    fused: ModelRunner | None
    unread: Tensor | None = None  # [B, P], the last tokens absorbed, which the cache may lack
    written: int = (
        0  # entries behind the committed ones: the root and the drafts that were read; 0 since the last `absorb`
    )
    branches: Branches | None = None


class DraftModel(Drafter):
    """Wraps any Hugging Face causal LM that shares the target's tokenizer: `DraftModel(model)`."""

    name = "draft_model"
    writes_text = True
    config_class = DraftModelConfig
    config: DraftModelConfig

    def __init__(self, model: PreTrainedModel, config: DraftModelConfig | None = None):
        super().__init__(config or DraftModelConfig())
        self.model = model
        self._narrower = False  # than a target it was checked against, or opened for
        self._kept: ModelRunner | None = None

    @classmethod
    def build(cls, config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> DraftModel:
        assert isinstance(config, DraftModelConfig)
        if config.path is not None:
            _check_tokenizer(config.path, target)
            model: Any = load_causal_lm(config.path, dtype=torch.float32, strict=True)
            return cls(_cut(model, target).requires_grad_(True), config)
        if config.init == "prune":
            return cls(pruned(target, config.model, token_counts), config)
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_config(_smaller(target.config, config.model), dtype=torch.float32), config)

    @classmethod
    def from_folder(cls, folder: Path, values: dict[str, Any], target: Target | None) -> DraftModel:
        if target is not None:
            _check_tokenizer(str(folder), target)
        model = load_causal_lm(str(folder), dtype="auto", strict=True).eval()
        return cls(model if target is None else _cut(model, target))

    def save(self, path: str | Path) -> None:
        """A plain Hugging Face checkpoint: `transformers`, vLLM, SGLang and TGI load it as it is."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(path)

    def check(self, target: Target) -> None:
        own, theirs = self.runner.vocab_size, target.vocab_size
        if own != theirs:
            differ = f"the draft model's vocabulary has {own} entries, the target's {theirs}"
            if target.tokenizer is None:
                raise IncompatibleError(
                    f"{differ}; they must share one tokenizer. Only padding may differ: to show that it does, give the target's tokenizer."
                )
            highest = max(target.tokenizer.get_vocab().values())
            if highest >= min(own, theirs):
                raise IncompatibleError(
                    f"{differ}, and their tokenizer has ids up to {highest}; take a draft model that was made with this tokenizer."
                )
        self._narrower = own < theirs

    # ------------------------------------------------------------ training

    def writer(self) -> Target:
        return self.runner

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """The divergence at every position that predicts a supervised token, of whoever wrote it."""
        wanted = batch.supervised[:, 1:]
        own, vocab = Target(self.model), batch.target.vocab_size
        self._narrower = own.vocab_size < vocab
        hidden = own.forward(self._known(batch.tokens), logits=False).last[:, :-1]
        result = chunked_compare(
            batch.last[:, :-1][wanted],
            hidden[wanted],
            batch.target.lm_head,
            lambda last: own.lm_head(last)[..., :vocab],
            divergence(self.config.loss),
            self.output_ids,
            parameters=list(self.model.get_output_embeddings().parameters()),
            following=batch.tokens[:, 1:][wanted],
        )
        count = wanted.sum()
        alpha = torch.zeros(wanted.shape, device=wanted.device)
        alpha[wanted] = result.alpha
        depths = range(self.config.depths)
        metrics = {"loss_d1": (result.loss.sum(), count), "top1_d1": (result.top1.sum(), count)}
        metrics |= acceptance_metrics([ahead(alpha, d) for d in depths], [ahead(wanted, d) for d in depths])
        return DrafterLoss(result.total, count, metrics)

    # ------------------------------------------------------------ decoding

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            reads_nodes=self.runner.rewinds, fixed_shapes=self.runner.rewinds, reads_chains=self.runner.rewinds
        )

    def open_state(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> _State:
        runner = self.runner
        needed = min(max_length, target.max_context or max_length)
        if runner.max_context is not None and runner.max_context < needed:
            raise BadInputError(
                f"the draft model was built for {runner.max_context} positions, this generation needs {needed}; shorten it or take another drafter."
            )
        self._narrower = runner.vocab_size < target.vocab_size
        length = max_length + spare
        return _State(
            runner.new_cache(batch_size, length),
            runner,
            target.vocab_size,
            self._fused(length) if runs(self.model) else None,
        )

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        length = max_length + spare
        fused = 0 if not runs(self.model) or self._fitting(length) else ModelRunner.num_bytes(self.model, length)
        return self.runner.cache_bytes(batch_size, length) + fused

    def _fused(self, length: int) -> ModelRunner:
        """Kept from request to request, until it is too short or the weights have changed."""
        self._kept = self._fitting(length) or ModelRunner(self.model, length)
        return self._kept

    def _fitting(self, length: int) -> ModelRunner | None:
        return self._kept if self._kept is not None and self._kept.serves(self.model, length) else None

    @cached_property
    def runner(self) -> Target:
        """The model as one that runs; kept for what it knows of its layers."""
        return Target(self.model)

    @property
    def output_ids(self) -> Tensor | None:
        """The first V' where the model is narrower than the target."""
        return torch.arange(self.runner.vocab_size, device=self.runner.device) if self._narrower else None

    def _known(self, tokens: Tensor) -> Tensor:
        """The tokens with ids that the model has, see the module's docstring."""
        return tokens.clamp(max=self.runner.vocab_size - 1) if self._narrower else tokens

    def _read(self, state: _State, tokens: Tensor, skip: int = 0, **places: Any) -> Tensor:
        """Logits behind the tokens `[B, Q]` but the first `skip`, read at these places, `[B, Q − skip, V or V']`."""
        last = self._last(state, tokens, **places)
        return (state.fused or state.runner).lm_head(last[:, skip:] if skip else last)[..., : state.vocab]

    def _last(self, state: _State, tokens: Tensor, offset: int = 0, nodes: Nodes | None = None) -> Tensor:
        """The last hidden states of the tokens `[B, Q]` read at these places, `[B, Q, H]`; see `Target.forward`."""
        tokens, cache = self._known(tokens), state.cache
        if state.fused is None or (cache.window is None and not cache.longest):  # whole prompts are the library's
            return state.runner.forward(tokens, cache, logits=False, offset=offset, nodes=nodes).last
        return state.fused.read(tokens, cache, offset, nodes)

    def absorb(
        self, state: _State, tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None
    ) -> None:
        # The cache already holds the root and all drafts that were read: of an accepted path all but, at most, the last.
        # That one is left for `begin`, so that it costs no pass of its own; where the host may ask, only if it is missing.
        last = tokens.gather(1, counts.tensor[:, None] - 1)
        if (
            state.unread is not None and not state.written and tokens.shape[1] == 1
        ):  # nothing was drafted: the root, which `begin` will read
            last = torch.cat([state.unread, last], 1)
        elif state.unread is not None and not state.written:  # another's drafts
            self._last(state, torch.cat([state.unread, tokens], 1), offset=-state.unread.shape[1])
            last = last[:, :0]
        elif path is not None:
            state.cache.keep(torch.cat([torch.zeros_like(path[:, :1]), torch.where(path < 0, path, path + 1)], 1))
        elif tokens.shape[1] - state.written > 1:
            self._last(state, tokens)
            last = last[:, :0]
        elif state.cache.window is None and max(counts.values) <= state.written:
            last = last[:, :0]
        state.cache.advance(counts)
        state.unread, state.written = last, 0

    def begin(self, state: _State, root: Tensor) -> Tensor:
        return self._begin(state, root[:, None])[:, 0]

    def _begin(self, state: _State, tokens: Tensor) -> Tensor:
        """Read the root, and what follows it in `tokens` `[B, W]`; logits `[B, W, V]`."""
        assert state.unread is not None
        count, width = state.unread.shape[1], tokens.shape[1]
        logits = self._read(state, torch.cat([state.unread, tokens], 1) if count else tokens, count, offset=-count)
        state.written, state.branches = width, None
        return logits

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        nodes = None
        if parents is not None:
            state.branches = state.branches or Branches(len(tokens), 1, tokens.device)
            nodes = state.branches.grow(parents)
        logits = self._read(state, tokens, offset=state.written, nodes=nodes)
        state.written += tokens.shape[1]
        return logits

    def read_chain(self, state: _State, tokens: Tensor, after: Tensor | None = None) -> Tensor:
        width = tokens.shape[1]
        if after is None:
            logits = self._begin(state, tokens)
            state.branches = Branches(len(tokens), 1, tokens.device)
            state.branches.grow_chain(torch.full_like(tokens[:, 0], -1), width - 1)
            return logits
        assert state.branches is not None
        logits = self._read(state, tokens, offset=state.written, nodes=state.branches.grow_chain(after, width))
        state.written += width
        return logits

    def forget(self, state: _State) -> None:
        state.written = 0

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


def _check_tokenizer(path: str, target: Target) -> None:
    """Refuse a draft model that comes with a tokenizer other than the target's."""
    if target.tokenizer is None:
        return
    folder = Path(path).expanduser()
    own = load_tokenizer(folder) if folder.exists() else _tokenizer_on_hub(path)
    if own is not None:
        require_same_vocabulary(own, target.tokenizer, f"the draft model in {path!r}")


def _tokenizer_on_hub(name: str) -> Any:
    """None if there is none, or no way to it: the weights' own error says that better."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None


def _cut(model: Any, target: Target) -> Any:
    """The model without ids that the target lacks: nothing writes or reads them, and engines want vocabularies of one size.

    Without a tokenizer nobody knows that they are padding: `check` refuses the model as it is.
    """
    if target.tokenizer is not None and model.get_output_embeddings().weight.shape[0] > target.vocab_size:
        model.resize_token_embeddings(target.vocab_size)
    return model


def _smaller(config: Any, changes: dict[str, Any]) -> Any:
    """The target's config with `changes`; head sizes follow the hidden size unless they are given."""
    values = config.to_dict()
    refuse_unknown_keys(changes, values, "drafter.model")
    values = {
        k: v for k, v in values.items() if k not in ("architectures", "layer_types", "dtype", "torch_dtype")
    } | changes
    if "num_attention_heads" in changes:
        values["num_key_value_heads"] = changes.get("num_key_value_heads", changes["num_attention_heads"])
    if "head_dim" not in changes and values.get("head_dim") and {"hidden_size", "num_attention_heads"} & set(changes):
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return type(config)(**values)
