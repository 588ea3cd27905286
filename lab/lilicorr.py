"""LiLiCorr: DFlash, and a small transformer that scores pairs of tokens of neighbouring drafts (arXiv 2608.20530).

After the block pass the C most probable tokens of each draft are its candidates. A transformer reads the candidates of
all drafts at once, and gives each of them two unit vectors: `out` for the draft after it, `in` for the draft before it.

    score(a → b) = scale · ⟨out(a), in(b)⟩

where a is the candidate that was drafted before b; before the first draft stands the anchor, the target's last fused
hidden state. Drafts are drawn from the softmax of these scores over the candidates, and scored with it, so the text
stays the target's. DFlash's logits choose the candidates; their log-probabilities are inputs of the transformer, and no
part of the score. Code and layout are those of NVIDIA's Model-Optimizer (training), SGLang and vLLM.

Shapes: B rows, A anchors of a batch, k drafts, C candidates, W nodes, H hidden size, L width of the transformer, F size
of a vector, V' draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..common import BadInputError
from ..heads.block.block_layers import BlockLayer
from ..heads.block.block_losses import FollowingLearning
from ..heads.block.dflash import DFlash
from ..heads.block.dflash2 import CandidateSession, ConvolvedBlockLayer, ConvolvedConfig
from ..heads.decoder_layer import norm_of
from ..heads.losses import TargetDistribution
from ..heads.session import required, take_positions
from ..targets import RowLengths, Target
from ..targets.fused_layers import normed

FEATURES = 5  # of a candidate: see `Correlator.features`


@dataclass
class LiLiCorrConfig(ConvolvedConfig):
    """Settings of a LiLiCorr drafter: DFlash's, DFlash2's convolutions if there are any, and those of the transformer.

    Attributes:
        lilicorr_candidate_topk: C, the candidates of each draft. Engines serve 1, 2, 4, 8 and 16.
        lilicorr_hidden_size: L; 0 for the hidden size. Published drafters have a quarter of it.
        lilicorr_num_layers: of the transformer.
        lilicorr_num_heads: of its attention; a divisor of L.
        lilicorr_mlp_ratio: units of its feed-forwards, in units of L.
        lilicorr_factor_dim: F; 0 for L.
        lilicorr_logit_scale: the largest score; the probabilities of two candidates differ at most by e to twice that.
        lilicorr_vector_eps: shorter vectors are divided by it, and so stay shorter than 1.
    """

    least: ClassVar = ConvolvedConfig.least | dict.fromkeys(
        ("lilicorr_candidate_topk", "lilicorr_num_layers", "lilicorr_num_heads"), 1
    )

    lilicorr_candidate_topk: int = 8
    lilicorr_hidden_size: int = 0
    lilicorr_num_layers: int = 2
    lilicorr_num_heads: int = 8
    lilicorr_mlp_ratio: float = 2.0
    lilicorr_factor_dim: int = 0
    lilicorr_logit_scale: float = 8.0
    lilicorr_vector_eps: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lilicorr_hidden_size = self.lilicorr_hidden_size or self.hidden_size
        self.lilicorr_factor_dim = self.lilicorr_factor_dim or self.lilicorr_hidden_size
        width = self.lilicorr_hidden_size
        heads = self.lilicorr_num_heads
        count = self.lilicorr_candidate_topk
        if width % heads:
            raise BadInputError(f"drafter: lilicorr_num_heads {heads} does not divide lilicorr_hidden_size {width}.")
        if 0 < self.draft_vocab_size < count:
            raise BadInputError(
                f"drafter: lilicorr_candidate_topk {count} is more than the {self.draft_vocab_size} tokens of the "
                "draft vocabulary."
            )
        for name, most in (("mlp_ratio", 64), ("logit_scale", 1e4), ("vector_eps", 0.5)):
            if not 0 < (value := getattr(self, f"lilicorr_{name}")) < most:
                raise BadInputError(f"drafter: lilicorr_{name} must be above 0 and below {most:g}, got {value}.")


class TwoLayers(nn.Module):
    """A feed-forward of two layers with biases."""

    def __init__(self, inputs: int, units: int, outputs: int):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(inputs, units), nn.Linear(units, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.up_proj(x)))


class LatticeLayer(nn.Module):
    """A layer of the transformer; every candidate attends to all of its block."""

    def __init__(self, config: LiLiCorrConfig):
        super().__init__()
        width = config.lilicorr_hidden_size
        self.attn_norm, self.mlp_norm = norm_of(config, width), norm_of(config, width)
        self.attn = nn.MultiheadAttention(width, config.lilicorr_num_heads, batch_first=True)
        self.mlp = TwoLayers(width, int(width * config.lilicorr_mlp_ratio), width)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Return the output for `hidden` `[A, k · C, L]`; `bias` `[heads, k · C, k · C]` is added to the products."""
        x, attention = normed(hidden, self.attn_norm), self.attn
        qkv = nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        # Fused kernels are for masks that are not learned.
        mixed = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v
        hidden = hidden + attention.out_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(normed(hidden, self.mlp_norm))


