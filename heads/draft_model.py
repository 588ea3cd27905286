"""A separate small language model as the drafter, distilled from the target (DistillSpec, arXiv 2310.08461).

Models of one tokenizer may pad their vocabularies differently (Qwen2.5: 151,936 entries up to 3B, 152,064 above). A
narrower draft model drafts its own ids only, a wider one those of the target. Should the target write an id that the
model lacks, it reads its last id there: the draft is poor, and the text stays the target's.

Shapes: B rows, T positions, Q tokens of one pass, W nodes read at once, V vocabulary, V' the draft model's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ..common import BadInputError, IncompatibleError, refuse_unknown_keys
from ..common.errors import LIBRARY_ERRORS, reason
from ..targets import Nodes, RaggedCache, RowLengths, Target, load_causal_lm, load_tokenizer, require_same_vocabulary
from ..targets.fingerprint import plain_config
from ..targets.fused_layers import LlamaRunner, copied_bytes, runs
from ..targets.model_folder import model_folder
from .base import Drafter, DrafterLoss, TargetBatch, TrainedConfig, teacher_forced_loss
from .divergences import LossName
from .pruning import SIZES, check_names, pruned
from .session import Abilities, NodeSession


@dataclass
class DraftModelConfig(TrainedConfig):
    """Settings of a draft model: how it is made and trained.

    The saved form is a plain Hugging Face checkpoint.

    Attributes:
        init: `random` makes a new model; `pretrained` starts from the one in `path`; `prune` from the most important
            parts of the target (see pruning.py). None: `pretrained` if there is a path, else `random`.
        path: the model of `init: pretrained`.
        model: fields of the target's config to change, e.g. `{num_hidden_layers: 2}`; with `prune` the sizes to keep.
        depths: depths up to which the simulated tau multiplies alphas (metrics only).
    """

    words: ClassVar = {"init": ("random", "pretrained", "prune")}

    init: str | None = None
    path: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    loss: LossName = "forward_kl"
    depths: int = 4

    def __post_init__(self) -> None:
        self.init = self.init or ("random" if self.path is None else "pretrained")
        super().__post_init__()
        if self.init == "pretrained" and (self.path is None or self.model):
            raise BadInputError(
                "draft_model: init pretrained takes a model as it is: give its folder or Hub id as path, "
                "and leave out model."
            )
        if self.init != "pretrained" and self.path is not None:
            raise BadInputError(
                f"draft_model: init {self.init} does not start from a path; leave out path, or take init pretrained."
            )
        if self.init == "prune":
            check_names(self.model)


class DraftModel(Drafter[DraftModelConfig]):
    """A drafter that is any Hugging Face causal LM with the target's tokenizer: `DraftModel(model)`."""

    name = "draft_model"
    writes_text = True
    by_layers = True
    packs = True
    config_class = DraftModelConfig

    def __init__(self, model: PreTrainedModel, config: DraftModelConfig | None = None):
        super().__init__(config)
        self.model = model
        self._narrower = False  # than a target it was checked against, or opened for
        self._kept: LlamaRunner | None = None

    @classmethod
    def build(cls, config: DraftModelConfig, target: Target, token_counts: Tensor | None = None) -> Self:
        model: Any
        if config.path is not None:
            _check_tokenizer(config.path, target)
            model = load_causal_lm(config.path, dtype=torch.float32, strict=True)
            return cls(_cut(model, target).requires_grad_(True), config)
        if type(target.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # the text part of some models that see images
            raise IncompatibleError(
                f"{cls.name}: the library makes no language model of a {type(target.config).__name__} alone; name one "
                "with the same tokenizer (drafter.path), or take a head such as eagle3."
            )
        if config.init == "prune":
            return cls(pruned(target, config.model, token_counts), config)
        smaller = _smaller(target.config, config.model)
        model = AutoModelForCausalLM.from_config(smaller, dtype=torch.float32, trust_remote_code=False)
        return cls(model, config)

    @classmethod
    def from_folder(cls, folder: Path, values: dict[str, Any], target: Target | None) -> Self:
        if target is not None:
            _check_tokenizer(str(folder), target)
        model = load_causal_lm(str(folder), dtype="auto", strict=True).eval().requires_grad_(True)
        return cls(model if target is None else _cut(model, target))

    def save(self, path: str | Path) -> None:
        """Write a plain Hugging Face checkpoint: `transformers`, vLLM, SGLang and TGI load it as it is."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(path)

    def identity_settings(self) -> dict[str, Any]:
        return plain_config(self.model)  # how it was once made is not what it is

    def check(self, target: Target) -> None:
        own, theirs = self.runner.vocab_size, target.vocab_size
        if own != theirs:
            differ = f"the draft model's vocabulary has {own} entries, the target's {theirs}"
            if target.tokenizer is None:
                raise IncompatibleError(
                    f"{differ}; they must share one tokenizer. Only padding may differ: to show that it does, "
                    "give the target's tokenizer."
                )
            highest = max(target.tokenizer.get_vocab().values())
            if highest >= min(own, theirs):
                raise IncompatibleError(
                    f"{differ}, and their tokenizer has ids up to {highest}; "
                    "take a draft model that was made with this tokenizer."
                )
        self._narrower = own < theirs

    def writer(self) -> Target:
        return self.runner

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return the divergence at every position that predicts a supervised token."""
        own, vocab = Target(self.model), batch.target.vocab_size
        self._narrower = own.vocab_size < vocab
        tokens = _known(batch.tokens, own) if self._narrower else batch.tokens
        documents = batch.documents

        def last(rows: Tensor) -> Tensor:
            return own.forward(rows, logits=False).last

        hidden = last(tokens) if documents is None else documents.read(tokens, last)  # [B, T, H]
        parameters = list(self.model.get_output_embeddings().parameters())

        def head(states: Tensor) -> Tensor:
            return own.lm_head(states)[..., :vocab]

        return teacher_forced_loss(self, batch, hidden, head, parameters, self.config.depths)

    @property
    def abilities(self) -> Abilities:
        rewinds = self.runner.rewinds
        return Abilities(reads_nodes=rewinds, fixed_shapes=rewinds)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> NodeSession:
        runner = self.runner
        needed = min(max_length, target.max_context or max_length)
        if runner.max_context is not None and runner.max_context < needed:
            raise BadInputError(
                f"the draft model was built for {runner.max_context} positions, this generation needs {needed}; "
                "shorten it or take another drafter."
            )
        self._narrower = runner.vocab_size < target.vocab_size
        cache, vocab = runner.new_cache(batch_size, max_length + spare), target.vocab_size
        fused = self._fused(max_length + spare) if runs(self.model) else None
        return DraftModelSession(runner, cache, fused, self.output_ids, vocab)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        length, size = max_length + spare, self.runner.cache_bytes(batch_size, max_length + spare)
        if not runs(self.model) or self._fits(length):
            return size
        layers: Any = self.model.model.layers
        return size + copied_bytes(layers, layers[0].self_attn.head_dim, length)

    def _fused(self, length: int) -> LlamaRunner:
        """Return the runner that is kept from request to request, until it is too short or the weights have changed."""
        if self._kept is None or not self._fits(length):
            self._kept = LlamaRunner(self.model, length)
        return self._kept

    def _fits(self, length: int) -> bool:
        return self._kept is not None and self._kept.fits(self.model.model.layers, length)

    @cached_property
    def runner(self) -> Target:
        """The model as the library runs it."""
        return Target(self.model)

    @property
    def output_ids(self) -> Tensor | None:
        """The target's first V' ids where the model is narrower than the target; None elsewhere."""
        return torch.arange(self.runner.vocab_size, device=self.runner.device) if self._narrower else None


class DraftModelSession(NodeSession):
    """A session that holds a draft model's cache, and the tokens that it has not read yet.

    Args:
        runner: the model, as the library runs it.
        fused: reads all but prompts in place of `runner`, if it can run the model.
        vocab: V.
    """

    def __init__(
        self, runner: Target, cache: RaggedCache, fused: LlamaRunner | None, output_ids: Tensor | None, vocab: int
    ):
        super().__init__(output_ids, caches=[cache])
        self.runner = runner
        self.cache = cache
        self.fused = fused
        self.vocab = vocab
        self._start()

    def _start(self) -> None:
        # [B, P], the last tokens of `update`, which the cache may lack
        self.unread = torch.zeros(self.cache.batch_size, 0, dtype=torch.long, device=self.runner.device)
        self.end = self.unread  # the last token of the prompts, [B, 1]
        # Entries after the committed ones: the root and the drafts that were read; 0 since the last `update`.
        self.written = 0

    def reset(self) -> None:
        super().reset()
        self._start()

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        # The cache already holds the root and all drafts that were read: of an accepted path all but, at most, the
        # last. That one is left for `prefill`, so that it costs no pass of its own; where the host may ask, only if it
        # is missing.
        last = tokens.gather(1, counts.tensor[:, None] - 1)
        if not self.written and tokens.shape[1] == 1:  # nothing was drafted: the root, which `prefill` will read
            last = torch.cat([self.unread, last], 1)
        elif not self.written:  # the prompts, or another's drafts
            self._last(torch.cat([self.unread, tokens], 1), offset=-self.unread.shape[1])
            self.end, last = last, last[:, :0]
        elif path is not None:
            self.cache.keep(torch.cat([torch.zeros_like(path[:, :1]), torch.where(path < 0, path, path + 1)], 1))
        elif tokens.shape[1] - self.written > 1:
            self._last(tokens)
            last = last[:, :0] if self.cache.window is None else last  # rounds of fixed shapes all leave one
        elif self.cache.window is None and max(counts.values) <= self.written:
            last = last[:, :0]
        self.cache.advance(counts)
        self.unread, self.written = last, 0

    def read_ahead(self, keep: int) -> None:
        if not self.unread.shape[1]:
            self.unread = self.end  # which is read anew, as the last accepted draft is

    def prefill(self, root: Tensor) -> Tensor:
        return self.begin(root[:, None])[:, 0]

    def begin(self, tokens: Tensor) -> Tensor:
        """Read the root, and what follows it in `tokens` `[B, W]`; return logits `[B, W, V]`."""
        count, width = self.unread.shape[1], tokens.shape[1]
        logits = self.read(torch.cat([self.unread, tokens], 1) if count else tokens, count, offset=-count)
        self.written, self.tree = width, None
        return logits

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        logits = self.read(tokens, offset=self.written, nodes=self.grow(parents, 1))
        self.written += tokens.shape[1]
        return logits

    def read(self, tokens: Tensor, skip: int = 0, offset: int = 0, nodes: Nodes | None = None) -> Tensor:
        """Return logits `[B, Q − skip, V or V']` after the tokens `[B, Q]`, without the first `skip`."""
        last = self._last(tokens, offset, nodes)
        return (self.fused or self.runner).lm_head(last[:, skip:] if skip else last)[..., : self.vocab]

    def _last(self, tokens: Tensor, offset: int = 0, nodes: Nodes | None = None) -> Tensor:
        """Return the last hidden states `[B, Q, H]` of tokens `[B, Q]`, at the places of `Target.forward`."""
        if self.output_ids is not None:  # the model is narrower than the target
            tokens = _known(tokens, self.runner)
        if self.fused is None or (self.cache.window is None and not self.cache.longest):  # the library reads prompts
            return self.runner.forward(tokens, self.cache, logits=False, offset=offset, nodes=nodes).last
        positions = self.cache.place(tokens.shape[1], offset, nodes)
        return self.fused.run(tokens, self.cache, positions, nodes is not None)

    def carried(self) -> list[Tensor]:
        return [self.unread]

    def carry(self, tensors: list[Tensor]) -> None:
        (self.unread,) = tensors


def _known(tokens: Tensor, model: Target) -> Tensor:
    """Return the tokens with ids that the narrower `model` has (see the module's docstring)."""
    return tokens.clamp(max=model.vocab_size - 1)


def _check_tokenizer(path: str, target: Target) -> None:
    """Raise IncompatibleError for a draft model that comes with a tokenizer other than the target's."""
    if target.tokenizer is None:
        return
    own = load_tokenizer(model_folder(path, weights=False))
    if own is None:
        return
    try:
        require_same_vocabulary(own, target.tokenizer, f"the draft model in {path!r}")
    except IncompatibleError as error:
        raise IncompatibleError(f"{error} With a tokenizer of its own it drafts as drafter.type: tli.") from error


def _cut(model: Any, target: Target) -> Any:
    """Return the model without ids that the target lacks, as engines want vocabularies of one size."""
    if target.tokenizer is not None and model.get_output_embeddings().weight.shape[0] > target.vocab_size:
        model.resize_token_embeddings(target.vocab_size)
    return model


def _smaller(config: Any, changes: dict[str, Any]) -> Any:
    """Return the target's config with `changes`; head sizes follow the hidden size unless they are given."""
    values = config.to_dict()
    refuse_unknown_keys(changes, values, "drafter.model")
    for name in {*SIZES, "vocab_size", "head_dim"} & set(changes):
        if type(size := changes[name]) is not int or size < 1:
            raise BadInputError(f"drafter.model.{name}: expected an integer >= 1, found {size!r}.")
    dropped = ("architectures", "layer_types", "dtype", "torch_dtype")
    values = {k: v for k, v in values.items() if k not in dropped}
    if config.is_heterogeneous:  # whose class makes layers differ by itself
        values["per_layer_config"] = {}
    values |= changes
    if "num_attention_heads" in changes:
        values["num_key_value_heads"] = changes.get("num_key_value_heads", changes["num_attention_heads"])
    if "head_dim" not in changes and values.get("head_dim") and {"hidden_size", "num_attention_heads"} & set(changes):
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    try:
        return type(config)(**values)
    except LIBRARY_ERRORS as error:
        raise BadInputError(f"drafter.model: {reason(error)}") from error
