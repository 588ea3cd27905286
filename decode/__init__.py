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

__all__ = ["DecodeStats", "Decoder", "Output", "Round", "Sampling", "StreamEvent", "depth_counts"]
__all__ += ["LOSSLESS", "LOSSY", "Plan", "Tree", "best_tree"]
__all__ += ["Control", "Controller", "Costs", "Schedule", "expected_tokens"]
