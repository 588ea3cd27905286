"""DFlash2: DFlash with short convolutions along the block, and a choice among the best tokens of each slot (z-lab).

Every layer's attention and MLP stand between two causal convolutions along the block, whose kernels the slot's own
state changes. After the block pass a selector scores the few most probable tokens of each draft by the token before it:

    score(a → b) = U(b) + ⟨A[a] ⊙ H h, B[b]⟩

with the draft's state h and DFlash's logits U. Drafts are drawn from the softmax of these scores over the candidates,
and scored with it, so the text stays the target's. z-lab published code and weights (github.com/z-lab/dflash), and no
paper on what DFlash2 adds to DFlash (arXiv 2602.06036). A new drafter has DFlash's logits: the convolutions begin as
the identity, and B at zero.

Shapes: B rows, n anchors of a row, A anchors of a batch, S slots, k drafts, C candidates, W nodes, H hidden size,
G groups of channels, r rank, P positions, V target vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...common import BadInputError
from ...targets.fused_layers import FusedLayer, normed
from ..losses import TargetDistribution
from ..session import take_positions
from .block_layers import BlockLayer
from .block_losses import FollowingLearning
from .dflash import DFlash, DFlashConfig, FollowingSession


@dataclass
class ConvolvedConfig(DFlashConfig):
    """Settings of a DFlash drafter whose layers may have convolutions.

    Attributes:
        conv_kernel_size: how many slots a convolution reads: its own, and those just before; 0 for no convolutions.
        conv_group_size: channels whose kernels change together; a divisor of the hidden size. 0 without convolutions.
    """

    conv_kernel_size: int = 0
    conv_group_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        taps, group = self.conv_kernel_size, self.conv_group_size
        if bool(taps) != bool(group):
            raise BadInputError(
                f"drafter: conv_kernel_size {taps} and conv_group_size {group} are both 0, or neither is."
            )
        if taps > self.block_size:
            raise BadInputError(f"drafter: conv_kernel_size {taps} is longer than a block of {self.block_size}.")
        if group and self.hidden_size % group:
            raise BadInputError(f"drafter: conv_group_size {group} does not divide the hidden size {self.hidden_size}.")


@dataclass
class DFlash2Config(ConvolvedConfig):
    """Settings of a DFlash2 drafter: DFlash's, and those of its convolutions and its selector.

    Attributes:
        conv_kernel_size: how many slots a convolution reads: its own, and those just before.
        conv_group_size: channels whose kernels change together; a divisor of the hidden size.
        selector_rank: r.
        selector_top_k: C, the candidates of each draft, or all tokens of a smaller draft vocabulary.
    """

    least: ClassVar = DFlashConfig.least | dict.fromkeys(
        ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), 1
    )

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16


class BlockConvolution(nn.Module):
    """Two causal convolutions along a block: one of a module's input, one of its output.

    Slot i becomes Σ_t (base[t] + delta_i[t]) ⊙ x[i − t]. What is added to the kernel is a linear function of the
    normed state of slot i, the same for all channels of a group.
    """

    def __init__(self, config: ConvolvedConfig):
        super().__init__()
        size, taps = config.hidden_size, config.conv_kernel_size
        self.slots, self.kernels = config.block_size, (2, taps, size // config.conv_group_size)
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        nn.init.ones_(self.base_kernel.data[:, 0])
        self.kernel_projection = nn.Linear(size, 2 * taps * self.kernels[2], bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, states: Tensor, x: Tensor, side: int) -> Tensor:
        """Return `x` `[B, n · S, H]` convolved within each block, by kernels of `states` `[B, n · S, H]`.

        `side`: 0 of a module's input, 1 of its output.
        """
        _, taps, groups = self.kernels
        weight = self.kernel_projection.weight.unflatten(0, self.kernels)[side]
        delta = nn.functional.linear(states, weight.flatten(0, 1)).unflatten(-1, (taps, groups, 1))
        delta, blocks = (y.unflatten(1, (-1, self.slots)) for y in (delta, x))  # [B, n, S, taps, G, 1], [B, n, S, H]
        mixed = torch.zeros_like(blocks)
        for tap, base in enumerate(self.base_kernel[side]):
            before = nn.functional.pad(blocks[:, :, : self.slots - tap], (0, 0, tap, 0))
            changes = delta[..., tap, :, :] * before.unflatten(-1, (groups, -1))
            mixed = mixed + base * before + changes.flatten(-2)
        return mixed.flatten(1, 2)


class ConvolvedLayer(FusedLayer):
    """A layer whose attention and MLP stand between convolutions."""

    def enter(self, hidden: Tensor) -> Tensor:
        states = normed(hidden, self.layer.input_layernorm)
        return self.qkv(self.layer.attention_conv(states, states, 0))

    def finish(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        states = normed(hidden, self.layer.input_layernorm)
        attended = self.attention_output(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + self.layer.attention_conv(states, attended, 1)
        states, conv = normed(hidden, self.mlp_norm), self.layer.mlp_conv
        return hidden + conv(states, self.feed(conv(states, states, 0)), 1)


class ConvolvedBlockLayer(BlockLayer):
    """The weights of one layer, under z-lab's names."""

    fused_class = ConvolvedLayer

    def __init__(self, config: Any):
        super().__init__(config)
        self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)


