"""Tools that every room needs and none owns. It imports no other room, and only `machine` imports torch."""

from typing import TYPE_CHECKING

from .lazy import lazily

if TYPE_CHECKING:
    from .errors import BadInputError, IncompatibleError, OutriderError, Refusal, refuse_unknown_keys
else:
    __getattr__ = lazily(__name__, __file__)

__all__ = ["BadInputError", "IncompatibleError", "OutriderError", "Refusal", "refuse_unknown_keys"]
