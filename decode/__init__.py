"""How drafter and target run together, losslessly."""

from .engine import Decoder, Event, Output, Plan
from .sampling import Sampling
from .stats import DecodeStats, Round, depth_counts
from .verify import RULES

__all__ = ["RULES", "DecodeStats", "Decoder", "Event", "Output", "Plan", "Round", "Sampling", "depth_counts"]
