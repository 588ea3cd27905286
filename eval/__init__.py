"""What was achieved: suites, measurement, statistics, reports, and the gate. Importing it loads neither torch nor transformers."""

from .figures import ALL, Figures, Record
from .gate import GateResult, gate
from .measure import Contestant, contestants, measure, plan_of
from .report import Report
from .statistics import Bootstrap, Interval, Ratio
from .suites import PACKAGED, Suite, load_suites, make_suite

__all__ = [
    "ALL",
    "PACKAGED",
    "Bootstrap",
    "Contestant",
    "Figures",
    "GateResult",
    "Interval",
    "Ratio",
    "Record",
    "Report",
    "Suite",
    "contestants",
    "gate",
    "load_suites",
    "make_suite",
    "measure",
    "plan_of",
]
