"""Servers answer as our own decoder does; whatever goes wrong with them, every prompt is answered once."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.decode import Decoder
from outrider.distill import distill, load_responses, provenance, responses, servers
from outrider.distill.prompts import Collection
from outrider.distill.table import Prompt
from outrider.distill.templates import render
from outrider.ground import BadInputError
from outrider.recipes import Recipe
from outrider.scripts.bench.faults import FaultyProxy, running
from outrider.targets import Target

from .conftest import Server

TEXTS = [f"{text} {i}" for i in range(5) for text in ("def add(first, second):", "for name in", "class Stack:", "x")]

MakeRecipe = Callable[..., Recipe]
Start = Callable[..., Server]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(servers, "LONGEST_DELAY", 0.2)
    monkeypatch.setattr(servers, "SECONDS_BETWEEN_FILES", 0.05)


@pytest.fixture
def make_recipe(tmp_path: Path) -> MakeRecipe:
    """`make_recipe(output, *servers, texts=TEXTS, chat=False, **data)`: a recipe that these servers answer."""

    def make(output: str, *fleet: Any, rows: list[dict[str, Any]] | None = None, **data: Any) -> Recipe:
        file = tmp_path / f"{output}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows or [{"text": text} for text in TEXTS]))
        values: dict[str, Any] = {"prompts": [str(file)], "max_new_tokens": 8, "batch_size": 3, **data}
        values["servers"] = [server.url if isinstance(server, (Server, FaultyProxy)) else server for server in fleet]
        if not fleet:
            del values["servers"]
        values = {"name": "t", "target": {"path": "unused"}, "drafter": {}, "data": values}
        return Recipe.from_dict({**values, "output": str(tmp_path / output)})

    return make


def rows(folder: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in ("input_ids", "loss_mask")} for row in load_responses(folder)]


CHATS = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("how", "asked"),
    [({}, "texts"), ({"completions": False}, "chats")],
    ids=["token ids", "chat"],
)
def test_every_kind_of_server_gives_the_data_set_of_our_own_decoder(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start, how: dict[str, Any], asked: str, stream: bool
) -> None:
    if stream and asked == "chats":
        pytest.skip("the test's server streams completions only")
    given = None if asked == "texts" else CHATS
    server = start_server(**how)
    folder = distill(make_recipe("served", server, rows=given, requests={"stream": stream}), tiny_target)
    assert rows(folder) == rows(distill(make_recipe("own", rows=given), tiny_target))
    assert server.bodies[-1]["max_tokens"] == 8


def test_of_a_server_of_texts_only_what_is_certain_is_kept(make_recipe: MakeRecipe, start_server: Start) -> None:
    """A text that has other tokens when it is read again is left out, never guessed."""
    target = Target.load("embedded", dtype="float32", device="cpu")
    server = start_server(target=target, ids=False)
    folder = distill(make_recipe("served", server), target)
    counts, kept, own = provenance(folder)["counts"], rows(folder), rows(distill(make_recipe("own"), target))
    dropped = counts.get("other_tokens_responses", 0) + counts.get("unreadable_text_responses", 0)
    assert len(kept) == len(TEXTS) - dropped > 0.7 * len(TEXTS)
    assert all(row in own for row in kept)
    assert all(isinstance(body["prompt"], str) for body in server.bodies[-3:])


def test_faults_of_every_kind_change_nothing(make_recipe: MakeRecipe, tiny_target: Target, start_server: Start) -> None:
    server = start_server()
    proxy = FaultyProxy(("127.0.0.1", server.port), share=0.4, seconds=1.0, seed=1)
    with running(proxy):
        requests = {"timeout": 0.6, "concurrency": 4, "retries": 50}
        folder = distill(make_recipe("faulty", proxy, requests=requests), tiny_target)
    assert set(proxy.faults) == {"time-out", "500", "cut"}
    assert rows(folder) == rows(distill(make_recipe("own"), tiny_target))


def test_streams_that_are_cut_are_asked_again(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start
) -> None:
    proxy = FaultyProxy(("127.0.0.1", start_server().port), share=0.4, kinds=("cut",), seed=2)
    with running(proxy):
        requests = {"stream": True, "concurrency": 4, "retries": 50}
        folder = distill(make_recipe("cut", proxy, requests=requests), tiny_target)
    assert proxy.faults["cut"] > 3
    assert rows(folder) == rows(distill(make_recipe("own"), tiny_target))


def test_each_server_works_on_no_more_than_its_own_number_of_requests(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start
) -> None:
    first, second = start_server(seconds=0.05), start_server(seconds=0.05)
    recipe = make_recipe("two", {"url": first.url, "concurrency": 2}, second, requests={"concurrency": 3})
    distill(recipe, tiny_target)
    assert (first.most_at_once, second.most_at_once) == (2, 3)
    assert first.asked.total() > 2 < second.asked.total()
    answered = first.asked + second.asked
    assert len(answered) == len(TEXTS)
    assert answered.total() - len(TEXTS) <= 2, "the first prompt greets each server; no other is answered twice"


def test_a_server_that_dies_is_put_aside_and_used_again_when_it_is_back(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    steady, other = start_server(seconds=0.1), start_server()
    port, returned = other.port, threading.Event()

    def die_and_return() -> None:
        while other.asked.total() < 3:
            time.sleep(0.01)
        other.stop()
        other.asked.clear()
        time.sleep(0.3)
        other.start(port)
        returned.set()

    thread = threading.Thread(target=die_and_return)
    thread.start()
    texts = [{"text": f"{text} {i}"} for i in range(4) for text in TEXTS]
    recipe = make_recipe("dies", steady, other, rows=texts, requests={"concurrency": 1})
    folder = distill(recipe, tiny_target)
    thread.join()
    assert "does not answer" in caplog.text
    assert other.asked.total() > 3, "it is asked again"
    assert len(rows(folder)) == len(texts)


def test_an_interrupted_run_asks_only_what_is_missing(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(seconds=0.02)
    recipe = make_recipe("cut", server, requests={"concurrency": 2})
    write = servers.Kept.write

    def interrupted(self: servers.Kept) -> None:
        write(self)
        if self.number >= 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(servers.Kept, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distill(recipe, tiny_target)
    before = server.asked.total()
    assert 0 < before < len(TEXTS)
    folder = distill(recipe, tiny_target)
    assert server.asked.total() - len(TEXTS) <= 2 + 1 + 1, "what was being asked, and the greetings"
    assert rows(folder) == rows(distill(make_recipe("own"), tiny_target))


def test_a_busy_server_is_left_alone_for_a_while(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start
) -> None:
    server = start_server()
    server.busy = 12
    folder = distill(make_recipe("busy", server, requests={"concurrency": 2, "retries": 20}), tiny_target)
    assert len(rows(folder)) == len(TEXTS)


def test_refused_prompts_and_other_texts_are_left_out_and_counted(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(choice: dict[str, Any]) -> None:
        if choice["token_ids"][0] % 2:
            choice["text"] += " and more"

    folder = distill(make_recipe("r", start_server(refuses="Stack: 3", changed=spoil)), tiny_target)
    counts = provenance(folder)["counts"]
    assert counts["refused_responses"] == 1
    assert counts["other_tokens_responses"] >= 1
    assert len(rows(folder)) == counts["sequences"] == len(TEXTS) - 1 - counts["other_tokens_responses"]
    assert "the server refuses it (HTTP 400, " in caplog.text
    assert "some are left out: " in caplog.text


def test_a_server_with_another_template_is_found_out(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(completions=False)
    monkeypatch.setattr(server, "_tokens", lambda body: [5, 6, 7])
    with pytest.raises(BadInputError, match=r"cannot be asked in any way \(.*chat.*: other_prompt"):
        distill(make_recipe("o", server, rows=CHATS), tiny_target)


def test_prompts_that_nobody_answers_are_named_and_the_others_kept(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    answer = server.answer

    def failing(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        text = tiny_target.require_tokenizer().decode(body["prompt"])
        return (500, {"error": {"message": "it crashed"}}) if text == TEXTS[7] else answer(path, body)

    recipe = make_recipe("f", server, requests={"retries": 3, "concurrency": 2})
    with monkeypatch.context() as patch:
        patch.setattr(server, "answer", failing)
        with pytest.raises(
            BadInputError, match=r"1 prompts could not be answered in 3 attempts each\. The first is f/8"
        ):
            distill(recipe, tiny_target)
    server.asked.clear()
    assert len(rows(distill(recipe, tiny_target))) == len(TEXTS)
    assert set(server.asked) == {tuple(tiny_target.require_tokenizer()(TEXTS[7])["input_ids"])}


def test_servers_that_are_not_there_are_an_error_at_once_and_later_after_patience(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start
) -> None:
    with pytest.raises(BadInputError, match=r"none of data\.servers answers: http://127\.0\.0\.1:9/v1: "):
        distill(make_recipe("n", "http://127.0.0.1:9/v1"), tiny_target)
    server = start_server(seconds=0.05)
    threading.Timer(0.3, server.stop).start()
    recipe = make_recipe("gone", server, requests={"concurrency": 1, "patience": 0.5})
    with pytest.raises(BadInputError, match=r"no server has answered for 0\.5 s .*kept in|no server has answered"):
        distill(recipe, tiny_target)
    server.start(0)


def test_the_key_comes_from_the_environment_and_is_written_nowhere(
    make_recipe: MakeRecipe,
    tiny_target: Target,
    start_server: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    server = start_server(key="sesame-1234")
    recipe = make_recipe("k", server, requests={"key": "MY_KEY"})
    monkeypatch.setenv("MY_KEY", "wrong-5678")
    with pytest.raises(BadInputError, match=r"The key is read from \$MY_KEY, which is set") as refused:
        distill(recipe, tiny_target)
    assert "wrong-5678" not in str(refused.value)
    monkeypatch.setenv("MY_KEY", "sesame-1234")
    folder = distill(recipe, tiny_target)
    written = b"".join(file.read_bytes() for file in folder.parent.rglob("*") if file.is_file())
    assert b"sesame" not in written
    assert "sesame" not in caplog.text
    with pytest.raises(BadInputError, match="the name of an environment variable"):
        make_recipe("k", server, requests={"key": "sesame-1234"})


def test_what_our_decoder_began_servers_do_not_end(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start
) -> None:
    distill(make_recipe("same"), tiny_target)
    with pytest.raises(BadInputError, match="who answers \\(was our own decoder, is a server's"):
        distill(make_recipe("same", start_server()), tiny_target)


@pytest.mark.parametrize("served", [False, True])
def test_every_turn_of_a_conversation_is_answered_after_the_targets_own_earlier_ones(
    make_recipe: MakeRecipe, tiny_target: Target, start_server: Start, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    tokenizer = tiny_target.require_tokenizer()
    first, *later = ([{"role": "user", "content": text}] for text in ("first", "second", "third"))
    text = render(tokenizer, first, "here")
    prompt = Prompt("a/1", "a", tuple(tokenizer(text)["input_ids"]), text, tuple(first), tuple(map(tuple, later)))
    monkeypatch.setattr(responses, "gather", lambda *_, **__: Collection([prompt]))
    fleet = [start_server()] if served else []
    found = rows(distill(make_recipe("turns", *fleet, max_new_tokens=6), tiny_target))
    learnt = sum(sum(row["loss_mask"]) for row in found)
    assert 12 < learnt <= 18
    text = "".join(tokenizer.decode(row["input_ids"]) for row in found)
    assert text.index("first") < text.index("second") < text.index("third")
    for row in found:  # what is supervised is what our decoder writes after all that stands before it
        begins = [i for i, m in enumerate(row["loss_mask"]) if m and not row["loss_mask"][i - 1]]
        for begin in begins:
            written = Decoder(tiny_target).generate([row["input_ids"][:begin]], 6).tokens[0]
            assert row["input_ids"][begin : begin + len(written)] == written
