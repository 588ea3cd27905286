"""Servers answer as our own decoder does; whatever goes wrong with them, every prompt is answered once.

Whatever a hostile one answers, a run ends with one sentence, and the key goes to no other server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.common import BadInputError
from outrider.decode import Decoder
from outrider.distill import distill, load_responses, provenance, responses, server_pool
from outrider.distill.conversation import render
from outrider.distill.journal import Answer, Journal
from outrider.distill.prompt_table import Prompt
from outrider.distill.recipe_prompts import Collection
from outrider.targets import Target

from ..serving.hostile_server import ANSWERS, Hostile
from .conftest import Place, Server

TEXTS = [f"{text} {i}" for i in range(5) for text in ("def add(first, second):", "for name in", "class Stack:", "x")]

Start = Callable[..., Server]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(server_pool, "LONGEST_DELAY", 0.2)
    monkeypatch.setattr(server_pool, "SECONDS_BETWEEN_FILES", 0.05)
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr(openai._base_client, "MAX_RETRY_DELAY", 0.05)


@pytest.fixture
def place(tmp_path: Path, tiny_target: Target) -> Place:
    return Place(tmp_path, tiny_target, [{"text": text} for text in TEXTS], {"max_new_tokens": 8, "batch_size": 3})


def rows(folder: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in ("input_ids", "loss_mask")} for row in load_responses(folder)]


CHATS = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]


@pytest.mark.parametrize(("kind", "stream"), [("token ids", False), ("token ids", True), ("chat", False)])
def test_every_kind_of_server_gives_the_data_set_of_our_own_decoder(
    place: Place, start_server: Start, kind: str, stream: bool
) -> None:
    given = CHATS if kind == "chat" else None
    server = start_server(completions=kind != "chat")
    folder = place.distil("served", server, rows=given, requests={"stream": stream})
    assert rows(folder) == rows(place.distil("own", rows=given))
    assert server.bodies[-1]["max_tokens"] == 8


def test_of_a_server_of_texts_only_what_is_certain_is_kept(place: Place, start_server: Start) -> None:
    """A text that has other tokens when it is read again is dropped, never guessed."""
    target = Target.load("embedded", dtype="float32", device="cpu")
    server = start_server(target=target, ids=False)
    folder = distill(place.recipe("served", server), target)
    counts = provenance(folder)["counts"]
    kept = rows(folder)
    own = rows(distill(place.recipe("own"), target))
    dropped = counts.get("other_tokens_responses", 0) + counts.get("unreadable_text_responses", 0)
    assert len(kept) == len(TEXTS) - dropped > 0.7 * len(TEXTS)
    assert all(row in own for row in kept)
    assert all(isinstance(body["prompt"], str) for body in server.bodies[-3:])


@pytest.mark.parametrize("stream", [False, True])
def test_faults_of_every_kind_and_cut_streams_change_nothing(place: Place, start_server: Start, stream: bool) -> None:
    kinds = ("cut",) if stream else ("time-out", "500", "cut")
    server = start_server(faulty=0.4, kinds=kinds, seed=2 if stream else 1)
    requests = {"stream": stream, "concurrency": 4, "retries": 50} | ({} if stream else {"timeout": 0.6})
    folder = place.distil("faulty", server, requests=requests)
    assert set(server.faults) == set(kinds)
    assert not stream or server.faults["cut"] > 3
    assert rows(folder) == rows(place.distil("own"))


def test_each_server_works_on_no_more_than_its_own_number_of_requests(place: Place, start_server: Start) -> None:
    first, second = start_server(seconds=0.05), start_server(seconds=0.05)
    place.distil("two", {"url": first.url, "concurrency": 2}, second, requests={"concurrency": 3})
    assert (first.most_at_once, second.most_at_once) == (2, 3)
    assert first.asked.total() > 2 < second.asked.total()
    answered = first.asked + second.asked
    assert len(answered) == len(TEXTS)
    assert answered.total() - len(TEXTS) <= 2, "the first prompt greets each server; no other is answered twice"


def test_a_server_that_dies_is_put_aside_and_used_again_when_it_is_back(
    place: Place, start_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    steady, other = start_server(seconds=0.1), start_server()
    port = other.port

    def die_and_return() -> None:
        while other.asked.total() < 3:
            time.sleep(0.01)
        other.stop()
        other.asked.clear()
        deadline = time.monotonic() + 30
        while "does not answer" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        other.start(port)

    thread = threading.Thread(target=die_and_return)
    thread.start()
    texts = [{"text": f"{text} {i}"} for i in range(4) for text in TEXTS]
    folder = place.distil("dies", steady, other, rows=texts, requests={"concurrency": 1})
    thread.join()
    assert "does not answer" in caplog.text
    assert other.asked.total() > 3, "it is asked again"
    assert len(rows(folder)) == len(texts)


def test_an_interrupted_run_asks_the_rest(place: Place, start_server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(seconds=0.02)
    recipe = place.recipe("cut", server, requests={"concurrency": 2})
    add = Journal.add

    def interrupted(self: Journal, number: int, answers: Iterable[Answer]) -> None:
        add(self, number, answers)
        if number >= 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distill(recipe, place.target)
    before = server.asked.total()
    assert 0 < before < len(TEXTS)
    folder = distill(recipe, place.target)
    assert server.asked.total() - len(TEXTS) <= 2 + 1 + 1, "what was being asked, and the greetings"
    assert rows(folder) == rows(place.distil("own"))


def test_a_busy_server_is_left_alone_for_a_while(place: Place, start_server: Start) -> None:
    """One that wants to be left alone for a day is asked again earlier."""
    busy = iter([429] * 12)
    server = start_server(status=lambda body: next(busy, 200))
    folder = place.distil("busy", server, requests={"concurrency": 2, "retries": 20})
    assert len(rows(folder)) == len(TEXTS)


def test_refused_prompts_and_other_texts_are_dropped_and_counted(
    place: Place, start_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(choice: dict[str, Any]) -> None:
        if choice["token_ids"][0] % 2:
            choice["text"] += " and more"

    folder = place.distil("r", start_server(refuses="Stack: 3", changed=spoil))
    counts = provenance(folder)["counts"]
    assert counts["refused_responses"] == 1
    assert counts["other_tokens_responses"] >= 1
    assert len(rows(folder)) == counts["sequences"] == len(TEXTS) - 1 - counts["other_tokens_responses"]
    assert "the server refuses it (HTTP 400, " in caplog.text
    assert "some are dropped: " in caplog.text


def test_another_template_is_found_out(place: Place, start_server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(completions=False)
    monkeypatch.setattr(server, "_tokens", lambda body: [5, 6, 7])
    place.refuses(r"cannot be asked in any way \(.*chat.*: other_prompt", "o", server, rows=CHATS)


def test_prompts_that_nobody_answers_are_named_and_the_others_kept(place: Place, start_server: Start) -> None:
    unanswered = place.target.require_tokenizer()(TEXTS[7])["input_ids"]
    server = start_server(status=lambda body: 500 if body["prompt"] == unanswered else 200)
    requests = {"retries": 3, "concurrency": 2}
    expected = r"1 prompts could not be answered in 3 attempts each\. The first is texts/8"
    place.refuses(expected, "f", server, requests=requests)
    server.status = lambda body: 200
    server.asked.clear()
    assert len(rows(place.distil("f", server, requests=requests))) == len(TEXTS)
    assert set(server.asked) == {tuple(unanswered)}


def test_servers_that_are_gone_are_an_error_at_once_and_later_after_patience(place: Place, start_server: Start) -> None:
    place.refuses(r"none of data\.servers answers: http://127\.0\.0\.1:9/v1: ", "n", "http://127.0.0.1:9/v1")
    server = start_server(seconds=0.05)

    def stop_after_a_while() -> None:
        while server.asked.total() < 3:
            time.sleep(0.01)
        server.stop()

    threading.Thread(target=stop_after_a_while).start()
    expected = r"no server has answered for 0\.5 s .*kept in|no server has answered"
    place.refuses(expected, "gone", server, requests={"concurrency": 1, "patience": 0.5})
    server.start(0)


def test_the_key_comes_from_the_environment_and_is_written_nowhere(
    place: Place, start_server: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = start_server(key="sesame-1234")
    requests = {"key": "MY_KEY"}
    monkeypatch.setenv("MY_KEY", "wrong-5678")
    said = place.refuses(r"The key is read from \$MY_KEY, which is set", "k", server, requests=requests)
    assert "wrong-5678" not in said
    monkeypatch.setenv("MY_KEY", "sesame-1234")
    folder = place.distil("k", server, requests=requests)
    written = b"".join(file.read_bytes() for file in folder.parent.rglob("*") if file.is_file())
    assert b"sesame" not in written
    assert "sesame" not in caplog.text
    with pytest.raises(BadInputError, match="the name of an environment variable"):
        place.recipe("k", server, requests={"key": "sesame-1234"})


def test_what_our_decoder_began_servers_do_not_end(place: Place, start_server: Start) -> None:
    place.distil("same")
    place.refuses("who answers \\(was our own decoder, is a server's", "same", start_server())


@pytest.mark.parametrize("served", [False, True])
def test_every_turn_of_a_conversation_is_answered_after_the_targets_own_earlier_ones(
    place: Place, start_server: Start, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    tokenizer = place.target.require_tokenizer()
    first, *later = ([{"role": "user", "content": text}] for text in ("first", "second", "third"))
    text = render(tokenizer, first, "here")
    prompt = Prompt("a/1", "a", tuple(tokenizer(text)["input_ids"]), text, tuple(first), tuple(map(tuple, later)))
    monkeypatch.setattr(responses, "recipe_prompts", lambda *_, **__: Collection([prompt]))
    fleet = [start_server()] if served else []
    found = rows(place.distil("turns", *fleet, max_new_tokens=6))
    learnt = sum(sum(row["loss_mask"]) for row in found)
    assert 12 < learnt <= 18
    text = "".join(tokenizer.decode(row["input_ids"]) for row in found)
    assert text.index("first") < text.index("second") < text.index("third")
    for row in found:  # what is supervised is what our decoder writes after all that stands before it
        begins = [i for i, m in enumerate(row["loss_mask"]) if m and not row["loss_mask"][i - 1]]
        for begin in begins:
            written = Decoder(place.target).generate([row["input_ids"][:begin]], 6).tokens[0]
            assert row["input_ids"][begin : begin + len(written)] == written


def test_no_half_of_the_key_reaches_a_message(
    place: Place, start_server: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server repeats the key where the message is cut, while it fails and while it refuses."""
    key, statuses = "sesame-1234567890", iter([200, 500, 503, 400, 404, 500])
    monkeypatch.setenv("MY_KEY", f" {key}\n")
    server = start_server(status=lambda body: next(statuses, 200))
    server.complaint = lambda: f"{'x' * (120 + server.asked.total() * 5)}{key} {key}"
    monkeypatch.setattr(server_pool, "FAILURES_IN_A_ROW", 1)
    with caplog.at_level(logging.INFO, logger="outrider"):
        place.distil("h", server, requests={"key": "MY_KEY", "concurrency": 1})
    assert "does not answer" in caplog.text
    assert "sesa" not in caplog.text
    monkeypatch.setenv("MY_KEY", "sesame\nsesame")
    said = place.refuses(r"\$MY_KEY holds a key with line breaks", "h2", server, requests={"key": "MY_KEY"})
    assert "sesame" not in said


