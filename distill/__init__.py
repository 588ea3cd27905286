"""What a drafter learns from: prompts, the target's responses, loss masks, hidden states."""

from typing import TYPE_CHECKING

from ..common.lazy import lazily

if TYPE_CHECKING:
    from .data_set import load_responses, provenance
    from .features import FeatureStore
    from .prompt_table import Prompt, digest_prompts
    from .responses import distill
else:
    __getattr__ = lazily(__name__, __file__)

__all__ = [
    "FeatureStore",
    "Prompt",
    "digest_prompts",
    "distill",
    "load_responses",
    "provenance",
]
