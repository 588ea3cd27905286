"""Drafter architectures, one file each; `HEADS` lists them by name."""

from __future__ import annotations

from .base import Drafter, DrafterLoss, TargetBatch
from .block.dflash import DFlash, DFlashConfig
from .block.dflash2 import DFlash2, DFlash2Config
from .block.dspark import DSpark, DSparkConfig
from .block.lilicorr import LiLiCorr, LiLiCorrConfig
from .draft_model import DraftModel, DraftModelConfig
from .eagle import Eagle1, Eagle1Config, Eagle3, Eagle3Config
from .lookup.fusion import Cascade, CascadeConfig, Fusion, FusionConfig, fuse
from .lookup.lookahead import Lookahead, LookaheadConfig
from .lookup.ngram import Ngram, NgramConfig
from .lookup.suffix import Suffix, SuffixConfig
from .losses import AcceptedPositions
from .low_rank import LowRank, LowRankConfig
from .medusa import Hydra, HydraConfig, Medusa, MedusaConfig
from .mtp import Mtp, MtpConfig
from .parallel.pard import Pard, PardConfig
from .parallel.peagle import PEagle, PEagleConfig
from .parallel.uno import Uno, UnoConfig
from .registry import FORMS, HEADS, drafter_config, head_class, load_drafter, restore_drafter
from .saved import DrafterConfig
from .self_speculative import SelfSpeculative, SelfSpeculativeConfig
from .session import Abilities, ChainSession, Choose, Ended, NodeSession, NoDraftSession, Proposal, Session, TextSession

HEADS |= {
    "cascade": Cascade,
    "dflash": DFlash,
    "dflash2": DFlash2,
    "draft_model": DraftModel,
    "dspark": DSpark,
    "eagle1": Eagle1,
    "eagle3": Eagle3,
    "fusion": Fusion,
    "hydra": Hydra,
    "lilicorr": LiLiCorr,
    "lookahead": Lookahead,
    "medusa": Medusa,
    "mtp": Mtp,
    "ngram": Ngram,
    "pard": Pard,
    "peagle": PEagle,
    "self_speculative": SelfSpeculative,
    "suffix": Suffix,
    "uno": Uno,
}
FORMS |= {"low_rank": LowRank}

__all__ = ["AcceptedPositions", "Drafter", "DrafterConfig", "DrafterLoss", "TargetBatch"]
__all__ += ["HEADS", "drafter_config", "head_class", "load_drafter", "restore_drafter"]
__all__ += ["Abilities", "ChainSession", "Choose", "Ended", "NoDraftSession", "NodeSession", "Proposal", "Session"]
__all__ += ["TextSession"]
__all__ += ["Cascade", "Fusion", "Lookahead", "Ngram", "SelfSpeculative", "Suffix", "fuse"]
__all__ += ["CascadeConfig", "FusionConfig", "LookaheadConfig", "NgramConfig", "SelfSpeculativeConfig", "SuffixConfig"]
__all__ += ["DFlash", "DFlash2", "DSpark", "DraftModel", "Eagle1", "Eagle3", "Hydra", "LiLiCorr", "LowRank"]
__all__ += ["Medusa", "Mtp", "PEagle", "Pard", "Uno"]
__all__ += ["DFlash2Config", "DFlashConfig", "DSparkConfig", "DraftModelConfig", "Eagle1Config", "Eagle3Config"]
__all__ += ["HydraConfig", "LiLiCorrConfig", "LowRankConfig", "MedusaConfig", "MtpConfig", "PEagleConfig"]
__all__ += ["PardConfig", "UnoConfig"]
