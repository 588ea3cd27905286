"""EAGLE-3: a small drafter on three of the target's hidden states (arXiv 2503.01840).

It runs over pairs (f_t, x_{t+1}), where f_t are the target's features at three depths, fused. The first layer's
attention reads cat[norm(embedding), norm(hidden)], and its output is added to the hidden state (normed too with
`norm_before_residual`).

What a head says here, its methods from `before` to `output_weights`, is documented in parts/feature_drafter.py, which
trains it on its own outputs and drafts with it; what its layers compute stands in parts/decoder_layer.py.

Shapes: B rows, T positions, K taps, H hidden size, V' draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from ...common import BadInputError
from ...targets import Target
from ..decoder_layer import FusedLayer, InputProjection, Layer, norm_of, normed, rotary_of
from ..saved import DrafterConfig
from ..vocabulary import draft_vocabulary
from .feature_drafter import FeatureConfig, FeatureDrafter


@dataclass
class Eagle3Config(FeatureConfig):
    """Settings of an EAGLE-3 head; zeros mean "as the target".

    Attributes:
        taps: HF `hidden_states` indices; () for EAGLE-3's, see `default_taps`.
        draft_vocab_size: the most frequent training tokens kept as outputs; 0 for all.
        norm_taps, norm_output: EAGLE-3.1 (arXiv 2605.09992): a norm on each tap; the normed output is what the next
            step reads.
        norm_before_fc: one norm on all taps together instead.
        norm_before_residual: the first layer's output is added to the normed hidden state.
        init_from_target: start the output embedding from the target's.
    """

    taps: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    steps: int = 4
    norm_taps: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    init_from_target: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.taps = tuple(self.taps)
        if self.norm_taps and self.norm_before_fc:
            raise BadInputError("drafter: norm_taps and norm_before_fc are two ways to norm the taps; take one.")

    @property
    def feeds_finished(self) -> bool:
        return self.norm_output

    def completed(self, target: Target) -> Self:
        """Return this config with every open size taken from `target`."""
        sizes = {
            "taps": self.taps or default_taps(target.num_layers),
            "draft_vocab_size": self.draft_vocab_size or target.vocab_size,
        }
        return type(self)(**(self.to_dict() | self.sizes(target) | sizes))


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the taps of EAGLE-3's authors, 2, N/2 and N − 3, or in a target of few layers three that differ.

    Raises:
        BadInputError: there are too few layers.
    """
    if layers < 4:
        raise BadInputError(f"eagle3: a target with {layers} layers has no default taps; name them: drafter.taps=[…].")
    return (2, layers // 2, layers - 3) if layers > 6 else (1, layers // 2, layers - 1)


class _FirstLayer(Layer):
    """A layer whose attention reads cat[norm(embedding), norm(hidden)] (2H)."""

    def __init__(self, config: Eagle3Config):
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = norm_of(config)


class Eagle3(FeatureDrafter):
    """The EAGLE-3 head. Embeddings come from the target; everything else is its own."""

    name = "eagle3"
    config_class = Eagle3Config
    config: Eagle3Config
    token_ids: Tensor  # [V']

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        size = config.hidden_size
        width = len(config.taps) * size
        # One for each tap, or one for all of them.
        widths = [size] * len(config.taps) if config.norm_taps else [width] * config.norm_before_fc
        self.tap_norms = nn.ModuleList(norm_of(config, width) for width in widths) if widths else None
        self.fc = nn.Linear(width, size, bias=False)
        self.layers = nn.ModuleList([_FirstLayer(config)])
        self.norm = norm_of(config)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.layers.extend(Layer(config) for _ in range(config.num_layers - 1))  # drawn last
        # Target id of each draft token, ascending. The export formats' d2t and t2d are derived from it.
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size))
        self.rotary = rotary_of(config)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def output_ids(self) -> Tensor | None:
        return None if self.config.draft_vocab_size == self.config.vocab_size else self.token_ids

    @classmethod
    def build(cls, config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> Self:
        assert isinstance(config, Eagle3Config)
        config = config.completed(target)
        if config.hidden_size != target.hidden_size:
            raise BadInputError(
                f"eagle3: hidden_size {config.hidden_size} differs from the target's {target.hidden_size}; "
                "leave it out."
            )
        token_ids = draft_vocabulary(config.draft_vocab_size, target.vocab_size, token_counts, cls.name)
        head = cls(config)
        head.token_ids.copy_(token_ids)
        if config.init_from_target:
            head._copy_output(target)
        return head

    @torch.no_grad()
    def _copy_output(self, target: Target) -> None:
        weight = target.model.get_output_embeddings().weight
        self.lm_head.weight.copy_(weight[self.token_ids.to(weight.device)])

    # ------------------------------------------------------------ the network

    @property
    def before(self) -> InputProjection:
        return InputProjection(self.fc, list(self.tap_norms or ()))

    def fuse(self, hidden: Tensor, first: FusedLayer | None = None) -> Tensor:
        product = self.before.product() if first is None else first.before
        return product(hidden.to(self.fc.weight.dtype).flatten(2))

    def read(self, embedded: Tensor, first: FusedLayer) -> Tensor:
        return first.keep(normed(embedded, first.layer.input_layernorm))

    def enter(self, read: Tensor, hidden: Tensor, first: FusedLayer) -> tuple[Tensor, Tensor]:
        own = normed(hidden, first.layer.hidden_norm)
        return first.join(read, own), own if self.config.norm_before_residual else hidden

    def finish(self, output: Tensor) -> Tensor:
        return normed(output, self.norm)

    def embed_output(self, finished: Tensor, target: Target) -> Tensor:
        return self.lm_head(finished)

    def output_weights(self) -> list[nn.Parameter]:
        return [*self.norm.parameters(), *self.lm_head.parameters()]
