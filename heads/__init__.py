"""Drafter architectures, one file each; `HEADS` lists them by name."""

from __future__ import annotations

from .base import Drafter, DrafterLoss, TargetBatch
from .block.dflash import DFlash, DFlashConfig
from .block.dflash2 import DFlash2, DFlash2Config
from .block.dspark import DSpark, DSparkConfig
from .draft_model import DraftModel, DraftModelConfig
from .eagle import Eagle1, Eagle1Config, Eagle3, Eagle3Config
from .lookup.fusion import Fusion, FusionConfig, fuse
from .lookup.ngram import Ngram, NgramConfig
from .lookup.suffix import Suffix, SuffixConfig
from .low_rank import LowRank, LowRankConfig
from .medusa import Medusa, MedusaConfig
from .mtp import Mtp, MtpConfig
from .parallel.pard import Pard, PardConfig
from .parallel.peagle import PEagle, PEagleConfig
from .registry import FORMS, HEADS, drafter_config, head_class, load_drafter, restore_drafter
from .saved import DrafterConfig
from .self_speculative import SelfSpeculative, SelfSpeculativeConfig
from .session import Abilities, NodeSession, NoDraftSession, Proposal, Session, TextSession

HEADS.kernel |= {
    "dflash": DFlash,
    "dflash2": DFlash2,
    "draft_model": DraftModel,
    "dspark": DSpark,
    "eagle1": Eagle1,
    "eagle3": Eagle3,
    "fusion": Fusion,
    "medusa": Medusa,
    "mtp": Mtp,
    "ngram": Ngram,
    "pard": Pard,
    "peagle": PEagle,
    "self_speculative": SelfSpeculative,
    "suffix": Suffix,
}
FORMS |= {"low_rank": LowRank}

__all__ = ["Drafter", "DrafterConfig", "DrafterLoss", "TargetBatch"]
__all__ += ["HEADS", "drafter_config", "head_class", "load_drafter", "restore_drafter"]
__all__ += ["Abilities", "NoDraftSession", "NodeSession", "Proposal", "Session", "TextSession"]
__all__ += ["Fusion", "Ngram", "SelfSpeculative", "Suffix", "fuse"]
__all__ += ["FusionConfig", "NgramConfig", "SelfSpeculativeConfig", "SuffixConfig"]
__all__ += ["DFlash", "DFlash2", "DSpark", "DraftModel", "Eagle1", "Eagle3", "LowRank"]
__all__ += ["Medusa", "Mtp", "PEagle", "Pard"]
__all__ += ["DFlash2Config", "DFlashConfig", "DSparkConfig", "DraftModelConfig", "Eagle1Config", "Eagle3Config"]
__all__ += ["LowRankConfig", "MedusaConfig", "MtpConfig", "PEagleConfig"]
__all__ += ["PardConfig"]
