"""EAGLE: autoregression over the features that the target's own output embedding reads (arXiv 2401.15077).

f_t is the target's last hidden state (after the final norm). From pairs (f_t, x_{t+1}) the head predicts f_{t+1}:
cat[embedding, feature] → fc → decoder layer, and `target.lm_head` makes tokens of it. It is trained on true features,
with SmoothL1 to the next one and, a tenth as much, the cross-entropy of the tokens; noise on its inputs stands for the
errors of its own features. EAGLE-2's dynamic trees (arXiv 2406.16858) are the decoder's; more than one unrolled step is
HASS (arXiv 2408.15766).

The paper's numbers are for features of about unit scale. Targets differ, so both noise and feature loss are in units of
the true feature's root mean square: they mean the same for every target. (A final norm makes it nearly the same at all
positions.)

What a head says here, its methods from `before` to `feature_loss`, is documented in parts/feature_drafter.py, which
trains it and drafts with it.

Shapes: B rows, T positions, P supervised positions, H hidden size, S unrolled steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...common import BadInputError
from ...targets import Target
from ..decoder_layer import FusedLayer, InputProjection, Layer, norm_of, rotary_of
from ..losses import LossName, smooth_l1
from ..saved import DrafterConfig
from .feature_drafter import FeatureConfig, FeatureDrafter


@dataclass
class Eagle1Config(FeatureConfig):
    """Settings of an EAGLE head; zeros mean "as the target".

    Attributes:
        loss: of the tokens; the paper's is a tenth of the soft cross-entropy.
        feature_loss: weight of SmoothL1 between drafted and true feature.
        noise: half the width of the uniform noise on true features, in training only.
        norm_inputs: a norm on embedding and feature before fc (vLLM's `add_para_norm`). Many targets' embeddings are
            much smaller than their features, and a fresh fc takes long to hear them.
        norm_first: a norm before the first layer's attention; published heads of the paper's form have none.
        fc_bias: published heads differ in it.
        target_layers: of the target: its last hidden state is read.
    """

    loss: LossName = field(default_factory=lambda: {"soft_ce": 0.1})
    feature_loss: float = 1.0
    noise: float = 0.1
    norm_inputs: bool = False
    norm_first: bool = False
    fc_bias: bool = False
    target_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("feature_loss", "noise"):
            if getattr(self, name) < 0:
                raise BadInputError(f"eagle1: {name} must be 0 or more, got {getattr(self, name)}.")

    def completed(self, target: Target) -> Eagle1Config:
        """Return this config with every open size taken from `target`."""
        return Eagle1Config(
            **(self.to_dict() | self.sizes(target) | {"target_layers": self.target_layers or target.num_layers})
        )


def _scale(features: Tensor) -> Tensor:
    """Return the root mean square of features `[..., H]`, `[..., 1]`."""
    return features.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)


class Eagle1(FeatureDrafter):
    """The EAGLE head. Embeddings and output embedding are the target's."""

    name = "eagle1"
    config_class = Eagle1Config
    config: Eagle1Config

    def __init__(self, config: Eagle1Config):
        super().__init__(config)
        size = config.hidden_size
        self.input_norms = (
            nn.ModuleList(norm_of(config) for _ in range(2)) if config.norm_inputs else None
        )  # embedding's, feature's
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            Layer(config, normed=config.norm_first or index > 0) for index in range(config.num_layers)
        )
        self.rotary = rotary_of(config)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target_layers,)

    @classmethod
    def build(cls, config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> Eagle1:
        assert isinstance(config, Eagle1Config)
        head = cls(config.completed(target))
        for name, own, theirs in head._sizes(target):
            if own != theirs:
                raise BadInputError(f"eagle1: a {name} of {own} differs from the target's {theirs}; leave it out.")
        return head

    def _sizes(self, target: Target) -> list[tuple[str, int, int]]:
        return [*super()._sizes(target), ("number of layers", self.config.target_layers, target.num_layers)]

    # ------------------------------------------------------------ the network

    @property
    def before(self) -> InputProjection:
        return InputProjection(self.fc, list(self.input_norms or ()))

    def fuse(self, hidden: Tensor, first: FusedLayer | None = None) -> Tensor:
        return hidden[:, :, 0].to(self.fc.weight.dtype)

    def disturb(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.config.noise:
            return hidden
        noise = (2 * torch.rand_like(hidden) - 1) * self.config.noise
        return hidden + noise * _scale(hidden).to(hidden.dtype)

    def read(self, embedded: Tensor, first: FusedLayer) -> Tensor:
        return embedded

    def enter(self, read: Tensor, hidden: Tensor, first: FusedLayer) -> tuple[Tensor, Tensor]:
        hidden = first.before(torch.cat([read, hidden], -1))
        return first.enter(hidden), hidden

    def embed_output(self, finished: Tensor, target: Target) -> Tensor:
        return target.lm_head(finished)

    def feature_loss(self, outputs: Tensor, features: Tensor) -> Tensor | None:
        if not self.config.feature_loss:
            return None
        scale = _scale(features)
        return self.config.feature_loss * smooth_l1(features / scale, outputs / scale)
