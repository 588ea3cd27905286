"""`outrider lab learn`: what is kept, that requests pass unchanged, who is promoted, and that a kill loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from outrider.common import BadInputError
from outrider.common.atomic import add_line
from outrider.common.untrusted_files import Unreadable
from outrider.heads import Eagle3, Eagle3Config
from outrider.lab.canary import _BETS, Canary
from outrider.lab.learn_verb import Service, require_same_answers
from outrider.lab.learning import Event, LearnConfig, Learning, read_config
from outrider.lab.pass_through import PassThrough, Routing
from outrider.lab.traffic import (
    Reading,
    Row,
    Spending,
    TrafficFiles,
    counted_answer,
    drawn,
    read_models,
    spending,
)
from outrider.pair import new_pair
from outrider.recipes import load_recipe
from outrider.scripts.cli import app
from outrider.targets import Target

from ..forked import Forked
from ..scripts.conftest import Command, failed, succeeded, wait_for
from ..serving.conftest import answer

CHAT = {"model": "m", "user": "mallory", "messages": [{"role": "user", "content": "Call +49 30 1234567 now"}]}
SAID = {"choices": [{"message": {"role": "assistant", "content": "I do."}, "finish_reason": "stop"}]}
SERVERS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
SAID |= {"timings": {"predicted_n": 11, "draft_n": 12, "draft_n_accepted": 6}}


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


# ── the canary ──


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_bets_on_a_head_that_saves_nothing_gain_nothing_on_average(share: float) -> None:
    """Enumerated: the coin's mean of each bet's factor is 1 where both heads take the same rounds, below for worse."""
    for rate, worse in ((0.3, 0.3), (0.9, 0.9), (0.4, 0.45)):
        factors = np.zeros(len(_BETS))
        for new, chance in ((True, share), (False, 1 - share)):
            canary = Canary(share=share, depth=4)
            for _ in range(5):
                canary.observe(False, 40, 22)  # whatever is expected by now
            before = canary.gains.copy()
            canary.observe(new, 60, 60 * (worse if new else rate))
            factors += chance * np.exp(canary.gains - before)
        np.testing.assert_allclose(factors, 1, rtol=1e-12) if rate == worse else np.testing.assert_array_less(
            factors, 1
        )


def decided(ratio: float, seed: int, **settings: Any) -> Canary:
    """Return a canary of a head that takes `ratio` times the rounds, on requests that differ in length and rate."""
    chance, canary = random.Random(seed), Canary(**settings)
    while canary.verdict is None:
        new, tokens, rate = chance.random() < canary.share, chance.randint(10, 200), chance.uniform(0.35, 0.65)
        canary.observe(new, tokens, tokens * rate * (ratio if new else 1))
    return canary


def test_a_better_head_is_promoted_and_no_other() -> None:
    better = [decided(0.85, seed) for seed in range(20)]
    assert [c.verdict for c in better] == ["promoted"] * 20
    assert all(0.02 < c.figures()["saved"] < 0.3 for c in better)
    assert [decided(1.03, seed, most=2000).verdict for seed in range(20)] == ["rolled back"] * 20


def test_requests_that_are_cut_off_speak_against_the_new_head() -> None:
    canary, fair = Canary(), Canary()
    for _ in range(30):
        canary.missing(new=True)
        fair.observe(True, 60, 30)
    assert canary.figures()["for_it"] < 0.3 < fair.figures()["for_it"]


# ── what is kept ──


def test_a_row_holds_texts_and_counts_and_nothing_else() -> None:
    reading = Reading([re.compile(r"\+?\d[\d ]{6,}\d")], {"phone": re.compile("Call")})
    row = reading.row(body(CHAT), body(SAID), 7.0)
    assert row is not None
    assert row.messages == [{"role": "user", "content": "Call … now"}]
    assert (row.answer, row.category, row.tokens, row.rounds) == ("I do.", "phone", 10, 4)
    assert "mallory" not in row.model_dump_json()
    assert "1234567" not in row.model_dump_json()


def test_a_streamed_answer_is_the_same_row() -> None:
    parts = [{"choices": [{"delta": {"content": text}}]} for text in ("I", " do.")]
    parts += [{"choices": [{"delta": {}, "finish_reason": "stop"}], "timings": SAID["timings"]}]
    streamed = b"".join(b"data: " + body(part) + b"\n\n" for part in parts) + b"data: [DONE]\n\n"
    assert counted_answer(streamed) == counted_answer(body(SAID))


# Of vLLM 0.32 with n-grams, under `--per-request-spec-decode-metrics summary`.
DRAFTED = {"acceptance_histogram": [8, 0, 0, 1, 1], "num_spec_steps": 10, "num_accepted_draft_tokens": 7}
METRICS = {"usage": {"completion_tokens": 24}, "metrics": {"tokens_per_second": None, "speculative_decoding": DRAFTED}}


def test_rounds_are_read_from_vllms_metrics_streamed_or_not() -> None:
    """23 tokens after the first, 7 of them drafts: 16 rounds, in 10 of which there was something to draft."""
    whole = {"choices": [{"text": "I do.", "finish_reason": "stop"}]}
    parts = [{"choices": [{"text": "I"}]}, {"choices": [{"text": " do.", "finish_reason": "stop"}]}]
    streamed = b"".join(b"data: " + body(part) + b"\n\n" for part in [*parts, {"choices": [], **METRICS}])
    assert counted_answer(body(whole | METRICS)).counts == (23, 16)
    assert counted_answer(streamed + b"data: [DONE]\n\n") == counted_answer(body(whole | METRICS))
    # The last round kept a draft more than the answer had room for.
    cut = {"num_spec_steps": 9, "num_accepted_draft_tokens": 15}
    told = {"usage": {"completion_tokens": 24}, "metrics": {"speculative_decoding": cut}}
    assert counted_answer(body(whole | told)).counts == (23, 9)
    for untold in ({"metrics": None}, {"metrics": {"speculative_decoding": None}, "usage": {"completion_tokens": 24}}):
        assert counted_answer(body(whole | untold)).counts is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (CHAT | {"tools": [{}]}, SAID),
        (CHAT, {"choices": []}),
        (CHAT, {"choices": [{"message": {"content": "x"}, "finish_reason": "tool_calls"}]}),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, SAID),
        ({"prompt": [1, 2, 3]}, SAID),
    ],
)
def test_what_nothing_can_be_learned_from_is_no_row(asked: Any, said: Any) -> None:
    assert Reading().row(body(asked), body(said), 0.0) is None


def row(number: int, category: str = "other", when: float = 0.0, rounds: float | None = None) -> Row:
    digest = f"{number * 2654435761 % 2**32:08x}" * 4
    tokens = None if rounds is None else 20.0
    values = {"digest": digest, "time": when, "category": category, "prompt": f"p{number}", "answer": "a"}
    return Row(**values, tokens=tokens, rounds=rounds)


def test_old_rows_and_too_many_are_forgotten(tmp_path: Path) -> None:
    files = TrafficFiles(tmp_path, days=1, rows=20)
    add_line(tmp_path / f"{time.time() - 90_000:.6f}.jsonl", row(0).model_dump_json())
    for number in range(1, 41):
        files.add(row(number))
    kept = [one.prompt for one in files.read()]
    assert kept == [f"p{number}" for number in range(41 - len(kept), 41)], "the newest, in order"
    assert 18 <= len(kept) <= 22


def test_a_line_that_a_crash_cut_short_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "1.0.jsonl"
    add_line(file, row(1).model_dump_json())
    with file.open("ab") as opened:
        opened.write(b'{"digest": "ab')
    assert len(read_models(file, Row)[0]) == 1
    add_line(file, row(2).model_dump_json())
    assert [one.prompt for one in read_models(file, Row)[0]] == ["p1", "p2"]
    add_line(file, '{"not": "ours"}')
    with pytest.raises(Unreadable, match="none of ours"):
        read_models(file, Row)


def test_rows_are_drawn_where_rounds_are_lost() -> None:
    """Two categories of the same size: of the one that loses four times as many rounds far more rows are drawn."""
    rows = [row(n, "lost", rounds=20) for n in range(200)] + [row(n, "kept", rounds=8) for n in range(200, 400)]
    where = spending(rows, depth=4)
    assert where == {"kept": Spending(share=0.5, lost=4), "lost": Spending(share=0.5, lost=16)}
    chosen = drawn(rows, 50, where)
    assert 35 <= sum(one.category == "lost" for one in chosen) <= 46
    assert chosen == drawn(list(reversed(rows)), 50, where)


# ── requests pass as they are ──


class Echo:
    """A server that answers with what a test says, and notes what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: Any = None  # bytes, a list of streamed parts, a status, or None for a broken connection

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(handler) -> None:  # noqa: N805
                sent = handler.rfile.read(int(handler.headers["Content-Length"]))
                self.sent.append((handler.path, dict(handler.headers), sent))
                answer = self.answer(sent) if callable(self.answer) else self.answer
                if answer is None:
                    handler.close_connection = True
                    handler.connection.close()
                    return
                handler.send_response(answer if isinstance(answer, int) else 200)
                if isinstance(answer, list):
                    handler.send_header("Transfer-Encoding", "chunked")
                    handler.end_headers()
                    for part in [*answer, b""]:
                        handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                        handler.wfile.flush()
                else:
                    content = answer if isinstance(answer, bytes) else b"{}"
                    handler.send_header("Content-Length", str(len(content)))
                    handler.end_headers()
                    handler.wfile.write(content)

            def do_GET(handler) -> None:  # noqa: N805
                content = body({"data": [{"id": "m"}]})
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(content)))
                handler.end_headers()
                handler.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def servers() -> Iterator[list[Echo]]:
    both = [Echo(), Echo()]
    yield both
    for one in both:
        one.http.shutdown()
        one.http.server_close()


