"""The model being accelerated."""

from .cache import Counts, Nodes, RaggedCache
from .errors import BadInputError, IncompatibleError, OutriderError, refuse_unknown_keys
from .fingerprint import Fingerprint
from .target import Target, TargetOutput, best_device, decoder_layers, embedded_path, load_causal_lm
from .tokenizers import TokenDifference, first_difference, load_tokenizer, require_same_vocabulary

__all__ = [
    "BadInputError",
    "Counts",
    "Fingerprint",
    "IncompatibleError",
    "Nodes",
    "OutriderError",
    "RaggedCache",
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
