"""Multi-token prediction: modules that carry the target's last hidden state one token further each (DeepSeek-V3, arXiv 2412.19437, §2.2).

Module k reads h_i^{k−1} and the token x_{i+k} that followed, and its output h_i^k predicts x_{i+k+1} through the target's own output
embedding:

    h_i^k = Block_k(W_k [RMSNorm(Emb(x_{i+k})); RMSNorm(h_i^{k−1})]),    h_i^0 the target's, after its final norm.

The block is a layer of the target's own architecture, so that modules that come with a target's checkpoint fit (see `mtp_native`). Either
D modules draft D tokens, or one module reads its own outputs again (`recursive`; FastMTP, arXiv 2509.18362) and drafts as many as asked for.

Written by the place p = i + k of the token: reading x_p, module k takes what module k−1 made of x_{p−1}, and all predict x_{p+1}. So all modules
read every committed token; of a draft those that can: the target has no hidden state behind it, so module 1 cannot, and behind
the next draft module 2 cannot. In the recursive form, step 1 reads committed tokens, later steps drafts; the one cache keeps of step 1 everything
and of later steps what this path drafted. Training unrolls exactly that, as for EAGLE-3.

Shapes: B rows, T positions, Q tokens of one pass, P supervised positions, W nodes, H hidden size, V' draft vocabulary, D modules, S steps.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, DynamicCache

from ..ground import BadInputError, IncompatibleError, refuse_unknown_keys
from ..ground.libraries import LIBRARY_ERRORS, reason
from ..targets import Backbone, Counts, Nodes, RaggedCache, Target
from ..targets.sketch import sketching
from .base import DrafterConfig, DrafterLoss, TargetBatch
from .losses import LossName, chunked_compare, divergence, metrics_by_depth
from .parts.head_drafter import HeadConfig, HeadDrafter
from .parts.nodes import Branches, gathered, joined
from .session import Abilities


@dataclass
class MtpConfig(HeadConfig):
    """Settings of MTP modules; zeros mean "as the target".

    Attributes:
        depth: D, the number of modules.
        recursive: the one module reads its own outputs again, and drafts to any depth. Else D is the deepest proposal.
        steps: S, how often a recursive module is applied in training.
        decay: depth k weighs decay^(k−1) / Σ. 0.6 is FastMTP's, 1.0 DeepSeek-V3's.
        loss: see `losses.divergence`. Both papers' is hard_ce, against the token that followed.
        draft_vocab_size: the most frequent training tokens kept as outputs; 0 for all.
        norm_output: the next module, or step, reads the normed output, as in `transformers` and Megatron; False: the layer's own (vLLM's DeepSeek).
        hidden_first: the projection reads [hidden; embedding] instead of [embedding; hidden] (MiMo).
        init: `random` makes new modules; `native` starts from those of a checkpoint (see `mtp_native`). (A recipe may also give the folder of a
            saved drafter here; see `train`.)
        path: the checkpoint of `init: native`; None for the target's own.
        layer: fields of the target's config to change for the modules' layer, e.g. `{intermediate_size: 512}`. Its attention is full, its
            experts are those of the target's last layer.
    """

    init_words: ClassVar[tuple[str, ...]] = ("random", "native")

    depth: int = 1
    recursive: bool = True
    steps: int = 3
    decay: float = 0.6
    loss: LossName = "hard_ce"
    draft_vocab_size: int = 0
    norm_output: bool = True
    hidden_first: bool = False
    init: str = "random"
    path: str | None = None
    layer: dict[str, Any] = field(default_factory=dict)
    hidden_size: int = 0
    vocab_size: int = 0
    target_layers: int = 0

    def __post_init__(self) -> None:
        divergence(self.loss)
        for name in ("depth", "steps"):
            if getattr(self, name) < 1:
                raise BadInputError(f"mtp: {name} must be at least 1, got {getattr(self, name)}.")
        if self.decay <= 0:
            raise BadInputError(f"mtp: decay must be above 0, got {self.decay}.")
        if self.recursive and self.depth > 1:
            raise BadInputError(
                f"mtp: one module is applied recursively, found depth {self.depth}; set recursive to false, or leave out depth."
            )
        if self.init not in self.init_words:
            raise BadInputError(f"mtp: init must be one of {', '.join(self.init_words)}, found {self.init!r}.")
        if self.path is not None and self.init != "native":
            raise BadInputError("mtp: only init native starts from a path; leave out path, or set init to native.")

    def sizes(self, target: Target) -> dict[str, Any]:
        return super().sizes(target) | {
            "layer": self.layer if "model_type" in self.layer else _layer_values(target, self.layer)
        }

    @property
    def num_outputs(self) -> int:
        """How many depths are trained."""
        return self.steps if self.recursive else self.depth


# A module's layer is the last of the target, with full attention; what says where experts begin is counted from the first.
_ALONE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "vocab_size": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "layer_types": ["full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "mtp_num_hidden_layers": 0,
}
# How it is computed is no part of what it is; such a setting may even name code of the Hub.
_NOT_OF_A_LAYER = (
    "model_type",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)
_OF_A_CHECKPOINT = (
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "auto_map",
    "transformers_version",
    "_name_or_path",
)


def _layer_values(target: Target, changes: dict[str, Any]) -> dict[str, Any]:
    """The config of a model of one layer like the target's last, as config.json has it."""
    values = target.config.to_dict()
    refuse_unknown_keys(changes, values, "drafter.layer")
    values = {k: v for k, v in values.items() if k not in _OF_A_CHECKPOINT}
    values |= {k: v[-1:] for k, v in values.items() if isinstance(v, list) and len(v) == target.num_layers}
    values |= {k: v for k, v in _ALONE.items() if values.get(k) is not None}
    try:
        made = type(target.config)(**(values | changes))
    except LIBRARY_ERRORS as error:
        raise BadInputError(f"drafter.layer: {reason(error)}") from error
    saved = json.loads(made.to_json_string(use_diff=True))
    return {k: v for k, v in saved.items() if k not in _OF_A_CHECKPOINT}


