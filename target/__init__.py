"""The model being accelerated."""

from .cache import Counts, RaggedCache
from .errors import BadInputError, IncompatibleError, OutriderError, refuse_unknown_keys
from .fingerprint import Fingerprint
from .target import Target, TargetOutput, best_device, embedded_path, load_causal_lm

__all__ = [
    "BadInputError",
    "Counts",
    "Fingerprint",
    "IncompatibleError",
    "OutriderError",
    "RaggedCache",
    "Target",
    "TargetOutput",
    "best_device",
    "embedded_path",
    "load_causal_lm",
    "refuse_unknown_keys",
]