class Correlator(nn.Module):
    """The transformer over all candidates of a block, under the names that vLLM reads."""

    def __init__(self, config: LiLiCorrConfig):
        super().__init__()
        self.config = config
        size = config.hidden_size
        width = config.lilicorr_hidden_size
        factors = config.lilicorr_factor_dim
        heads, slots = config.lilicorr_num_heads, config.block_size
        self.token_proj = nn.Identity() if width == size else nn.Linear(size, width)
        self.pass_hidden_proj, self.context_proj = nn.Linear(size, width), nn.Linear(size, width)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(FEATURES), TwoLayers(FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, config.drafts, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.lilicorr_candidate_topk, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * slots - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.layers = nn.ModuleList(LatticeLayer(config) for _ in range(config.lilicorr_num_layers))
        self.output_norm, self.anchor_norm = norm_of(config, width), norm_of(config, width)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(width, factors) for _ in range(3))
        for head in (self.out_head, self.in_head, self.anchor_out_head):
            nn.init.normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)

    def forward(self, embedded: Tensor, log_probs: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """Return the scores of each draft's candidates after each candidate of the draft before, `[A, k, C, C]`.

        After the anchor all of those rows are alike.

        Args:
            embedded: the candidates' embeddings, `[A, k, C, H]`.
            log_probs: of the candidates, which are in descending order, `[A, k, C]`.
            states: of the drafts, `[A, k, H]`.
            anchors: the fused hidden state before each root, `[A, H]`.
        """
        features = self.features(log_probs).to(states.dtype)
        hidden = self.token_proj(embedded) + self.pass_hidden_proj(states)[:, :, None]
        hidden = hidden + self.feature_mlp(self.feature_norm(features))
        hidden = hidden + self.slot_embedding[0] + self.rank_embedding[0]
        hidden, bias = hidden.flatten(1, 2), self.bias(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, bias)
        hidden = normed(hidden, self.output_norm).view(*log_probs.shape, -1)
        anchor = normed(self.context_proj(anchors), self.anchor_norm)[:, None, None]
        read = torch.cat([hidden, anchor.expand_as(hidden), hidden * anchor], -1)
        factors = nn.functional.silu(self.factor_input_proj(read))
        out, entering = self.unit(self.out_head(factors)), self.unit(self.in_head(factors))  # [A, k, C, F]
        first = self.unit(self.anchor_out_head(anchor)).expand(-1, -1, log_probs.shape[-1], -1)
        leaving = torch.cat([first, out[:, :-1]], 1)
        return self.config.lilicorr_logit_scale * (leaving @ entering.transpose(-1, -2)).float()

    def features(self, log_probs: Tensor) -> Tensor:
        """Return what the transformer reads of candidates with these log-probabilities, `[A, k, C, 5]`.

        It is the log-probability, the probability, the distance from the best log-probability, the rank from 0 to 1,
        and whether it is the first.
        """
        count = log_probs.shape[-1]
        ranks = torch.arange(count, device=log_probs.device, dtype=log_probs.dtype)
        values = log_probs, log_probs.exp(), log_probs - log_probs[..., :1], ranks / max(1, count - 1), ranks == 0
        return torch.stack([value.expand_as(log_probs).to(log_probs.dtype) for value in values], -1)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return what is added to the attention's products: of the slots' distance, and of the same slot."""
        drafts, count = self.config.drafts, self.config.lilicorr_candidate_topk
        slots = torch.arange(drafts, device=self.same_slot_bias.device).repeat_interleave(count)
        apart = slots[:, None] - slots
        bias = self.relative_slot_bias[:, apart + self.config.block_size - 1]
        return (bias + (apart == 0) * self.same_slot_bias[:, None, None]).to(dtype)

    def unit(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, dim=-1, eps=self.config.lilicorr_vector_eps)


@dataclass
class LatticeLearning(FollowingLearning):
    """DFlash's own loss, and beside it the same divergence of the scores' distribution, on the candidates.

    The target is renormalised on them. Where the token that followed is no candidate, it teaches nothing in a loss of
    such tokens, and the draft right after it nothing in any loss: its predecessor could not have been drafted.
    (NVIDIA's loss has a penalty of what the target rejects in the place of a divergence from the target.)
    """

    drafter: LiLiCorr

    def codes(self) -> Tensor:
        """Return the anchors of the blocks, beside each draft's state `[A, k, H]`."""
        assert self.batch.hidden is not None
        before = self.targets.places[:, :1] - 2  # the drafts' first place is the one after the root's
        anchors = self.drafter.fuse(self.batch.hidden[self.targets.rows[:, None], before])
        return anchors.expand(-1, self.targets.places.shape[1], -1)

    def selected(
        self, states: Tensor, logits: Tensor, reference: TargetDistribution
    ) -> tuple[Tensor, TargetDistribution]:
        hidden, anchors = self.split(states)
        logits = logits.unflatten(0, hidden.shape[:2])
        candidates, scores = self.drafter.lattice(self.batch.target, hidden, logits, anchors[:, 0])
        reference = reference.at(candidates.flatten(0, 1))
        assert reference.following is not None
        followed = reference.following.view(hidden.shape[:2])
        before = nn.functional.pad(followed[:, :-1], (1, 0))[..., None, None]
        chosen = scores.gather(2, before.clamp(min=0).expand(-1, -1, 1, scores.shape[-1]))
        return torch.where(before < 0, chosen.detach(), chosen).flatten(0, 2), reference

    def output_weights(self) -> list[nn.Parameter]:
        return list(self.drafter.lilicorr.parameters())


class LatticeSession(CandidateSession):
    """A session that scores all candidates of a round at once, each after each of the draft before."""

    drafter: LiLiCorr
    anchors: Tensor | None = None  # the fused hidden state before each root, `[B, H]`; None before the first update
    scores: Tensor  # of the candidates after each of the draft before, `[B, k · C, C]`

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        super().update(tokens, hidden, counts, path)
        assert hidden is not None
        last = take_positions(hidden.flatten(2), counts.tensor[:, None] - 1).unflatten(-1, hidden.shape[2:])
        self.anchors = self.drafter.fuse(last)[:, 0]

    def begin(self, states: Tensor, logits: Tensor) -> None:
        anchors = required(self.anchors, "prefill: nothing was read yet; call update first.")
        self.candidates, scores = self.drafter.lattice(self.target, states, logits, anchors)
        self.scores = scores.flatten(1, 2)

    def following(self, tokens: Tensor, depths: Tensor, parents: Tensor | None) -> Tensor:
        candidates, drafted = (take_positions(self.candidates, depths - i) for i in (0, 1))  # [B, W, C]
        if (ids := self.drafter.output_ids) is not None:
            drafted = ids[drafted]
        # A token that is none of the candidates (the root, or what a fusion copied) counts as the first of them.
        places = (drafted == tokens[..., None]).int().argmax(-1)
        scores = take_positions(self.scores, depths * candidates.shape[-1] + places)
        return self.over_candidates(candidates, scores)

    # The anchors stand from `update` to the next round.

    def carried(self) -> list[Tensor]:
        return [] if self.anchors is None else [self.anchors]

    def carry(self, tensors: list[Tensor]) -> None:
        self.anchors = tensors[0] if tensors else None

    def reset(self) -> None:
        super().reset()
        self.anchors = None


class LiLiCorr(DFlash[LiLiCorrConfig]):
    """A DFlash drafter with a transformer that correlates the candidates of its drafts."""

    name = "lilicorr"
    config_class = LiLiCorrConfig
    learning_class = LatticeLearning
    session_class = LatticeSession

    def __init__(self, config: LiLiCorrConfig):
        super().__init__(config)
        self.lilicorr = Correlator(config)

    @classmethod
    def new_layer(cls, config: LiLiCorrConfig) -> BlockLayer:
        return ConvolvedBlockLayer(config) if config.conv_kernel_size else BlockLayer(config)

    def lattice(self, target: Target, states: Tensor, logits: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return each draft's candidates, in the draft vocabulary `[A, k, C]`, and their scores `[A, k, C, C]`.

        Args:
            states: of the drafts, `[A, k, H]`.
            logits: DFlash's, `[A, k, V']`.
            anchors: the fused hidden state before each root, `[A, H]`.
        """
        logits = logits.float()
        best, candidates = logits.topk(self.config.lilicorr_candidate_topk)
        log_probs = best - logits.logsumexp(-1, keepdim=True)
        tokens = candidates if self.output_ids is None else self.output_ids[candidates]
        embedded = target.embed(tokens).detach().to(states.dtype)
        return candidates, self.lilicorr(embedded, log_probs, states, anchors)