@pytest.mark.parametrize(
    "spoilt",
    [
        {"token_ids": [2**40]},
        {"token_ids": [-1]},
        {"token_ids": ["a"]},
        {"token_ids": [None]},
        {"token_ids": [True]},
        {"token_ids": 5},
        {"text": 5},
        {"text": "\ud800", "token_ids": None},
    ],
    ids=str,
)
def test_an_odd_reply_is_a_failed_attempt(place: Place, start_server: Start, spoilt: dict[str, Any]) -> None:
    left = [0, 1, 1, 0]

    def spoil(choice: dict[str, Any]) -> None:
        choice.update(spoilt if left and left.pop() else {})

    server = start_server(changed=spoil)
    texts = [{"text": text} for text in TEXTS[:4]]
    assert len(rows(place.distil("odd", server, rows=texts, requests={"concurrency": 1}))) == 4


def test_counts_that_are_no_numbers_and_lists_of_models_that_are_no_json_are_failed_attempts(
    place: Place, start_server: Start
) -> None:
    odd, texts = iter([False, False, True]), [{"text": text} for text in TEXTS[:4]]
    wrong = {"prompt_tokens": "many", "completion_tokens": "some"}
    server = start_server(ids=False, counted=lambda usage: wrong if next(odd, False) else usage)
    assert rows(place.distil("c", server, rows=texts, requests={"concurrency": 1}))
    place.refuses(r"none of data\.servers answers", "j", start_server(models=b'{"data": '), rows=texts)