class CandidateSelector(nn.Module):
    """A score of rank r of each candidate after the token before it, whose factors the draft's state scales."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        rank = config.selector_rank
        self.predecessor_codebook = nn.Embedding(config.vocab_size, rank)
        self.successor_codebook = nn.Embedding(config.draft_vocab_size, rank)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook.weight, std=rank**-0.5)
        nn.init.zeros_(self.successor_codebook.weight)

    def factors(self, hidden: Tensor, candidates: Tensor) -> Tensor:
        """Return what multiplies the code of the token before, `[..., C, r]`, of states `[..., H]`.

        `candidates`: of the draft vocabulary, `[..., C]`.
        """
        return self.hidden_projection(hidden)[..., None, :] * self.successor_codebook(candidates)


@dataclass
class SelectorLearning(FollowingLearning):
    """DFlash's own loss, and beside it the same divergence of the selector's distribution, on its candidates.

    The target is renormalised on them. A token that followed and is none of them teaches the selector nothing: no
    score of it could have it drafted. (The `speculators` package puts it in the place of the last candidate.)
    """

    drafter: DFlash2

    def selected(
        self, states: Tensor, logits: Tensor, reference: TargetDistribution
    ) -> tuple[Tensor, TargetDistribution]:
        hidden, codes = self.split(states)
        best, candidates = self.drafter.candidates(logits)
        factors = self.drafter.candidate_selector.factors(hidden.flatten(0, 1), candidates)
        scores = torch.linalg.vecdot(factors, codes.flatten(0, 1)[:, None])
        return best + scores, reference.at(candidates)

    def output_weights(self) -> list[nn.Parameter]:
        named = self.drafter.candidate_selector.named_parameters()
        return [p for name, p in named if name != "predecessor_codebook.weight"]


class CandidateSession(FollowingSession):
    """A session that draws each draft from its candidates."""

    candidates: Tensor  # of this round's drafts, in the draft vocabulary, `[B, k, C]`

    def over_candidates(self, candidates: Tensor, scores: Tensor) -> Tensor:
        """Return the scores of candidates, `[B, W, C]` both, over the draft vocabulary: −inf for all other tokens."""
        nowhere = scores.new_full((*scores.shape[:-1], self.drafter.config.draft_vocab_size), float("-inf"))
        return nowhere.scatter(-1, candidates, scores)


class SelectorSession(CandidateSession):
    """A session that scores each draft's candidates by the token before it."""

    drafter: DFlash2
    best: Tensor  # logits of the candidates of this round's drafts, `[B, k, C]`
    factors: Tensor  # of the codes of tokens before them, `[B, k, C · r]`

    def begin(self, states: Tensor, logits: Tensor) -> None:
        self.best, self.candidates = self.drafter.candidates(logits)
        self.factors = self.drafter.candidate_selector.factors(states, self.candidates).flatten(2)

    def following(self, tokens: Tensor, depths: Tensor, parents: Tensor | None) -> Tensor:
        best, candidates, factors = (take_positions(x, depths) for x in (self.best, self.candidates, self.factors))
        factors = factors.unflatten(-1, (best.shape[-1], -1))  # [B, W, C, r]
        scores = best + torch.linalg.vecdot(factors, self.drafter.code(tokens)[:, :, None])
        return self.over_candidates(candidates, scores)


class DFlash2(DFlash[DFlash2Config]):
    """A DFlash drafter with convolutions along its blocks, and a selector of candidates."""

    name = "dflash2"
    config_class = DFlash2Config
    learning_class = SelectorLearning
    session_class = SelectorSession

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    @classmethod
    def new_layer(cls, config: DFlash2Config) -> BlockLayer:
        return ConvolvedBlockLayer(config)

    def code(self, tokens: Tensor) -> Tensor:
        """Return A of `tokens` `[...]`, `[..., r]`."""
        return self.candidate_selector.predecessor_codebook(tokens)

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the C highest of logits `[..., V']`, and their places in the draft vocabulary, `[..., C]` each."""
        return logits.float().topk(min(self.config.selector_top_k, logits.shape[-1]), -1)
