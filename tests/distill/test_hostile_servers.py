"""Whatever a server answers, a run ends with one sentence, and the key goes to no other server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from outrider.common import BadInputError
from outrider.distill import distill
from outrider.targets import Target

from ..serving.hostile_server import ANSWERS, Answer, Hostile
from .conftest import Place

TOLD = [a for a in ANSWERS if a[1] != "/metrics"]


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr(openai._base_client, "MAX_RETRY_DELAY", 0.05)
    server = Hostile()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "answer"), [a[1:] for a in TOLD], ids=[f"{p}: {n}" for n, p, _ in TOLD])
def test_a_hostile_answer_ends_a_run_soon(
    hostile: Hostile, path: str, answer: Answer, stream: bool, tiny_target: Target, tmp_path: Path
) -> None:
    if stream and path == "/v1/models":
        pytest.skip("the list of models is no stream")
    hostile.answers[path] = answer
    place = Place(tmp_path, tiny_target, [{"text": "x"}], {"max_new_tokens": 8})
    requests = {"interface": "completions", "timeout": 0.5, "patience": 0.2, "retries": 2, "stream": stream}
    began = time.monotonic()
    with pytest.raises(BadInputError) as refused:
        distill(place.recipe("h", hostile.url, requests=requests), tiny_target)
    assert time.monotonic() - began < 10
    assert len(str(refused.value)) < 700
    assert str(refused.value).replace("\n", "").isprintable()


def test_the_key_goes_to_no_other_server(
    hostile: Hostile, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_SERVER_KEY", "k3y")
    other = Hostile()
    location = f"Location: {other.url.replace('127.0.0.1', 'localhost')}/v1/models?t=s3cret"
    place = Place(tmp_path, tiny_target, [{"text": "x"}], {"max_new_tokens": 8})
    for path in ("/v1/completions", "/v1/models"):
        hostile.answers[path] = f"HTTP/1.1 307 Redirect\r\n{location}\r\nContent-Length: 0\r\n\r\n".encode()
        said = place.refuses("redirects to 'http://localhost", path[4:], hostile.url)
        assert "s3cret" not in said
    assert other.seen == []
    other.http.shutdown()
    other.http.server_close()
