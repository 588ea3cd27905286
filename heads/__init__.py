"""Drafter architectures. One file each; `HEADS` is the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..ground import BadInputError
from ..targets import Target
from .base import Drafter, DrafterConfig, DrafterLoss, TargetBatch, read_config
from .cascade import Cascade, CascadeConfig
from .draft_model import DraftModel, DraftModelConfig
from .eagle1 import Eagle1, Eagle1Config
from .eagle3 import Eagle3, Eagle3Config
from .fusion import Fusion, FusionConfig
from .hydra import Hydra, HydraConfig
from .lookahead import Lookahead, LookaheadConfig
from .medusa import Medusa, MedusaConfig
from .mtp import Mtp, MtpConfig
from .ngram import Ngram, NgramConfig
from .self_speculative import SelfSpeculative, SelfSpeculativeConfig
from .session import Abilities, ChainSession, Choose, EmptySession, NodeSession, Proposal, Session, TextSession
from .suffix import Suffix, SuffixConfig

HEADS: dict[str, type[Drafter]] = {
    "cascade": Cascade,
    "draft_model": DraftModel,
    "eagle1": Eagle1,
    "eagle3": Eagle3,
    "fusion": Fusion,
    "hydra": Hydra,
    "lookahead": Lookahead,
    "medusa": Medusa,
    "mtp": Mtp,
    "ngram": Ngram,
    "self_speculative": SelfSpeculative,
    "suffix": Suffix,
}


def head_class(name: str) -> type[Drafter]:
    """The drafter class of that name; an unknown one is refused with the known names."""
    if name not in list(HEADS):  # a recipe may say anything, a list too
        raise BadInputError(f"unknown drafter type {name!r}; known: {', '.join(sorted(HEADS))}.")
    return HEADS[name]


def drafter_config(values: dict[str, Any], where: str = "drafter") -> tuple[type[Drafter], DrafterConfig]:
    """Class and config from a mapping like `{type: eagle3, steps: 4}`."""
    if "type" not in values:
        raise BadInputError(f"{where}: 'type' is missing; known types: {', '.join(sorted(HEADS))}.")
    head = head_class(values["type"])
    return head, head.config_class.from_dict({k: v for k, v in values.items() if k != "type"}, where)


def fuse(statistical: dict[str, Any], model: Drafter, target: Target) -> Fusion:
    """Return the fusion of a drafter without weights, as a mapping like `{type: ngram}`, with a trained one in memory.

    Raises:
        BadInputError: `statistical` names no drafter without weights that goes on after a chain, or `model` is one.
    """
    head, config = drafter_config(statistical, "statistical")
    if head.trainable:
        raise BadInputError(
            f"statistical: {head.name!r} is no drafter without weights; take one such as ngram or suffix."
        )
    return Fusion(head.build(config, target), model)


def restore_drafter(path: str | Path, target: Target | None = None) -> Drafter:
    """A saved drafter of any kind, as it was saved."""
    values = read_config(path)
    kind = values.pop("drafter_type", None) or ("draft_model" if "model_type" in values else None)
    if kind is None:
        raise BadInputError(f"{path}: config.json names no 'drafter_type' and no 'model_type'; this is not a drafter.")
    return head_class(kind).from_folder(Path(path), values, target)


def load_drafter(path: str | Path, target: Target | None = None, dtype: torch.dtype | None = None) -> Drafter:
    """A saved drafter of any kind. A Hugging Face checkpoint is a draft model.

    Args:
        target: whom it will draft for: it is checked against, and its device is taken.
        dtype: of the parameters; None for the target's (as saved without one, or if that is no floating-point type).
    """
    drafter = restore_drafter(path, target)
    if target is not None:
        drafter.to(target.device)
        drafter.check(target)
        dtype = dtype or (target.dtype if target.dtype.is_floating_point else None)
    if dtype is not None:
        drafter.cast(dtype)
    return drafter.eval()


__all__ = [
    "HEADS",
    "Abilities",
    "Cascade",
    "CascadeConfig",
    "ChainSession",
    "Choose",
    "DraftModel",
    "DraftModelConfig",
    "Drafter",
    "DrafterConfig",
    "DrafterLoss",
    "Eagle1",
    "Eagle1Config",
    "Eagle3",
    "Eagle3Config",
    "EmptySession",
    "Fusion",
    "FusionConfig",
    "Hydra",
    "HydraConfig",
    "Lookahead",
    "LookaheadConfig",
    "Medusa",
    "MedusaConfig",
    "Mtp",
    "MtpConfig",
    "Ngram",
    "NgramConfig",
    "NodeSession",
    "Proposal",
    "SelfSpeculative",
    "SelfSpeculativeConfig",
    "Session",
    "Suffix",
    "SuffixConfig",
    "TargetBatch",
    "TextSession",
    "drafter_config",
    "fuse",
    "head_class",
    "load_drafter",
    "restore_drafter",
]
