"""How drafter and target run together, losslessly."""

from .control import Control, Controller, Costs, expected_tokens
from .engine import Decoder, Event, Output
from .plan import LOSSLESS, LOSSY, Plan
from .sampling import Sampling
from .stats import DecodeStats, Round, depth_counts
from .trees import Tree, best_tree

__all__ = [
    "LOSSLESS",
    "LOSSY",
    "Control",
    "Controller",
    "Costs",
    "DecodeStats",
    "Decoder",
    "Event",
    "Output",
    "Plan",
    "Round",
    "Sampling",
    "Tree",
    "best_tree",
    "depth_counts",
    "expected_tokens",
]
