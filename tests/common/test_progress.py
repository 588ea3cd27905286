"""A Hub that does not answer is one line, however often its library tries."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from outrider.common.progress import say_retries_once


@pytest.fixture
def tries() -> Iterator[logging.Logger]:
    """The library's own logger, as it is after the test began."""
    logger = logging.getLogger("huggingface_hub.utils._http")
    before = list(logger.filters)
    yield logger
    logger.filters[:] = before


def test_two_dozen_lines_become_one(tries, caplog):
    """As huggingface_hub writes them; other warnings of it stay."""
    say_retries_once()
    say_retries_once()
    for number in range(5):
        tries.warning("'[Errno -2] Name or service not known' thrown while requesting HEAD https://huggingface.co/x")
        tries.warning("Retrying in %ss [Retry %d/5].", 1, number + 1)
    tries.warning("something else")
    assert [record.getMessage() for record in caplog.records] == [
        "the Hub does not answer; trying again for about half a minute …",
        "something else",
    ]
