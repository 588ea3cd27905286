"""Answers of servers, bent at random: each is understood, or refused in a sentence; nothing else comes of one.

The slow ones try for ten minutes each. What they once found is a row of a table, here or in `serving/hostile_server`.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.common import BadInputError
from outrider.common.http_client import ModelList, read_answer
from outrider.distill.client import Client, Form, PassingError, Question, RefusedError
from outrider.distill.client import DroppedError as Dropped
from outrider.distill.prompt_table import Prompt
from outrider.recipes import DataSpec
from outrider.serving.engine import Engine
from outrider.serving.engine_metrics import read_counters

from ..serving.hostile_server import METRICS, PAGES, Hostile, plain
from ..serving.small_engine import MODELS, TOKENS, completion

FEW, MANY = 40, 4000
LETTERS = 'ab1 -+.eE{}=",:_#\\\n\0\x1b\x7fé³\u202e\ud800'
COMPLETION = completion(TOKENS, "text", [1, 2])
MESSAGE = {"role": "assistant", "content": "text", "tool_calls": None}
CHAT = COMPLETION | {"object": "chat.completion", "prompt_token_ids": [1, 2]}
CHAT["choices"] = [{"index": 0, "message": MESSAGE, "finish_reason": "length", "token_ids": TOKENS}]
ERROR = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
PART = CHAT | {"choices": [{"index": 0, "delta": MESSAGE, "finish_reason": None, "token_ids": TOKENS[:2]}]}

NASTY: list[Any] = [
    None,
    True,
    -1,
    2**31,
    2**63,
    10**40,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "\0",
    "\x1b[2J",
    "\ud800",
]
NASTY += ["1", "x" * 5000, [], {}, [None], [[]], {"": None}, {"choices": []}, "\u202e", 0.5, -0.0, ["text"] * 300]
values = st.recursive(
    st.sampled_from(NASTY) | st.integers() | st.floats() | st.text(LETTERS, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(LETTERS, max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of the whole and of every value in it."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*path, key))


@st.composite
def bent(draw: st.DrawFn, good: Any) -> Any:
    """Return a good answer with some values replaced, left out, wrapped or repeated."""
    answer = [copy.deepcopy(good)]
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(answer))[1:]))
        holder: Any = answer
        for key in path[:-1]:
            holder = holder[key]
        how = draw(st.sampled_from(["replace", "replace", "leave out", "wrap", "repeat"]))
        if how == "leave out" and len(path) > 1:
            del holder[path[-1]]
        elif how in ("wrap", "repeat"):
            holder[path[-1]] = [copy.deepcopy(holder[path[-1]]) for _ in range(1 if how == "wrap" else 3)]
        else:
            holder[path[-1]] = copy.deepcopy(draw(values))  # bent again, maybe
    return answer[0]


bodies = {
    "completion": st.one_of(bent(COMPLETION), bent(ERROR)),
    "chat": st.one_of(bent(CHAT), bent(COMPLETION)),
    "models": bent(MODELS),
}
lines = st.lists(
    st.sampled_from([*METRICS.splitlines(), *(page for page in PAGES.values() if len(page) < 200)])
    | st.text(LETTERS, max_size=40)
    | st.builds(
        "{}{{{}}} {}".format,
        st.sampled_from(["vllm:generation_tokens_total", "a"]),
        st.text(LETTERS, max_size=12),
        values,
    ),
    max_size=8,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Hostile]:
    with Hostile() as hostile:
        yield hostile


def refused(action: Callable[[], object], *expected: type[Exception]) -> None:
    """Do it; a refusal is one line, without what a terminal would obey."""
    said = ""
    try:
        action()
    except (BadInputError, *expected) as error:
        said = str(error)
    assert len(said) < 1500
    assert said.isprintable(), said


def tried(count: int) -> Callable[..., Any]:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=count, deadline=None, derandomize=count == FEW, database=None, suppress_health_check=checks
    )


def attack_pages(text: str) -> None:
    refused(lambda: read_counters(text))


def attack_models(content: bytes) -> None:
    refused(lambda: read_answer(ModelList, content, "http://server"))


def attack_engine(server: Hostile, content: bytes) -> None:
    server.answers["/v1/completions"] = plain(content)
    refused(lambda: Engine(server.url).complete([1, 2], 64))


def attack_client(server: Hostile, client: Client, content: bytes, form: Form, stream: bool, status: int) -> None:
    """Ask one question as `distill` does; what comes is tokens, or a reason why there are none."""
    kind = "text/event-stream" if stream else "application/json"
    body = b"".join(b"data: " + part + b"\n\n" for part in (content, content, b"[DONE]")) if stream else content
    server.answers["/v1/chat/completions"] = server.answers["/v1/completions"] = plain(body, kind, f"{status} X")
    requests = client.spec.requests.model_copy(update={"stream": stream, "timeout": 5.0})
    client.spec = client.spec.model_copy(update={"requests": requests})
    prompt = Prompt("p", "p", (1, 2), "text", messages=({"role": "user", "content": "x"},))
    question = Question(prompt, (1, 2), prompt.messages, 0)

    async def ask() -> None:
        async with client.connection(f"{server.url}/v1", 0) as api:
            answer = await client.complete(api, "target", form, question)
            tokens = client.tokens(answer, question, form)
            assert all(type(token) is int and 0 <= token < 2**31 for token in tokens)

    refused(lambda: asyncio.run(ask()), PassingError, RefusedError, Dropped)


@pytest.fixture(scope="module")
def client(tiny_tokenizer: Any) -> Client:
    spec = DataSpec.model_validate({"prompts": ["x"], "servers": ["http://127.0.0.1:9"], "max_new_tokens": 64})
    return Client(spec, tiny_tokenizer, (1,), with_raw=False, num_ids=len(tiny_tokenizer))


COUNTS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_a_bent_page_or_list_is_read_or_refused(count: int) -> None:
    @tried(count)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        attack_pages("\n".join(data.draw(lines)))
        attack_models(json.dumps(data.draw(bodies["models"])).encode())

    attack()


@pytest.mark.parametrize("count", COUNTS)
def test_a_bent_completion_is_read_or_refused(count: int, server: Hostile, client: Client) -> None:
    @tried(count)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        content = json.dumps(data.draw(bodies["completion"])).encode()
        attack_engine(server, content)
        form, stream = Form(data.draw(st.booleans()), data.draw(st.booleans())), data.draw(st.booleans())
        body = data.draw(bent(PART) if form.chat and stream else bodies["chat" if form.chat else "completion"])
        attack_client(
            server, client, json.dumps(body).encode(), form, stream, data.draw(st.sampled_from([200, 200, 400, 500]))
        )

    attack()


def test_an_error_in_a_stream_is_written_out(server: Hostile, client: Client) -> None:
    """The slow ones found it: an escape in its message."""
    error = {"error": {"message": "\x1b", "type": "BadRequestError", "param": None, "code": 400}}
    attack_client(server, client, json.dumps(error).encode(), Form(False, False), True, 200)