@contextlib.contextmanager
def passing(urls: list[str], routing: Routing) -> Iterator[str]:
    """A pass-through in a thread of its own, and its URL."""
    loop = asyncio.new_event_loop()
    through = PassThrough(urls, routing)
    listening = loop.run_until_complete(through.listen("127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield "http://{}:{}".format(*listening.sockets[0].getsockname()[:2])
    finally:
        asyncio.run_coroutine_threadsafe(through.end(listening, 5), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_bodies_pass_byte_by_byte_streamed_ones_too(servers: list[Echo]) -> None:
    over: list[Any] = []
    chance = random.Random(1)
    with passing([servers[0].url], Routing(lambda: 0, lambda _: None, over.append)) as url, httpx.Client() as client:
        for number in range(40):
            sent = chance.randbytes(chance.choice([0, 1, 1000, 300_000]))
            parts = [chance.randbytes(chance.choice([1, 80, 70_000])) for _ in range(5)]
            servers[0].answer = parts if number % 2 else b"".join(parts)
            got = client.post(f"{url}/v1/completions?x=1", content=sent, headers={"Authorization": "Bearer secret"})
            path, headers, arrived = servers[0].sent[-1]
            assert (path, arrived, headers["Authorization"]) == ("/v1/completions?x=1", sent, "Bearer secret")
            assert (got.status_code, got.content) == (200, b"".join(parts))
        assert client.get(f"{url}/v1/models").json() == {"data": [{"id": "m"}]}
        servers[0].answer = 429
        assert client.post(f"{url}/v1/completions", content=b"x").status_code == 429
        servers[0].answer = None
        assert client.post(f"{url}/v1/completions", content=b"x").status_code == 502
    assert [len(one.response) > 0 and one.whole for one in over][:40] == [True] * 40
    assert "secret" not in repr([vars(one) for one in over])


def test_no_request_is_lost_for_a_canary_that_fails(servers: list[Echo]) -> None:
    def draw(exchange: Any) -> None:
        exchange.new = True

    over: list[Any] = []
    servers[0].answer = b"from the one in service"
    with passing([one.url for one in servers], Routing(lambda: 0, draw, over.append)) as url, httpx.Client() as client:
        for broken in (500, 503, None):
            servers[1].answer = broken
            assert client.post(f"{url}/v1/completions", content=b"x").content == b"from the one in service"
        servers[1].http.shutdown()
        servers[1].http.server_close()
        assert client.post(f"{url}/v1/completions", content=b"x").content == b"from the one in service"
    assert all(one.failure and one.whole for one in over)


# ── from traffic to the next version ──


@pytest.fixture
def config_file(recipe_file: Path, tmp_path: Path, target_folder: Path) -> Path:
    """Settings with a pair of a head that has learned nothing, and a log of what a target said."""
    target = Target.load(target_folder)
    torch.manual_seed(0)
    overrides = [
        "drafter={type: eagle3, steps: 2}",
        "eval.baselines=[]",
        "training.max_steps=4",
        "eval.limit=1",
        "training.save_strategy='no'",
    ]
    recipe = load_recipe(str(recipe_file), overrides)
    drafter = Eagle3.build(Eagle3Config(steps=2), target)
    new_pair(tmp_path / "pair", target, drafter, recipe, calibration=[])
    with (tmp_path / "log.jsonl").open("w") as log:
        for number in range(24):
            request = {"model": "m", "prompt": f"def other_{number}(first):\n"}
            answer = {"choices": [{"text": " return first + second", "finish_reason": "length"}]}
            log.write(json.dumps({"request": request, "response": answer}) + "\n")
    values = {"pair": str(tmp_path / "pair"), "folder": str(tmp_path / "learn"), "logs": [str(tmp_path / "log.jsonl")]}
    values |= {"fewest": 8, "held_out": 0.4, "max_new_tokens": 8, "changes": ["training.max_steps=2"]}
    file = tmp_path / "learn.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def changed(file: Path, **values: Any) -> Path:
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | values))
    return file


def kinds(learning: Learning) -> list[str]:
    return [event.kind for event in read_models(learning.journal, Event)[0]]


def stepped(config: LearnConfig) -> int:
    learning = Learning(config)
    if "compared" not in kinds(learning):
        list(learning.step())
    return 0


@pytest.mark.parametrize("most", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_traffic_makes_the_next_version_whatever_kills_it(config_file: Path, tmp_path: Path, most: int) -> None:
    """Kills at random points: the version that is made in the end has the weights of an undisturbed one."""
    chance = random.Random(2)
    config = read_config(config_file)
    calm = Learning(config.model_copy(update={"folder": str(tmp_path / "calm"), "servers": SERVERS}))
    began = time.monotonic()
    events = list(calm.step())
    seconds = time.monotonic() - began
    assert [event.kind for event in events][:3] == ["drawn", "refreshed", "compared"]
    assert events[0].where["other"].lost > 0, "our decoder counts rounds where no server told any"
    assert events[2].same_texts == events[2].requests == events[0].held_out
    undisturbed = load_file(calm.folder_of(2) / "pair" / "drafter" / "model.safetensors")
    kills = 0
    for number in range(most):
        killed = config.model_copy(update={"folder": str(tmp_path / f"killed-{number}"), "servers": SERVERS})
        forked = None
        while forked is None or forked.poll() != 0:
            forked = Forked(partial(stepped, killed), tmp_path)
            forked.process.join(chance.uniform(0.02, 0.7) * seconds if kills < most else 600)
            kills += forked.poll() is None
            forked.send_signal(9)
            forked.process.join()
        learning = Learning(killed)
        made = load_file(learning.folder_of(2) / "pair" / "drafter" / "model.safetensors")
        assert all(torch.equal(weight, made[name]) for name, weight in undisturbed.items())
        steps = kinds(learning)
        assert [steps.count(kind) for kind in ("begun", "drawn", "refreshed", "compared")] == [1, 1, 1, 1]
        if kills >= most:
            break
    assert kills >= most


def test_without_a_second_server_our_decoder_decides_and_texts_are_forgotten(
    outrider: Command, config_file: Path
) -> None:
    said = succeeded(outrider("lab", "learn", config_file, "--now", "--json")).stdout
    steps = [answer("learn", line)["kind"] for line in said.splitlines()]
    assert steps[:3] == ["drawn", "refreshed", "compared"]
    assert steps[3] in ("promoted", "rolled back")
    learning = Learning(read_config(config_file))
    assert not list(learning.folder_of(2).glob("*.jsonl"))
    assert not (learning.folder_of(2) / "data").exists()
    assert learning.state.version == (2 if steps[3] == "promoted" else 1)
    with pytest.raises(BadInputError, match="0 new rows of traffic were found, expected 8"):
        list(learning.step())


def engine(rate: float, text: str = "I do.") -> Any:
    """Return the answers of a server whose requests take `rate` rounds a token, as llama.cpp tells."""

    def answer(sent: bytes) -> bytes:
        tokens = 40 + len(sent) % 7
        timings = {"predicted_n": tokens + 1, "draft_n_accepted": tokens - round(tokens * rate)}
        return body({"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "timings": timings})

    return answer


def opened_canary(config_file: Path, servers: list[Echo]) -> Learning:
    """Return what is learned with a canary of version 2 at the second server."""
    learning = Learning(read_config(changed(config_file, servers=[one.url for one in servers])))
    folder = learning.folder_of(2)
    folder.mkdir(parents=True)
    (folder / "held-out.jsonl").write_text(json.dumps({"id": "1", **CHAT}) + "\n")
    learning.add("compared", 2)
    require_same_answers(learning)
    learning.add("canary", 2, settings=learning.config.canary)
    return learning


@pytest.mark.parametrize(
    ("rate", "kind", "serving"), [(0.4, "promoted", 1), (0.7, "rolled back", 0), (None, "rolled back", 0)]
)
def test_a_canary_decides_in_traffic(config_file: Path, servers: list[Echo], rate, kind: str, serving: int) -> None:
    for one in servers:
        one.answer = engine(0.5)
    learning = opened_canary(config_file, servers)
    servers[1].answer = None if rate is None else engine(rate)
    service = Service(learning, random=random.Random(3))  # type: ignore[arg-type]
    routing = Routing(lambda: learning.state.serving, service.draw, service.over)
    with passing([one.url for one in servers], routing) as url, httpx.Client() as client:
        for number in range(600):
            request = CHAT | {"messages": [{"role": "user", "content": f"{number} " * (number % 9 + 1)}]}
            assert client.post(f"{url}/v1/chat/completions", json=request).json()["choices"]
            if learning.state.canary is None:
                break
        service.worker.shutdown()
        assert (learning.state.canary, learning.state.serving, kinds(learning)[-1]) == (None, serving, kind)
        before = len(servers[serving].sent)
        client.post(f"{url}/v1/chat/completions", json=CHAT)
        assert len(servers[serving].sent) == before + 1, "whoever is in service answers"
    assert Learning(learning.config).state.version == (2 if kind == "promoted" else 1), "the journal says it again"


@pytest.mark.parametrize("most", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_service_that_is_killed_goes_on(config_file: Path, tmp_path: Path, servers: list[Echo], most: int) -> None:
    """Every answer that went out stays whole, and so does the journal; SIGTERM lets requests end."""
    for one in servers:
        one.answer = engine(0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*free.getsockname())
    learning = opened_canary(changed(config_file, listen=address), servers)
    answered, chance = 0, random.Random(4)
    with httpx.Client(base_url=f"http://{address}") as client:
        for number in range(most + 1):
            forked = Forked(partial(app, ["lab", "learn", str(config_file)]), tmp_path)
            wait_for(lambda: listens(client), forked)
            for _ in range(chance.randint(1, 6)):
                request = CHAT | {"messages": [{"role": "user", "content": f"question {answered}"}]}
                answered += b"I do." in client.post("/v1/chat/completions", json=request).content
            forked.send_signal(9 if number < most else 15)
            forked.process.join()
    assert forked.poll() == 143
    learning.catch_up()
    assert answered - 2 * most <= kinds(learning).count("request") <= answered
    kept = [one.messages[0]["content"] for one in learning.traffic.read()]
    assert len(kept) == len(set(kept))
    assert kept[-1] == f"question {answered - 1}", "what was answered before a SIGTERM is kept"


def listens(client: httpx.Client) -> bool:
    try:
        return client.get("/v1/models").status_code == 200
    except httpx.TransportError:
        return False


def test_a_server_of_another_target_is_no_canary(config_file: Path, servers: list[Echo]) -> None:
    servers[0].answer, servers[1].answer = engine(0.5), engine(0.5, "I do not.")
    with pytest.raises(BadInputError, match=r"answer .* differently at temperature 0"):
        opened_canary(config_file, servers)


def test_a_server_that_tells_no_rounds_is_no_canary(config_file: Path, servers: list[Echo]) -> None:
    servers[0].answer = body({"choices": SAID["choices"]})
    with pytest.raises(BadInputError, match=r"tells no rounds of a request; .* --per-request-spec-decode-metrics"):
        opened_canary(config_file, servers)


@pytest.mark.parametrize(
    ("values", "option", "said"),
    [
        ({"pair": "nowhere"}, "--now", "nowhere"),
        ({"fodler": "x"}, "--now", "unknown key fodler; did you mean folder?"),
        ({"redact": ["("]}, "--now", "redact: '(' is no regular expression"),
        ({"servers": ["ftp://x"]}, "--now", "servers: a server is http://HOST:PORT"),
        ({"canary": {"share": 0}}, "--now", "canary.share: expected a value >= 0.01, found 0"),
        ({"logs": ["missing.jsonl"]}, "--now", "missing.jsonl"),
        ({"logs": [__file__]}, "--now", "test_learning.py: line 1"),
        ({"fewest": 500}, "--now", "fewest: 24 new rows of traffic were found, expected 500"),
        ({"listen": "here"}, "", "listen: expected HOST:PORT such as 127.0.0.1:8100, found 'here'"),
        ({"listen": "127.0.0.1:0"}, "", "servers: expected the URL of the server in service"),
        ({}, "--canary", "there is no version to be tried, and 0 servers are named"),
        ({"folder": "taken"}, "--now", "holds other files, and no journal"),
    ],
)
def test_bad_settings_are_refused_by_name(
    outrider: Command, config_file: Path, tmp_path: Path, monkeypatch, values: Any, option: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    failed(outrider("lab", "learn", changed(config_file, **values), *filter(None, [option])), said)


def test_another_pairs_folder_is_refused(config_file: Path, tmp_path: Path) -> None:
    Learning(read_config(config_file))
    journal = tmp_path / "learn" / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"digest":"', '"digest":"0'))
    with pytest.raises(BadInputError, match="begun with another pair"):
        Learning(read_config(config_file))


def test_the_settings_on_the_page_are_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs/lab.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "learn.yaml").write_text(block)
    assert read_config(tmp_path / "learn.yaml").canary.share == 0.5
