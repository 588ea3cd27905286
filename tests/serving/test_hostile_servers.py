"""Whatever a server answers, an engine's client ends soon with one sentence, and no key or password goes anywhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from outrider.common import BadInputError, http_client, runtime
from outrider.common.http_client import AnswerLimits, ask
from outrider.common.values import printable_urls
from outrider.recipes import load_recipe
from outrider.scripts.cli import app
from outrider.serving import engine
from outrider.serving.engine import Engine, read_metrics
from outrider.serving.engine_metrics import read_counters

from .hostile_server import ANSWERS, VLLM, Answer, Hostile, plain
from .small_engine import TOKENS


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    monkeypatch.setattr(engine, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(engine, "COMPLETION_SECONDS", 1.0)
    with Hostile() as server:
        yield server


@pytest.mark.parametrize(("path", "answer"), [a[1:] for a in ANSWERS], ids=[f"{p}: {n}" for n, p, _ in ANSWERS])
def test_a_hostile_answer_is_one_sentence_soon(hostile: Hostile, path: str, answer: Answer) -> None:
    hostile.answers[path] = answer
    began = time.monotonic()
    asked = Engine(hostile.url, "k3y-k3y")
    with pytest.raises(BadInputError) as refused:
        asked.counters() if path == "/metrics" else asked.complete([1, 2], 64)
    assert time.monotonic() - began < 5
    said = str(refused.value)
    assert len(said) < 700
    assert said.isprintable(), "no escapes of the server's reach the terminal"
    assert "k3y-k3y" not in said


def test_a_server_that_answers_as_it_should_is_understood(hostile: Hostile) -> None:
    asked = Engine(hostile.url, "k3y")
    assert asked.counters().since(None).by_position == (3, 0)
    assert asked.complete([1, 2], 64).tokens == tuple(TOKENS)
    assert {path: headers["Authorization"] for path, headers in hostile.seen} == dict.fromkeys(
        hostile.answers, "Bearer k3y"
    )


def test_no_key_follows_a_redirect(hostile: Hostile) -> None:
    other = Hostile()
    location = f"{other.url.replace('127.0.0.1', 'u:s3cret@localhost')}/metrics?token=s3cret"
    for path in hostile.answers:
        hostile.answers[path] = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
    with pytest.raises(BadInputError, match="redirects to"):
        Engine(hostile.url, "k3y").complete([1], 4)
    assert other.seen == []
    other.http.shutdown()
    other.http.server_close()


def test_a_key_that_no_header_can_carry_is_not_repeated(hostile: Hostile) -> None:
    for key in ("s3cret\ns3cret", "s3crét"):
        with pytest.raises(BadInputError, match="no request can carry") as refused:
            read_metrics(hostile.url, key)
        assert "s3cr" not in str(refused.value)
    hostile.answers["/metrics"] = plain(b"the key s3cret is wrong", "text/plain", "401 Unauthorized")
    with pytest.raises(BadInputError, match=r"HTTP status 401: it begins with b'the key \.\.\. is") as refused:
        read_metrics(hostile.url, "s3cret")


KEY = "quo'te\"and\\slash-0123456789"


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/metrics", plain(b"", "text/plain", "302 Found", f"Location: http://other/?k={KEY}\r\n")),
        ("/metrics", plain(b"", "text/plain", "302 Found", f"Location: /{'p' * 190}{KEY}\r\n")),
        ("/metrics", plain(b"", f"text/{'y' * 66}{KEY}")),
        ("/metrics", plain(b"x" * 60 + KEY.encode(), "text/plain", "400 No")),
        ("/v1/models", plain(json.dumps({"data": [{"id": KEY}, {"id": "x"}]}).encode())),
    ],
)
def test_a_key_that_a_server_repeats_is_not_printed_in_any_form_or_part(
    hostile: Hostile, path: str, answer: Answer
) -> None:
    hostile.answers[path] = answer
    with pytest.raises(BadInputError) as refused:
        _ = read_metrics(hostile.url, KEY) if path == "/metrics" else Engine(hostile.url, KEY).model
    assert not {part for part in ("quo", "slash", "0123") if part in str(refused.value)}


def test_secrets_in_urls_of_a_page_that_cannot_be_used_are_not_printed(hostile: Hostile) -> None:
    hostile.answers["/metrics"] = plain(b"see https://u:s3cret@host/?t=s3cret", "text/plain", "500 No")
    with pytest.raises(BadInputError, match="it begins with b'see https://host/'") as refused:
        read_metrics(hostile.url)
    assert "s3cret" not in str(refused.value)


SECRET = [
    "http://u:s3cret@127.0.0.1:9",
    "http://s3cret@127.0.0.1:9/v1",
    "http://u:s3cret/s3cret@127.0.0.1:9",
    "http://u:s3cret#s3cret@127.0.0.1:9",
    "http://u:s3cret@s3cret@127.0.0.1:9",
    "http://127.0.0.1:9/metrics?token=s3cret",
    "http://127.0.0.1:9/v1#s3cret",
    "https://u:s3cret s3cret@127.0.0.1:9/?a=s3cret",
    "http:/u%3As3cret@127.0.0.1:9",
    "u:s3cret@127.0.0.1:9",
    "hf://s3cret@127.0.0.1:9/pairs?token=s3cret",
    "wandb://127.0.0.1:9/pairs#s3cret",
]


@pytest.mark.parametrize("url", SECRET)
def test_no_secret_of_a_url_is_printed(url: str) -> None:
    assert "s3cret" not in printable_urls(url)
    assert "127.0.0.1:9" in printable_urls(url)
    assert printable_urls("see http://h/v1;token=s3cret now") == "see http://h/v1 now"
    other = (["pair", "log", "--registry", url], ["plan", "embedded-eagle3", f"target.path={url}"])
    for words in (["served", "x", "--url", url], *other):
        found = CliRunner().invoke(app, words)
        assert found.exit_code == 2
        assert "s3cret" not in found.output
        assert "127.0.0.1:9" in found.output
    for override in (f"['{url}']", f"'{url}'", f"[{{url: '{url}', concurrency: many}}]", f"{'x' * 60} {url}"):
        with pytest.raises(BadInputError) as refused:
            load_recipe("embedded-eagle3", [f"data.servers={override}"])
        assert "s3cr" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_proxy", "htp://u:s3cret@127.0.0.1:9"),
        ("https_proxy", "http://u:s3cret@127.0.0.1:port"),
        ("all_proxy", "socks9://u:s3cret@127.0.0.1:9"),
        ("SSL_CERT_FILE", __file__),
        ("SSL_CERT_FILE", "/nowhere/s3cret"),
    ],
)
def test_settings_of_the_environment_that_cannot_be_used_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    http_client._tls.cache_clear()
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInputError, match="the environment's settings for connections") as refused:
        http_client.open_client(100)
    assert "s3cret" not in str(refused.value)
    with pytest.raises(BadInputError, match="the environment's settings"):
        ask("http://127.0.0.1:9/metrics")
    http_client._tls.cache_clear()


def test_without_the_extra_the_verb_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    found = CliRunner().invoke(app, ["served", "x", "--url", "http://127.0.0.1:9"])
    assert (found.exit_code, "outrider[serving]" in found.output) == (2, True)


def test_what_is_within_the_limits_is_read_whole(hostile: Hostile) -> None:
    hostile.answers["/x"] = plain(b"y" * 1000)
    assert ask(f"{hostile.url}/x", limits=AnswerLimits(num_bytes=1000)) == b"y" * 1000
    with pytest.raises(BadInputError, match="sends more than"):
        ask(f"{hostile.url}/x", limits=AnswerLimits(num_bytes=999))
    many = "".join(f'vllm:x{{a="{i}"}} 1\n' for i in range(20_000))
    assert read_counters(VLLM + many).since(None).tokens == 5
