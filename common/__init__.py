"""Tools that every room needs and none owns. It imports no other room, and only `machine` imports torch."""

from .errors import BadInputError, IncompatibleError, OutriderError, Refusal, refuse_unknown_keys

__all__ = ["BadInputError", "IncompatibleError", "OutriderError", "Refusal", "refuse_unknown_keys"]
