"""Measurements: suites, statistics, reports, the gate, and the tuner.

Importing this package loads saved reports (`reports`) only, neither torch nor scipy. Measurements are imported from
their modules: `measure` (whole reports), `acceptance` and `tuner`; `suites` holds the prompts, `batch_timing` times
batches of them, and `interleaved_runs` lets contestants take turns.
"""

from .reports.figures import ALL, Figures, Interval, PromptRecord, Ratio
from .reports.report import Report

__all__ = ["ALL", "Figures", "Interval", "PromptRecord", "Ratio", "Report"]
