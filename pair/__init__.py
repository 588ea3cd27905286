"""Pairs, which ship drafter, target and figures as one version; probes and refreshes for when the target changes."""

from typing import TYPE_CHECKING

from ..common.lazy import lazily

if TYPE_CHECKING:
    from .card import registry_card
    from .comparison import gate_folders, gate_pairs, newest_report, report_in
    from .export import PairExport, export_pair
    from .folder import PairFiles, verify
    from .manifest import Manifest
    from .new import new_pair
    from .pair import Pair, StaleError
    from .probing import ProbeResult, probe
else:
    __getattr__ = lazily(__name__, __file__)

__all__ = [
    "Manifest",
    "Pair",
    "PairExport",
    "PairFiles",
    "ProbeResult",
    "StaleError",
    "export_pair",
    "gate_folders",
    "gate_pairs",
    "new_pair",
    "newest_report",
    "probe",
    "registry_card",
    "report_in",
    "verify",
]
