"""Multi-token prediction: modules that carry the target's last hidden state one token further each.

(DeepSeek-V3, arXiv 2412.19437, §2.2.) Module k reads h_i^{k−1} and the token x_{i+k} that followed, and its output
h_i^k predicts x_{i+k+1} through the target's own output embedding:

    h_i^k = Block_k(W_k [RMSNorm(Emb(x_{i+k})); RMSNorm(h_i^{k−1})]),    h_i^0 the target's, after its final norm.

The block is a layer of the target's own architecture (mtp_checkpoint.py). Either D modules draft D tokens, or one
module reads its own outputs again (`recursive`; FastMTP, arXiv 2509.18362) and drafts any number.

By the place p = i + k of the token: reading x_p, module k takes module k−1's output at x_{p−1}, and all predict
x_{p+1}. All modules read every committed token; of drafts, module 1 reads none, as the target has no hidden state
there, module 2 reads the first but not the second, and so on. A recursive module reads committed tokens in step 1 and
drafts in later steps. Training unrolls exactly that, as for EAGLE-3.

Shapes: B rows, T positions, Q tokens of one pass, P supervised positions, W nodes, H hidden size, V' draft vocabulary,
D modules, S steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..common import BadInputError
from ..targets import Backbone, Nodes, RaggedCache, RowLengths, Target
from ..targets.loading import on_meta_device
from .base import DrafterLoss, HeadConfig, HeadDrafter, TargetBatch
from .divergences import LossName
from .losses import FIRST_LEARNED, LossSettings, compare_drafts, divergence, metrics_by_depth
from .mtp_checkpoint import layer_values, load_native, plain_body
from .session import Abilities, DeferredPrefillSession, required, take_positions


@dataclass
class MtpConfig(HeadConfig):
    """Settings of MTP modules; zeros mean "as the target".

    Attributes:
        depth: D, the number of modules.
        recursive: the one module reads its own outputs again, and drafts to any depth. Else D is the largest depth.
        steps: S, how often a recursive module is applied in training.
        decay: depth k weighs decay^(k−1) / Σ. 0.6 is FastMTP's, 1.0 DeepSeek-V3's.
        loss: both papers' is hard_ce, against the token that followed.
        norm_output: the next module, or step, reads the normed output, as in `transformers` and Megatron; False: the
            layer's own (vLLM's DeepSeek).
        hidden_first: the projection reads [hidden; embedding] instead of [embedding; hidden] (MiMo).
        init: `random` makes new modules; `native` starts from those of a checkpoint (see mtp_checkpoint.py).
        path: the checkpoint of `init: native`; None for the target's own.
        layer: fields of the target's config to change for the modules' layer, e.g. `{intermediate_size: 512}`.
    """

    least: ClassVar = {"depth": 1, "steps": 1}
    words: ClassVar = {"init": ("random", "native")}

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
        super().__post_init__()
        if self.recursive and self.depth > 1:
            raise BadInputError(
                f"mtp: one module is applied recursively, found depth {self.depth}; "
                "set recursive to false, or leave out depth."
            )
        if self.path is not None and self.init != "native":
            raise BadInputError("mtp: only init native starts from a path; leave out path, or set init to native.")

    def sizes(self, target: Target) -> dict[str, Any]:
        whole = "model_type" in self.layer
        return super().sizes(target) | {"layer": self.layer if whole else layer_values(target, self.layer)}

    @property
    def num_outputs(self) -> int:
        """The number of depths that are trained."""
        return self.steps if self.recursive else self.depth


class Module(nn.Module):
    """An MTP module: two norms, a projection, a layer of the target's architecture and the norm of its output."""

    def __init__(self, config: MtpConfig):
        super().__init__()
        body = plain_body(config.layer)
        if body.config.hidden_size != config.hidden_size:
            raise BadInputError(
                f"mtp: a layer of hidden_size {body.config.hidden_size} does not fit the target's "
                f"{config.hidden_size}; leave it out of layer."
            )
        self.embedding_norm = copy.deepcopy(body.norm)
        self.hidden_norm = copy.deepcopy(body.norm)
        self.norm = body.norm
        self.projection = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        body.norm = nn.Identity()
        body.set_input_embeddings(None)
        self.body = body
        self.hidden_first, self.norm_output = config.hidden_first, config.norm_output

    def mixed(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's input, of embeddings and hidden states `[B, Q, H]`."""
        dtype = self.projection.weight.dtype
        parts = [self.embedding_norm(embedded.to(dtype)), self.hidden_norm(hidden.to(dtype))]
        return self.projection(torch.cat(parts[::-1] if self.hidden_first else parts, -1))

    def answer(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next module's input and the output embedding's, of the layer's output."""
        normed = self.norm(output)
        return normed if self.norm_output else output, normed


class Mtp(HeadDrafter[MtpConfig]):
    """A drafter of MTP modules, with the target's embeddings and output embedding."""

    name = "mtp"
    packs = True
    config_class = MtpConfig
    abilities = Abilities(reads_nodes=True, fixed_shapes=True)

    def __init__(self, config: MtpConfig):
        super().__init__(config)
        self.parts = nn.ModuleList(Module(config) for _ in range(config.depth))

    @property
    def max_depth(self) -> int | None:
        return None if self.config.recursive else self.config.depth

    @property
    def trained_depth(self) -> int:
        return self.config.num_outputs

    @classmethod
    def build(cls, config: MtpConfig, target: Target, token_counts: Tensor | None = None) -> Self:
        drafter = super().build(config, target, token_counts)
        if config.init == "native":
            if not on_meta_device():  # what has no contents is planned with, and asks for no checkpoint
                if config.hidden_first:
                    raise BadInputError("mtp: native modules project [embedding; hidden]; leave out hidden_first.")
                load_native(list(drafter.parts), drafter.config.layer, target, drafter.config.path)
            drafter.config.path = None  # where its weights once came from is no part of what it is
        return drafter

    def module(self, index: int) -> Module:
        return cast(Module, self.parts[index])

    def lm_head(self, target: Target) -> Callable[[Tensor], Tensor]:
        """Return the target's output embedding, for normed outputs."""
        return lambda normed: target.lm_head(normed, self.output_ids)

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return Σ_k decay^(k−1) / Σ_j decay^(j−1) · Σ_positions loss_k."""
        return DrafterLoss.sum(self._loss_of_texts(texts) for texts in batch.texts())

    def _loss_of_texts(self, batch: TargetBatch) -> DrafterLoss:
        """Return the loss of rows that hold one text each."""
        wanted = batch.supervised.clone()
        wanted[:, :FIRST_LEARNED] = False
        rows, places = wanted.nonzero(as_tuple=True)
        count = self.config.num_outputs
        begin = (wanted.int().argmax(1) - 1 - count).clamp(min=0)
        outputs = self.unroll(batch.target, batch.tokens, batch.last, begin)  # S times [B, T', H]
        steps = torch.arange(count, device=places.device)[:, None]
        index = places - 2 - begin[rows] - steps  # [S, P], of the outputs that predict these tokens
        here = index >= 0
        decay = self.config.decay**steps
        weights = decay / decay.sum() * here
        predicted = torch.stack([o[rows, i.clamp(min=0)] for o, i in zip(outputs, index, strict=True)])  # [S, P, H]
        loss = divergence(self.config.loss)
        settings = LossSettings(batch.target.lm_head, self.lm_head(batch.target), loss, self.output_ids)
        result = compare_drafts(batch, rows, places, predicted, settings, weights)
        return DrafterLoss(result.total, wanted.sum(), metrics_by_depth(result, wanted, here))

    def unroll(self, target: Target, tokens: Tensor, last: Tensor, begin: Tensor | None = None) -> list[Tensor]:
        """Return the normed outputs of each depth, `[B, T', H]`.

        Index j of row b and depth k (from 1) stands for i = begin[b] + j: it has read the tokens up to x_{i+k} and
        predicts x_{i+k+1}. Where a row has no such token, it is arbitrary.

        Args:
            last: the target's last hidden states, `[B, T, H]`.
            begin: `[B]`; None for zeros.
        """
        every = torch.arange(tokens.shape[1], device=tokens.device)
        at = every[None] if begin is None else begin[:, None] + every[: len(every) - int(begin.min())]
        embedded = target.embed(tokens)
        if self.config.recursive:
            return self._unroll_one(embedded, last, at)
        outputs = []
        for k in range(self.config.depth):
            module = self.module(k)
            x = module.mixed(take_positions(embedded, every[None] + 1 + k), last)
            last, normed = module.answer(module.body(inputs_embeds=x, use_cache=False).last_hidden_state)
            outputs.append(take_positions(normed, at))
        return outputs

    def _unroll_one(self, embedded: Tensor, last: Tensor, at: Tensor) -> list[Tensor]:
        """Unroll the recursive form at `at` `[B or 1, T']`: later steps attend to step 1 up to it, and each other."""
        module, every = self.module(0), torch.arange(embedded.shape[1], device=embedded.device)
        cache = DynamicCache()
        arguments: dict[str, Any] = {"position_ids": every[None].expand(len(embedded), -1)}
        x = module.mixed(take_positions(embedded, every[None] + 1), last)
        rows, width = len(embedded), at.shape[1]
        visible = (every <= at[:, :, None])[:, None].expand(rows, -1, -1, -1)  # [B, 1, T', T]
        own = torch.eye(width, dtype=torch.bool, device=at.device).expand(rows, 1, -1, -1)
        outputs = []
        for step in range(self.config.steps):
            output, normed = module.answer(
                module.body(inputs_embeds=x, past_key_values=cache, use_cache=True, **arguments).last_hidden_state
            )
            if step == 0:
                output, normed = take_positions(output, at), take_positions(normed, at)
            outputs.append(normed)
            if step + 1 < self.config.steps:
                x = module.mixed(take_positions(embedded, at + 2 + step), output)
                visible = torch.cat([visible, own], -1)
                arguments = {
                    "position_ids": (at + 1 + step).expand(rows, -1),
                    "attention_mask": self._mask(visible, x.dtype),
                }
        return outputs

    def _mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)  # bool masks are silently wrong under eager attention
        return {"full_attention": mask} if getattr(self.module(0).body.config, "layer_types", None) else mask

    @cached_property
    def runners(self) -> list[Backbone]:
        """The modules' layers, as decoding runs them."""
        return [Backbone(self.module(k).body, reads_embeddings=True) for k in range(self.config.depth)]

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> MtpSession:
        return MtpSession(self, target, batch_size, max_length + spare)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        item = self.module(0).projection.weight.dtype.itemsize
        handed_on = (self.config.depth - 1) * batch_size * self.config.hidden_size * item
        return handed_on + sum(runner.cache_bytes(batch_size, max_length + spare) for runner in self.runners)

    def step(
        self, index: int, x: tuple[Tensor, Tensor], cache: RaggedCache, offset: int, nodes: Nodes | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `Module.answer` of the module at `index` for embeddings and hidden states `[B, Q, H]`.

        Its entries are written `offset` after the committed ones. `nodes`: their places in a tree; None for a chain.
        """
        module = self.module(index)
        last, _ = self.runners[index].run(module.mixed(*x), cache, offset=offset, nodes=nodes)
        return module.answer(last)


class MtpSession(DeferredPrefillSession):
    """A session that holds the modules' caches and outputs, in lists by module.

    Attributes:
        previous: of each but the last, its output at its last committed entry, `[B, 1, H]`: the next module's next
            entry reads it.
        outputs: after the root and each drafted node of this round, `[B, 1 + n, H]`.
        passes: of `decode` in this round: no node is deeper.
    """

    def __init__(self, drafter: Mtp, target: Target, batch_size: int, length: int):
        caches = [runner.new_cache(batch_size, length) for runner in drafter.runners]
        super().__init__(drafter.output_ids, caches)
        self.drafter, self.target = drafter, target
        for k, cache in enumerate(self._caches):
            cache.first = k  # x_p is entry p − 1; module k, counted from 0, has none before x_{k+1}
        weight = drafter.module(0).projection.weight
        empty = torch.zeros(batch_size, 1, drafter.config.hidden_size, dtype=weight.dtype, device=weight.device)
        self.previous = [empty.clone() for _ in self._caches[1:]]
        self._begin_round([])

    def _begin_round(self, outputs: list[Tensor]) -> None:
        self.outputs = outputs
        self.passes = 0
        self.tree = None

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        # `prefill` brings the token after the last hidden state. It also reads accepted drafts anew: now there are true
        # hidden states for the first module.
        self.note(tokens, required(hidden, "mtp: update needs the target's hidden states.")[:, :, 0], counts)

    def prefill(self, root: Tensor) -> Tensor:
        read = self.waiting()
        last = (read.counts.tensor - 1)[:, None]
        embedded = self.target.embed(read.tokens.roll(-1, 1).scatter(1, last, root[:, None]))
        hidden = read.hidden
        answers = []
        outputs = []
        for k, cache in enumerate(self._caches):
            output, normed = self.drafter.step(k, (embedded, hidden), cache, 0)
            cache.advance(read.counts)
            answers.append(take_positions(normed, last))
            outputs.append(take_positions(output, last))
            if k + 1 < len(self._caches):
                hidden = torch.cat([self.previous[k], output[:, :-1]], 1)
        self.previous, self.unread = outputs[:-1], None
        self._begin_round(outputs)
        return self._logits(answers[0])[:, 0]

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        self.passes += 1
        readers = self._readers(parents is not None)
        nodes = self.grow(parents)
        embedded, offset = self.target.embed(tokens), self.outputs[-1].shape[1] - 1
        sources = [self.outputs[source] for _, source in readers]
        before = [x[:, -1:] if parents is None else take_positions(x, parents + 1) for x in sources]  # [B, W, H]
        answers = []
        for (index, _), hidden in zip(readers, before, strict=True):
            output, normed = self.drafter.step(index, (embedded, hidden), self._caches[index], offset, nodes)
            self.outputs[index] = torch.cat([self.outputs[index], output], 1)
            answers.append(normed)
        return self._logits(answers[0] if nodes is None or len(answers) == 1 else _by_depth(answers, nodes.depths))

    def _readers(self, in_tree: bool) -> list[tuple[int, int]]:
        """Return the modules that read in this pass, each with the one whose outputs it reads."""
        config = self.drafter.config
        if config.recursive:
            return [(0, 0)]
        # A chain's pass k is read by the modules from k on. Nodes of a tree are of any depth, so all modules read them.
        first = 1 if in_tree else self.passes
        if first >= config.depth:
            raise BadInputError(
                f"this mtp drafter has {config.depth} modules, so it drafts no deeper than that; lower the depth."
            )
        return [(k, k - 1) for k in range(first, config.depth)]

    def _logits(self, normed: Tensor) -> Tensor:
        return self.drafter.lm_head(self.target)(normed)

    def carried(self) -> list[Tensor]:
        return [*super().carried(), *self.previous]

    def carry(self, tensors: list[Tensor]) -> None:
        super().carry(tensors[:3])
        self.previous = tensors[3:]

    def reset(self) -> None:
        super().reset()
        self.previous = [torch.zeros_like(before) for before in self.previous]
        self._begin_round([])

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.previous = [before[rows] for before in self.previous]


def _by_depth(answers: list[Tensor], depths: Tensor) -> Tensor:
    """Return for each node the answer `[B, W, H]` of its depth `[B, W]` (0 below the root)."""
    index = depths.clamp(max=len(answers) - 1)
    return torch.stack(answers).gather(0, index[None, :, :, None].expand(1, *answers[0].shape))[0]
