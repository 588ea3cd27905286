"""What was achieved: suites, measurement, statistics, reports, the gate, and the tuner. Importing it loads neither torch nor transformers."""

from .figures import ALL, Figures, Record
from .gate import GateResult, gate
from .measure import Contestant, contestants, measure, plan_of
from .report import Report
from .statistics import Bootstrap, Interval, Ratio
from .suites import PACKAGED, Suite, load_suites, make_suite
from .tuner import tune
from .tuning import Tuning

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
    "Tuning",
    "contestants",
    "gate",
    "load_suites",
    "make_suite",
    "measure",
    "plan_of",
    "tune",
]
