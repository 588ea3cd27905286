"""What the Hub's library says while it cannot reach the Hub: one line instead of two dozen."""

from __future__ import annotations

import logging

_RETRYING = "huggingface_hub.utils._http"  # writes two lines for each try, to two handlers

_log = logging.getLogger(__name__)


def say_retries_once() -> None:
    """Let the Hub's library say once that it cannot be reached, and that it tries again. For commands."""
    logger = logging.getLogger(_RETRYING)
    if not any(isinstance(known, _Once) for known in logger.filters):
        logger.addFilter(_Once())


class _Once(logging.Filter):
    """A filter that keeps what is said about tries to itself, and says it in its own words the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not ("thrown while requesting" in text or text.startswith("Retrying in")):
            return True
        if not self._said:
            self._said = True
            _log.warning("the Hub does not answer; trying again for about half a minute …")
        return False
