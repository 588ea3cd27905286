"""The model being accelerated."""

from .cache import Counts, LayerShape, Nodes, RaggedCache, Store
from .errors import BadInputError, IncompatibleError, OutriderError, refuse_unknown_keys
from .fingerprint import Fingerprint
from .footprint import Footprint, PeakBytes
from .target import Target, TargetOutput, best_device, decoder_layers, embedded_path, load_causal_lm
from .tokenizers import TokenDifference, first_difference, load_tokenizer, require_same_vocabulary

__all__ = [
    "BadInputError",
    "Counts",
    "Fingerprint",
    "Footprint",
    "IncompatibleError",
    "LayerShape",
    "Nodes",
    "OutriderError",
    "PeakBytes",
    "RaggedCache",
    "Store",
    "Target",
    "TargetOutput",
    "TokenDifference",
    "best_device",
    "decoder_layers",
    "embedded_path",
    "first_difference",
    "load_causal_lm",
    "load_tokenizer",
    "refuse_unknown_keys",
    "require_same_vocabulary",
]
