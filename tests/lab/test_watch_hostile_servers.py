"""Whatever a server answers, a watch ends soon with one sentence, and no key or password goes anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from outrider.common import runtime
from outrider.lab.watching import WatchEvent, post
from outrider.scripts.cli import app
from outrider.serving import engine

from ..serving.hostile_server import Hostile, plain
from ..serving.test_hostile_servers import SECRET


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    monkeypatch.setattr(engine, "LOOK_SECONDS", 1.0)
    with Hostile() as server:
        yield server


def watch(url: str, state: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["lab", "watch", url, "--once", "--state", str(state), *more])


def test_the_verb_ends_with_exit_code_2_and_the_first_bytes(hostile: Hostile, tmp_path: Path) -> None:
    hostile.answers["/metrics"] = plain(b"\x1b[31mnonsense 1 2 3", "text/plain")
    found = watch(hostile.url, tmp_path / "s.json")
    assert (found.exit_code, "nonsense" in found.output, "\x1b[31m" in found.output) == (2, True, False)


def test_no_key_and_no_alarm_follows_a_redirect(hostile: Hostile, tmp_path: Path) -> None:
    other = Hostile()
    location = f"{other.url.replace('127.0.0.1', 'u:s3cret@localhost')}/metrics?token=s3cret"
    for path in hostile.answers:
        hostile.answers[path] = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
    found = watch(hostile.url, tmp_path / "s.json", "--key", "k3y")
    assert found.exit_code == 2
    assert "redirects to" in found.output
    assert "s3cret" not in found.output
    alarm = WatchEvent(kind="alarm", url="http://engine", time="now")
    assert "HTTP 302" in (post(f"{hostile.url}/metrics", alarm) or "")
    assert other.seen == []
    other.http.shutdown()


@pytest.mark.parametrize("url", SECRET)
def test_no_secret_of_a_url_is_printed_or_stored(url: str, tmp_path: Path) -> None:
    found = watch(url, tmp_path / "s.json")
    assert found.exit_code == 2
    assert "s3cret" not in found.output
    assert "127.0.0.1:9" in found.output
    assert not (tmp_path / "s.json").exists()


def test_without_the_extra_the_verb_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    found = watch("http://127.0.0.1:9", tmp_path / "s.json")
    assert (found.exit_code, "outrider[serving]" in found.output) == (2, True)
