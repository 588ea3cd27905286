"""The model being accelerated."""

from .cache import Counts, LayerShape, Nodes, RaggedCache, Store
from .fingerprint import Fingerprint
from .footprint import Footprint, PeakBytes
from .target import Target, TargetOutput, decoder_layers, embedded_path, load_causal_lm
from .tokenizers import TokenDifference, first_difference, load_tokenizer, require_same_vocabulary

__all__ = [
    "Counts",
    "Fingerprint",
    "Footprint",
    "LayerShape",
    "Nodes",
    "PeakBytes",
    "RaggedCache",
    "Store",
    "Target",
    "TargetOutput",
    "TokenDifference",
    "decoder_layers",
    "embedded_path",
    "first_difference",
    "load_causal_lm",
    "load_tokenizer",
    "require_same_vocabulary",
]
