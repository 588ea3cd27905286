"""Pairs, which ship drafter, target and figures as one version; probes and refreshes for when the target changes."""

from .comparison import gate_pairs, newest_report
from .contents import verify
from .export import PairExport, export_pair
from .manifest import Manifest
from .new import new_pair
from .pair import Compatibility, Pair, StaleError, compatibility
from .probe import ProbeResult, probe

__all__ = [
    "Compatibility",
    "Manifest",
    "Pair",
    "PairExport",
    "ProbeResult",
    "StaleError",
    "compatibility",
    "export_pair",
    "gate_pairs",
    "new_pair",
    "newest_report",
    "probe",
    "verify",
]
