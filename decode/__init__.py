"""How drafter and target run together, losslessly."""

from typing import TYPE_CHECKING

from ..common.lazy import lazily

if TYPE_CHECKING:
    from .control import Control, Controller, Costs, Schedule, expected_tokens
    from .engine import Decoder
    from .plan import Plan, Tree, best_tree
    from .rule_table import LOSSLESS, LOSSY
    from .sampling import Sampling
    from .stats import DecodeStats, Output, Round, StreamEvent, depth_counts
else:
    __getattr__ = lazily(__name__, __file__)

__all__ = [
    "LOSSLESS",
    "LOSSY",
    "Control",
    "Controller",
    "Costs",
    "DecodeStats",
    "Decoder",
    "Output",
    "Plan",
    "Round",
    "Sampling",
    "Schedule",
    "StreamEvent",
    "Tree",
    "best_tree",
    "depth_counts",
    "expected_tokens",
]