def plain_body(values: dict[str, Any]) -> Any:
    """A `transformers` model of one layer from the config `values`, with an embedding of one token that nobody reads.

    Raises:
        IncompatibleError: the library does not know this architecture or refuses its settings, or it is not of the kind that MTP modules are made of.
    """
    kind = values.get("model_type")
    if kind is None:
        raise IncompatibleError(
            "mtp: the config of a module's layer names no model_type, so nobody knows what it is a layer of."
        )
    try:
        body = AutoModel.from_config(
            AutoConfig.for_model(kind, **{k: v for k, v in values.items() if k not in _NOT_OF_A_LAYER}),
            dtype=torch.float32,
        )
    except LIBRARY_ERRORS as error:
        raise IncompatibleError(
            f"mtp: transformers cannot make a layer of a {kind!r} model ({reason(error)})."
        ) from error
    if not isinstance(getattr(body, "norm", None), nn.Module) or not hasattr(body, "layers"):
        raise IncompatibleError(
            f"mtp: {type(body).__name__} is not a stack of layers with one norm behind them; take another drafter."
        )
    return body


class Module(nn.Module):
    """One MTP module: two norms, a projection, a layer of the target's architecture and the norm that the output embedding reads."""

    def __init__(self, config: MtpConfig):
        super().__init__()
        body = plain_body(config.layer)
        if body.config.hidden_size != config.hidden_size:
            raise BadInputError(
                f"mtp: a layer of hidden_size {body.config.hidden_size} does not fit the target's {config.hidden_size}; leave it out of layer."
            )
        self.embedding_norm, self.hidden_norm, self.norm = copy.deepcopy(body.norm), copy.deepcopy(body.norm), body.norm
        self.projection = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        body.norm = nn.Identity()
        body.set_input_embeddings(None)
        self.body = body
        self.hidden_first, self.norm_output = config.hidden_first, config.norm_output

    def mixed(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What the layer reads, from embeddings and hidden states `[B, Q, H]`."""
        dtype = self.projection.weight.dtype
        parts = [self.embedding_norm(embedded.to(dtype)), self.hidden_norm(hidden.to(dtype))]
        return self.projection(torch.cat(parts[::-1] if self.hidden_first else parts, -1))

    def answer(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """What is handed on, and what the output embedding reads, from the layer's output."""
        normed = self.norm(output)
        return normed if self.norm_output else output, normed


@dataclass
class _State:
    """Lists are by module.

    `previous`: what each but the last handed on behind its last committed entry, `[B, 1, H]`: the next one's next entry reads it.
    """

    caches: list[RaggedCache]
    target: Target
    previous: list[Tensor]
    tokens: Tensor | None = None  # [B, Q] processed by the target, not yet by the modules
    hidden: Tensor | None = None  # [B, Q, H], the target's
    counts: Counts | None = None
    outputs: list[Tensor] = field(
        default_factory=list
    )  # handed on behind the root and each drafted node, [B, 1 + n, H]
    passes: int = 0  # of `extend` in this round: no node is deeper
    read: int = 0  # nodes that they read
    depths: Tensor | None = None  # of the root and each node of a tree, [B, 1 + n]; None in a chain
    branches: Branches | None = None


class Mtp(HeadDrafter):
    """MTP modules. Embeddings and the output embedding are the target's."""

    name = "mtp"
    config_class = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig):
        super().__init__(config)
        self.parts = nn.ModuleList(Module(config) for _ in range(config.depth))

    @property
    def max_depth(self) -> int | None:
        return None if self.config.recursive else self.config.depth

    @classmethod
    def build(cls, config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> Self:
        drafter = super().build(config, target, token_counts)
        if drafter.config.init == "native":
            from .parts.mtp_native import load_native

            if not sketching():  # what has no contents is planned with, and asks for no checkpoint
                load_native(drafter, target, drafter.config.path)
            drafter.config.path = None  # where its weights once came from is no part of what it is
        return drafter

    def module(self, index: int) -> Module:
        """Counted from 0."""
        found = self.parts[index]
        assert isinstance(found, Module)
        return found

    def lm_head(self, target: Target) -> Callable[[Tensor], Tensor]:
        """Normed outputs `[..., H]` to logits `[..., V']`: the target's own output embedding."""
        return lambda normed: target.lm_head(normed, self.output_ids)

    # ------------------------------------------------------------ training

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Σ_k decay^(k−1) / Σ_j decay^(j−1) · Σ_positions loss_k."""
        wanted = batch.supervised.clone()
        wanted[:, :2] = False  # the first module's first prediction is x_2
        rows, places = wanted.nonzero(as_tuple=True)
        count = self.config.num_outputs
        begin = (wanted.int().argmax(1) - 1 - count).clamp(min=0)
        outputs = self.unroll(batch.target, batch.tokens, batch.last, begin)
        index = (
            places - 2 - begin[rows] - torch.arange(count, device=places.device)[:, None]
        )  # [S, P], of the outputs that predict these tokens
        here = index >= 0
        weights = self.config.decay ** torch.arange(count, device=places.device)
        result = chunked_compare(
            batch.last[rows, places - 1],
            torch.stack([o[rows, i.clamp(min=0)] for o, i in zip(outputs, index, strict=True)]),
            batch.target.lm_head,
            self.lm_head(batch.target),
            divergence(self.config.loss),
            self.output_ids,
            (weights / weights.sum())[:, None] * here,
            following=batch.tokens[rows, places],
        )
        return DrafterLoss(result.total, wanted.sum(), metrics_by_depth(result, wanted, here))

    def unroll(self, target: Target, tokens: Tensor, last: Tensor, begin: Tensor | None = None) -> list[Tensor]:
        """Normed outputs of each depth, `[B, T', H]`.

        Index j of row b and depth k (from 1) stands for i = begin[b] + j: it has read the tokens up to x_{i+k} and predicts x_{i+k+1}. Where a row has
        no such token, it means nothing. `begin` `[B]` is 0 if None.

        Args:
            last: the target's last hidden states, `[B, T, H]`.
        """
        every = torch.arange(tokens.shape[1], device=tokens.device)
        at = every[None] if begin is None else begin[:, None] + every[: len(every) - int(begin.min())]
        embedded = target.embed(tokens)
        if self.config.recursive:
            return self._unroll_one(embedded, last, at)
        outputs = []
        for k in range(self.config.depth):
            module = self.module(k)
            x = module.mixed(gathered(embedded, every[None] + 1 + k), last)
            last, normed = module.answer(module.body(inputs_embeds=x, use_cache=False).last_hidden_state)
            outputs.append(gathered(normed, at))
        return outputs

    def _unroll_one(self, embedded: Tensor, last: Tensor, at: Tensor) -> list[Tensor]:
        """The recursive form at `at` `[B or 1, T']`: later steps see step 1's entries up to their own, and one entry per step since."""
        module, every = self.module(0), torch.arange(embedded.shape[1], device=embedded.device)
        cache = DynamicCache()
        arguments: dict[str, Any] = {"position_ids": every[None].expand(len(embedded), -1)}
        x = module.mixed(gathered(embedded, every[None] + 1), last)
        rows, width = len(embedded), at.shape[1]
        visible = (every <= at[:, :, None])[:, None].expand(rows, -1, -1, -1)  # [B, 1, T', T]
        own = torch.eye(width, dtype=torch.bool, device=at.device).expand(rows, 1, -1, -1)
        outputs = []
        for step in range(self.config.steps):
            output, normed = module.answer(
                module.body(inputs_embeds=x, past_key_values=cache, use_cache=True, **arguments).last_hidden_state
            )
            if step == 0:
                output, normed = gathered(output, at), gathered(normed, at)
            outputs.append(normed)
            if step + 1 < self.config.steps:
                x = module.mixed(gathered(embedded, at + 2 + step), output)
                visible = torch.cat([visible, own], -1)
                arguments = {
                    "position_ids": (at + 1 + step).expand(rows, -1),
                    "attention_mask": self._mask(visible, x.dtype),
                }
        return outputs

    def _mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Float (bool masks are silently wrong under eager attention), and by kind where the architecture has several."""
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(dtype).min
        )
        return {"full_attention": mask} if getattr(self.module(0).body.config, "layer_types", None) else mask

    # ------------------------------------------------------------ decoding

    @cached_property
    def runners(self) -> list[Backbone]:
        """The modules' layers as models that run; kept for what they know of themselves."""
        return [Backbone(self.module(k).body, reads_embeddings=True) for k in range(self.config.depth)]

    @property
    def abilities(self) -> Abilities:
        return Abilities(reads_nodes=True, fixed_shapes=True)

    def open_state(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> _State:
        caches = [runner.new_cache(batch_size, max_length + spare) for runner in self.runners]
        for k, cache in enumerate(caches):
            cache.first = k  # x_p is entry p − 1; module k, counted from 0, has none before x_{k+1}
        weight = self.module(0).projection.weight
        previous = [
            torch.zeros(batch_size, 1, self.config.hidden_size, dtype=weight.dtype, device=weight.device)
            for _ in caches[1:]
        ]
        return _State(caches, target, previous)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        handed_on = (
            (self.config.depth - 1)
            * batch_size
            * self.config.hidden_size
            * self.module(0).projection.weight.dtype.itemsize
        )
        return handed_on + sum(runner.cache_bytes(batch_size, max_length + spare) for runner in self.runners)

    def absorb(
        self, state: _State, tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None
    ) -> None:
        # The entry of the last hidden state needs the token behind it: `begin` knows that one. It also reads accepted drafts anew:
        # now there are true hidden states for the first module.
        assert hidden is not None
        hidden = hidden[:, :, 0]
        if state.tokens is not None and state.hidden is not None and state.counts is not None:
            tokens, hidden = joined(state.tokens, state.counts, tokens), joined(state.hidden, state.counts, hidden)
            counts = state.counts.plus(counts)
        state.tokens, state.hidden, state.counts = tokens, hidden, counts

    def begin(self, state: _State, root: Tensor) -> Tensor:
        assert state.tokens is not None
        assert state.hidden is not None
        assert state.counts is not None
        if state.caches[0].window is None:  # the host may ask how many there are
            longest = max(state.counts.values)
            state.tokens, state.hidden = state.tokens[:, :longest], state.hidden[:, :longest]
        last = (state.counts.tensor - 1)[:, None]
        embedded = state.target.embed(state.tokens.roll(-1, 1).scatter(1, last, root[:, None]))
        hidden, answers = state.hidden, []
        state.outputs = []
        for k, cache in enumerate(state.caches):
            output, normed = self._step(state, k, embedded, hidden, 0)
            cache.advance(state.counts)
            answers.append(gathered(normed, last))
            state.outputs.append(gathered(output, last))
            if k + 1 < len(state.caches):
                hidden = torch.cat([state.previous[k], output[:, :-1]], 1)
        state.previous = state.outputs[:-1]
        state.tokens, state.branches, state.depths, state.passes, state.read = None, None, None, 0, 0
        return self.lm_head(state.target)(answers[0])[:, 0]

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        depth, in_tree = self.config.depth, parents is not None
        if not self.config.recursive and (state.passes + 1 >= depth if not in_tree else depth == 1):
            raise BadInputError(
                f"this mtp drafter has {depth} modules, so it drafts no deeper than that; lower the depth."
            )
        state.passes += 1
        nodes = self._place(state, parents) if parents is not None else None
        embedded = state.target.embed(tokens)
        # Module and whose outputs it reads. The first cannot read drafts; in a chain, nor can as many more as were read before.
        pairs = (
            [(0, 0)] if self.config.recursive else [(k, k - 1) for k in range(1 if in_tree else state.passes, depth)]
        )
        read = state.read
        befores = [
            state.outputs[source][:, -1:] if parents is None else gathered(state.outputs[source], parents + 1)
            for _, source in pairs
        ]
        found = []
        for (index, _), before in zip(pairs, befores, strict=True):
            output, normed = self._step(state, index, embedded, before, read, nodes)
            state.outputs[index] = torch.cat([state.outputs[index], output], 1)
            found.append(normed)
        state.read += tokens.shape[1]
        return self.lm_head(state.target)(
            found[0]
            if state.depths is None or len(found) == 1
            else _by_depth(found, state.depths[:, -tokens.shape[1] :])
        )

    def _place(self, state: _State, parents: Tensor) -> Nodes:
        """Places of nodes below `parents` `[B, W]`; their depths are noted."""
        if state.branches is None or state.depths is None:
            state.branches, state.depths = Branches(len(parents), 0, parents.device), torch.zeros_like(parents[:, :1])
        state.depths = torch.cat([state.depths, state.depths.gather(1, parents + 1) + 1], 1)
        return state.branches.grow(parents)

    def _step(
        self, state: _State, index: int, embedded: Tensor, hidden: Tensor, offset: int, nodes: Nodes | None = None
    ) -> tuple[Tensor, Tensor]:
        """A pass of the module at `index`, written behind its committed entries plus `offset`: what is handed on, and normed, `[B, Q, H]`."""
        module = self.module(index)
        x = module.mixed(embedded, hidden)
        last, _ = self.runners[index].run(x, state.caches[index], offset=offset, nodes=nodes)
        return module.answer(last)

    def caches(self, state: _State) -> list[RaggedCache]:
        return state.caches

    def carried(self, state: _State) -> list[Tensor]:
        assert state.tokens is not None
        assert state.hidden is not None
        assert state.counts is not None
        return [state.tokens, state.hidden, state.counts.tensor, *state.previous]

    def carry(self, state: _State, tensors: list[Tensor]) -> None:
        state.tokens, state.hidden, state.counts, state.previous = (
            tensors[0],
            tensors[1],
            Counts(tensors[2]),
            tensors[3:],
        )

    def reset(self, state: _State) -> None:
        super().reset(state)
        state.previous = [torch.zeros_like(before) for before in state.previous]
        state.tokens = state.hidden = state.counts = state.branches = state.depths = None
        state.outputs, state.passes, state.read = [], 0, 0

    def select(self, state: _State, rows: list[int]) -> None:
        for cache in state.caches:
            cache.select(rows)
        state.previous = [before[rows] for before in state.previous]
        if state.tokens is not None and state.hidden is not None and state.counts is not None:
            state.tokens, state.hidden, state.counts = state.tokens[rows], state.hidden[rows], state.counts.select(rows)


def _by_depth(found: list[Tensor], depths: Tensor) -> Tensor:
    """Of each node at `depths` `[B, W]`, counted from 1, the entry `[B, W, H]` of the list that its depth picks: the host does not know which is whose."""
    index = (depths - 1).clamp(max=len(found) - 1)
    return torch.stack(found).gather(0, index[None, :, :, None].expand(1, *found[0].shape))[0]
