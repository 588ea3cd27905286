"""Work that takes long says so: by a bar on a terminal, in plain lines elsewhere. A silent Hub is one line."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from outrider.common import progress as progress_file
from outrider.common.progress import plain_lines, progress, say_retries_once


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain lines come at once."""
    monkeypatch.setattr(progress_file, "EVERY", 0.01)


def lines_of(capsys: pytest.CaptureFixture[str], wanted: str, seconds: float = 20.0) -> str:
    """Return what is written to stderr until a line of it is the wanted one; fails if none comes."""
    written, end = "", time.monotonic() + seconds
    while not re.search(wanted, written, re.MULTILINE):
        assert time.monotonic() < end, f"{written!r} has no {wanted!r}"
        time.sleep(0.01)
        written += capsys.readouterr().err
    return written


@pytest.mark.usefixtures("often")
def test_a_log_gets_a_line_about_the_innermost_work(capsys):
    log = Console(file=StringIO())
    with plain_lines(log, "refresh"):
        lines_of(capsys, r"^refresh: \d+ s so far$")
        with progress(log, "answers", 3000, done=1000) as advance:
            lines_of(capsys, r"^answers: 1,000 of 3,000, \d+ s so far$")
            advance(1000, "512 tokens/s")
            written = lines_of(capsys, r"^answers: 2,000 of 3,000, 512 tokens/s, about \d+ s left$")
        lines_of(capsys, r"^refresh: \d+ s so far$")
    assert "\r" not in written
    time.sleep(0.05)
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "", "nothing is said after the end"
    assert log.file.getvalue() == "", "stdout is left to the answer"


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("console", [None, Console(file=StringIO(), force_terminal=True)], ids=["none", "a terminal"])
def test_others_get_no_plain_lines(capsys, console):
    with plain_lines(console, "refresh"), progress(console, "answers", 3) as advance:
        advance(1, "")
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
    assert console is None or "answers" in console.file.getvalue()


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
