"""What was achieved: suites, measurement, statistics, reports, the gate, and the tuner.

What a saved report needs stands in `reports`, and importing this package loads no more: neither torch nor scipy. What
measures is imported from its module: `measure` (whole measurements), `batches` (speedup by batch size), `acceptance`,
`pruning`, and `tuner`; `suites` holds the prompts. What a round costs is `outrider.costs.rounds`.
"""

from .reports.figures import ALL, Figures, PromptRecord
from .reports.intervals import Interval, Ratio
from .reports.report import Report

__all__ = ["ALL", "Figures", "Interval", "PromptRecord", "Ratio", "Report"]
