"""The model being accelerated."""

from typing import TYPE_CHECKING

from ..common.lazy import lazily

if TYPE_CHECKING:
    from .backbone import Backbone
    from .cache import LayerShape, RaggedCache, RowLengths, TensorShape
    from .cache_slots import Nodes
    from .config_only import config_only_target
    from .fingerprint import Fingerprint
    from .layers import decoder_layers
    from .loading import embedded_path, load_causal_lm
    from .pass_memory import Footprint, PeakBytes
    from .target import Target, TargetOutput
    from .tokenizers import TokenDifference, first_difference, load_tokenizer, require_same_vocabulary
else:
    __getattr__ = lazily(__name__, __file__)

__all__ = ["Backbone", "Fingerprint", "Footprint", "PeakBytes", "Target", "TargetOutput", "decoder_layers"]
__all__ += ["config_only_target", "embedded_path", "load_causal_lm"]
__all__ += ["LayerShape", "Nodes", "RaggedCache", "RowLengths", "TensorShape"]
__all__ += ["TokenDifference", "first_difference", "load_tokenizer", "require_same_vocabulary"]
