"""What libraries raise at settings that make no sense, and how to say it in one line."""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError

# What torch, transformers and peft raise. (Outrider's own errors are among them.)
LIBRARY_ERRORS = (ValueError, TypeError, RuntimeError, KeyError, StrictDataclassError)


def reason(error: Exception) -> str:
    """Return what an error of a library says, in one line that is not too long: some list all that is known."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return said if len(said) <= 200 else said[:199] + "…"