def test_ids_that_the_target_does_not_have_are_found_out_at_once(place: Place, start_server: Start) -> None:
    def spoil(choice: dict[str, Any]) -> None:
        if "message" in choice:
            choice["token_ids"] = [10**6]

    server = start_server(completions=False, changed=spoil)
    data = {"requests": {"interface": "chat"}, "sampling": {"temperature": 1.0, "top_k": 5}}
    place.refuses("foreign_tokens", "v", server, rows=CHATS, **data)


@pytest.mark.parametrize("status", [404, 405])
def test_a_server_that_refuses_every_question_ends_the_run(place: Place, start_server: Start, status: int) -> None:
    server = start_server()
    server.status = lambda body: status if server.asked else 200
    requests = {"concurrency": 2, "patience": 0.3, "timeout": 5}
    place.refuses(rf"no server has answered for 0\.3 s .*HTTP {status}", "e", server, requests=requests)


def test_the_shortest_prompt_greets_the_servers(place: Place, start_server: Start) -> None:
    """A server that takes less than the longest prompt still tells how it is asked."""
    server = start_server(refuses="long long")
    texts = [{"text": "long " * 8}, *({"text": text} for text in TEXTS[:3])]
    folder = place.distil("s", server, rows=texts)
    assert provenance(folder)["counts"]["refused_responses"] == 1
    assert len(rows(folder)) == 3


@pytest.mark.parametrize("how", [{"ids": False}, {"completions": False, "ids": False}], ids=["text", "chat"])
def test_a_server_that_counts_no_tokens_is_not_believed_where_it_reads_text(
    place: Place, start_server: Start, how: dict[str, Any]
) -> None:
    server = start_server(**how, counted=lambda usage: None)
    place.refuses(r"cannot be asked in any way .*uncounted", "u", server, rows=CHATS)


def test_of_a_stream_the_tokens_are_always_counted(place: Place, start_server: Start) -> None:
    server = start_server(ids=False)
    with suppress(BadInputError):  # so small a target writes hardly a text that reads as the same tokens
        place.distil("n", server, rows=[{"text": "x"}], requests={"stream": True})
    assert server.bodies
    assert all(body["stream_options"] == {"include_usage": True} for body in server.bodies)


TOLD = [a for a in ANSWERS if a[1] != "/metrics"]


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with Hostile() as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "answer"), [a[1:] for a in TOLD], ids=[f"{p}: {n}" for n, p, _ in TOLD])
def test_a_hostile_answer_ends_a_run_soon(
    hostile: Hostile, path: str, answer: Any, stream: bool, tiny_target: Target, tmp_path: Path
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
