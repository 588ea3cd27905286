"""What was achieved: suites, measurement, statistics, reports, the gate, and the tuner.

What a saved report needs stands in `reports`, and importing this package loads no more: neither torch nor scipy. What
measures is imported from its module: `measure` (whole measurements), `acceptance`, `pruning`, `confidence` and `tuner`;
`suites` holds the prompts, `batches` batches of them. What a round costs is `outrider.costs.rounds`.
"""

from .reports.figures import ALL, Figures, Interval, PromptRecord, Ratio
from .reports.report import Report

__all__ = ["ALL", "Figures", "Interval", "PromptRecord", "Ratio", "Report"]
