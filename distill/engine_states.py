"""Hidden states from an engine that holds the target: asked over HTTP, read from the folder that it writes into.

One prompt is one request of a single new token; `engine_connector` runs inside the engine and writes the states of the
prompt. A row is read only after it was checked (`engine_checks`), and its file is removed. An engine that Outrider
started is started again when it dies.

Shapes: T tokens, K taps without the last, H hidden size.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from ..common import BadInputError
from ..common.atomic import writing
from ..common.http_client import AnswerLimits, BadAnswerError, ModelList, TokenId, ask, read_answer
from ..common.locks import locked
from ..common.machine import free_bytes
from ..common.runtime import require_extra
from ..common.server_process import CPU_ENVIRONMENT, python_of, running_server
from ..common.untrusted_files import MEGABYTE, parse_json, read_bytes, read_text
from ..common.values import ForeignModel
from ..recipes import DataSpec, EngineSpec, Recipe, ServerSpec
from ..targets import Target
from ..targets.loading import folder_of, target_path
from ..targets.weights import stored_tensors
from . import engine_checks, engine_connector
from .conversation import render
from .engine_checks import EngineRow, UntrustedStatesError
from .engine_connector import FAILED, NAME, SUFFIX, VERSION, EngineFacts
from .features import stored_taps

CHECKED_ROWS, CHECKED_TOKENS = 2, 512  # of each start of an engine, at every position, from the first one on
_MODULE, _SERVED_AS = "engine_connector", "target"
_BYTES_OF_A_TOKEN, _MOST_FAILURES = 2048, 5
_RESTARTED = "another instance"
_REQUEST = "cmpl-"  # how vLLM's names of requests begin, and so those of their files
_ROOM_OF_A_FORWARD = 0.5  # of the free memory, which the whole target may take for the comparison

_log = logging.getLogger(__name__)


_FACTS = TypeAdapter(EngineFacts)


class _Logprob(ForeignModel):
    logprob: float


class _NextLogprobs(ForeignModel):
    token_logprobs: list[float | None] | None = None


class _PrefilledRow(ForeignModel):
    token_ids: list[TokenId] = Field(min_length=1)
    logprobs: _NextLogprobs | None = None
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None

    def prompt_logprobs_of(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the log-probability of each token after the first one, `[T − 1]`; None unless all are there."""
        pairs = zip(self.prompt_logprobs or [], tokens, strict=False)
        found = [entry.logprob if (entry := (one or {}).get(str(token))) else None for one, token in pairs][1:]
        return torch.tensor(found) if found and None not in found else None


class _PrefillAnswer(ForeignModel):
    """The answer of `/v1/completions`, with the place of the states."""

    choices: list[_PrefilledRow] = Field(min_length=1, max_length=1)
    kv_transfer_params: dict[str, Any] | None = None


class _TokenizedChat(ForeignModel):
    tokens: list[int]


def states_words(spec: EngineSpec, layers: Sequence[int], folder: str) -> list[str]:
    """Return the vLLM flags that export hidden states.

    Args:
        layers: HF `hidden_states` indices, the number of layers for the last state before the norm. vLLM sorts them.
        folder: for the states, as the engine sees it.
    """
    drafting: dict[str, Any] = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    drafting |= {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": sorted(set(layers))}}}
    extra = {"shared_storage_path": folder, "disk_budget": int(spec.disk_gb * 1e9)}
    connector: dict[str, Any] = {"kv_connector": NAME, "kv_connector_module_path": _MODULE, "kv_role": "kv_producer"}
    connector |= {"kv_connector_extra_config": extra}
    words = ["--enforce-eager", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
    words += ["--max-num-seqs", str(spec.concurrency)]
    return [*words, "--speculative-config", json.dumps(drafting), "--kv-transfer-config", json.dumps(connector)]


def plain_words(recipe: Recipe, target: Target, longest: int = 0) -> list[str]:
    """Return the vLLM flags that serve the recipe's target, whose `longest` row has that many tokens."""
    data, spec = recipe.data, recipe.target.engine
    longest = max(longest, data.max_prompt_tokens + data.max_new_tokens) + 1
    limit = getattr(target.config, "max_position_embeddings", None)
    longest = min(longest, limit or longest)
    words = ["--served-model-name", _SERVED_AS, "--dtype", str(target.dtype).removeprefix("torch.")]
    words += ["--max-model-len", str(longest), "--max-num-batched-tokens", str(max(longest, 2048))]
    words += ["--trust-remote-code"] * recipe.target.trust_remote_code
    return [*words, *([] if spec is None else spec.arguments)]


def _folder_of(recipe: Recipe) -> Path:
    """Return the folder of the target's files."""
    own = recipe.target
    return folder_of(target_path(own.path), own.dtype, own.revision, own.trust_remote_code)


class GivenUpError(Exception):
    """The states are not needed any more."""


def _started(
    recipe: Recipe, words: Sequence[str], more: Mapping[str, str], check: Callable[[], None] = lambda: None
) -> AbstractContextManager[dict[str, str]]:
    """Return the context of a server on this machine, which yields its model by its URL; `check` may end its start."""
    spec = recipe.target.engine
    assert spec is not None
    python = str(python_of(Path(spec.python or "")))
    environment = CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"} | dict(os.environ) | dict(more)
    server = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(_folder_of(recipe))]
    server += ["--disable-uvicorn-access-log", "--host", "127.0.0.1"]
    log = recipe.output_folder / "engine.log"
    _log.info("starting the target's engine; its output is in %s", log)

    def command(port: int) -> list[str]:
        return [*server, "--port", str(port), *words]

    def answers(url: str) -> dict[str, str]:
        check()
        return {url: _first_model(url)}

    return running_server(command, environment, log, answers, seconds=spec.start_seconds)


@contextmanager
def answering(recipe: Recipe, target: Target) -> Iterator[DataSpec]:
    """Yield the recipe's data with the servers that answer: its own, or the target's engine, started without states."""
    if recipe.data.servers is not None or recipe.target.engine is None:
        yield recipe.data
        return
    require_extra("serving", "target.engine")
    with _started(recipe, plain_words(recipe, target), {}) as (url,):
        yield recipe.data.model_copy(update={"servers": [ServerSpec(url=f"{url}/v1")]})


class EngineStates:
    """The hidden states of rows, from one engine, or from several that write into one folder.

    Attributes:
        target: with its final norm and output embedding. layers: the taps without the last state, in the drafter's
            order; the engine's are ascending.
        expected: the facts that an engine must have.
    """

    def __init__(self, recipe: Recipe, target: Target, layers: Sequence[int]):
        spec = recipe.target.engine
        assert spec is not None
        require_extra("serving", "target.engine")
        self.spec = spec
        self.recipe = recipe
        self.target = target
        self.layers = tuple(layers)
        self.folder = Path(spec.folder or recipe.output_folder / "engine").expanduser().absolute()
        self._stack = ExitStack()
        self._stopped = threading.Event()
        self._given_up = threading.Event()
        # All of these only the thread that starts engines changes.
        self._models: dict[str, str] = {}  # by URL, of the engines that are asked
        self._instances: dict[str, str] = {}  # by URL, of the starts that are trusted
        self._ended: set[str] = set()  # instances
        self._probes: list[list[int]] = []
        self._compared: list[Tensor] = []  # states of the probes, of the first engine that was trusted

    @classmethod
    def of_recipe(cls, recipe: Recipe, target: Target, taps: Sequence[int]) -> EngineStates | None:
        """Return the states of a drafter's taps from the recipe's engine; None where it names none."""
        return None if recipe.target.engine is None else cls(recipe, target, stored_taps(taps, target.num_layers))

    @cached_property
    def expected(self) -> EngineFacts:
        """The facts that every engine must have, from a little of each file of the checkpoint."""
        target, config = self.target, self.target.model.config
        configs = SimpleNamespace(hf_config=config, hf_text_config=config.get_text_config())
        return EngineFacts(
            version=VERSION,
            instance="",
            layers=(*sorted(self.layers), target.num_layers),
            num_layers=target.num_layers,
            dtype=str(target.dtype).removeprefix("torch."),
            quantization=engine_connector.quantization_of(configs),
            weights=engine_connector.checkpoint_digest(_folder_of(self.recipe)),
        )

    @property
    def identity(self) -> list[Any]:
        """The settings that decide its states, beside the target's own identity: sums are another engine's."""
        return [self.spec.kind, VERSION]

    @contextmanager
    def running(self, probes: Sequence[Sequence[int]]) -> Iterator[EngineStates]:
        """Have the engines ready inside, and trusted: by `probes`, of which the first one is the longest of all rows.

        Raises BadInputError, before any engine starts, if that one leaves no room for the token that it makes.
        """
        longest, limit = len(probes[0]), self.target.max_context
        if limit is not None and longest > limit:
            raise BadInputError(
                f"a row has {longest} tokens, and the engine reads {limit} at most: it makes one more, within the "
                "target's context. Lower data.max_new_tokens, or cut the rows of data.responses."
            )
        self._probes = [list(tokens) for tokens in probes]
        self._given_up.clear()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder), self._stack:
            for url in self.spec.urls:  # at first all of them must be there; later some may be away
                _first_model(url)
            self._start()
            yield self
            self._clear()

    def _start(self) -> None:
        """Start the engine, or look for the user's, and trust each of those that answer, or not."""
        self._clear()
        self._stopped.clear()
        self._models = self._answering() if self.spec.urls else self._own_server()
        try:
            for url in self._models:
                self._check_template(url)
                self._compare(url)
        except BaseException:
            self._models = {}  # nothing is asked of an engine that was not compared
            raise

    def _clear(self) -> None:
        """Remove what an engine wrote for a run that was killed, and nothing else.

        Raises BadInputError if there are weights of anything else: it is no folder for states.
        """
        ours = [file for file in self.folder.glob(f"{_REQUEST}*{SUFFIX}") if _is_states(file)]
        if others := sorted(set(self.folder.glob(f"*{SUFFIX}")) - set(ours)):
            raise BadInputError(
                f"{self.folder} holds {others[0].name}, which no engine wrote there; name a folder for states alone "
                "(target.engine.folder)."
            )
        parts = self.folder.glob(f".{_REQUEST}*{SUFFIX}.part")
        for left in (*ours, *parts, *self.folder.glob(f"{_REQUEST}*{FAILED}")):
            left.unlink(missing_ok=True)

    def _compare(self, url: str) -> None:
        """Trust this start of an engine, once its states of the probes are right.

        The first one's are compared with a plain forward, where that can be; every later one's with the first one's.
        """
        # The longest row is asked for without the logits of all its tokens, which may need more than there is.
        asked = [self._probes[0], *(tokens[:CHECKED_TOKENS] for tokens in self._probes[:CHECKED_ROWS])]
        rows = [self._asked(url, tokens, probe=i > 0) for i, tokens in enumerate(asked)]
        if len({row.facts.instance for row in rows}) > 1:
            raise BadAnswerError(f"{url} was started again while it was compared.", _RESTARTED)
        for row in rows:
            engine_checks.check_logits(self.target, row)
        if self._compared:
            for row, states in zip(rows[1:], self._compared, strict=True):
                engine_checks.check_same(row, states)
        elif (whole := self._whole()) is not None:
            for row in rows[1:]:
                engine_checks.check_forward(whole, row)
        self._compared = self._compared or [row.states for row in rows[1:]]
        self._ended |= {self._instances.get(url, "")} - {rows[0].facts.instance}
        self._instances[url] = rows[0].facts.instance
        _log.info("the states of %s were compared on %d rows: trusted", url, len(rows[1:]))

    def _own_server(self) -> dict[str, str]:
        """Start a server with the connector on this machine; return its model by its URL."""
        self._ended |= set(self._instances.values())
        self._instances.clear()
        module = self.folder / f"{_MODULE}.py"
        shutil.copyfile(engine_connector.__file__, module)
        layers = (*self.layers, self.target.num_layers)
        words = plain_words(self.recipe, self.target, len(self._probes[0]))
        words += states_words(self.spec, layers, str(self.folder))
        path = os.pathsep.join(filter(None, [str(module.parent), os.environ.get("PYTHONPATH")]))
        return self._stack.enter_context(_started(self.recipe, words, {"PYTHONPATH": path}, self._require_wanted))

    def _check_template(self, url: str) -> None:
        """Compare an engine's tokens of a chat with our own, where the target has a template."""
        tokenizer = self.target.require_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            return
        messages = [{"role": "user", "content": "Say in a word: yes or no?"}]
        text = render(tokenizer, messages, "a chat for comparison", template=self.recipe.template)
        body = {"model": self._models[url], "messages": messages, "add_generation_prompt": True}
        body |= {"add_special_tokens": False, "chat_template_kwargs": dict(self.recipe.template)}
        place = f"{url}/tokenize"
        theirs = read_answer(_TokenizedChat, ask(place, json.dumps(body).encode()), place).tokens
        own = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        engine_checks.require(
            theirs == own,
            "another template",
            f"it makes {len(theirs)} tokens of a chat of which target.path makes {len(own)}. Start it without "
            "--chat-template and --tokenizer of its own.",
        )

    def _whole(self) -> Target | None:
        """Return the whole target for a plain forward, if it fits beside everything else; the check ends its life."""
        room, own = free_bytes(torch.device("cpu")), self.recipe.target
        size = sum(file.stat().st_size for file in _folder_of(self.recipe).glob("*.safetensors"))
        if (
            self.spec.check == "logits"
            or self.expected.quantization
            or (self.spec.check == "auto" and size > _ROOM_OF_A_FORWARD * (room or 0))
        ):
            _log.info("the target is not loaded for a plain forward: taps before the last are checked by their names")
            return None
        return Target.load(**own.model_copy(update={"engine": None}).to_load(), device="cpu")

    def of(self, rows: Mapping[int, np.ndarray]) -> Iterator[tuple[int, Tensor | None, Tensor]]:
        """Yield number, taps `[T, K, H]` (None without taps) and last state after the norm `[T, H]` of each row.

        An engine that ended, or is away, is started again, or waited for; while another one answers that one works.
        """
        left, failures = dict(rows), 0
        order = [sorted(self.layers).index(layer) for layer in self.layers]  # the engine's taps are ascending
        while left:
            self._require_wanted()
            try:
                if self.spec.urls and self._models.keys() != self._answering().keys():
                    self._start()
                for i, row in self._answers(left):
                    with torch.inference_mode():
                        last = self.target.final_norm(row.states[:, -1].to(self.target.device)).cpu()
                    del left[i]
                    yield i, row.states[:, order] if self.layers else None, last
            except BadAnswerError as error:
                failures = self._repaired(error, failures + 1)

    def give_up(self) -> None:
        """Let rows, starts and repairs that another thread waits for fail, for good."""
        self._given_up.set()
        self._stopped.set()

    def _require_wanted(self) -> None:
        if self._given_up.is_set():
            raise GivenUpError

    def _repaired(self, error: BadInputError, failures: int) -> int:
        """Return the number of failures once an engine can be asked again; one that lives is not started anew.

        It is started in the thread that lives as long as it: the kernel ends it with its thread.
        """
        while True:
            reason = error.reason if isinstance(error, BadAnswerError) else str(error)
            if failures > _MOST_FAILURES or reason.startswith("HTTP status 4"):  # a repeated request has the same fault
                raise error
            _log.warning("the engine failed (%s); it is asked again", reason)
            self._given_up.wait(0.1 * 2**failures)
            self._require_wanted()
            try:
                if reason == _RESTARTED or not _alive(self._models):
                    self._stack.close()
                    self._start()
            except BadInputError as again:  # it may have been killed as it started
                error, failures = again, failures + 1
            else:
                return failures

    def _answering(self) -> dict[str, str]:
        """Return the models, by URL, of the user's engines that answer, as soon as one does; else BadAnswerError."""
        limit = time.monotonic() + self.spec.start_seconds
        while not (found := _alive(self.spec.urls)):
            if time.monotonic() > limit:
                raise BadInputError(f"{', '.join(self.spec.urls)}: the engine does not answer.")
            self._given_up.wait(0.5)
            self._require_wanted()
        return found

    def _answers(self, rows: Mapping[int, np.ndarray]) -> Iterator[tuple[int, EngineRow]]:
        """Yield each row, checked, in order, while others are asked of whichever engine has time."""
        idle = SimpleQueue[str]()
        for url in list(self._models) * self.spec.concurrency:
            idle.put(url)
        with ThreadPoolExecutor(idle.qsize()) as pool:
            self._stopped.clear()
            self._require_wanted()
            try:
                answers = pool.map(lambda tokens: self._row(idle, tokens.tolist()), rows.values())
                yield from zip(list(rows), answers, strict=True)  # its reader removes rows meanwhile
            finally:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)

    def _row(self, idle: SimpleQueue[str], tokens: list[int]) -> EngineRow:
        url = idle.get()
        try:
            row = self._asked(url, tokens)
        finally:
            idle.put(url)
        if row.facts.instance != self._instances[url]:
            raise BadAnswerError(f"{url} was started again between two rows.", _RESTARTED)
        engine_checks.check_next_token(self.target, row)
        return row

    def _asked(self, url: str, tokens: list[int], probe: bool = False) -> EngineRow:
        """Return an engine's row, with its facts and tokens checked."""
        body = {"model": self._models[url], "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "logprobs": 0}
        body |= {"return_token_ids": True, "add_special_tokens": False}
        body |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        body |= {"prompt_logprobs": 0} if probe else {}
        limits = AnswerLimits(self.spec.timeout, MEGABYTE + _BYTES_OF_A_TOKEN * len(tokens))
        place = f"{url}/v1/completions"
        answer = read_answer(_PrefillAnswer, ask(place, json.dumps(body).encode(), limits=limits), place)
        named = str((answer.kv_transfer_params or {}).get("hidden_states_path", ""))
        if not named.endswith(SUFFIX):
            raise BadInputError(
                f"{place} names no file of hidden states: start the engine with Outrider's connector (outrider plan "
                "prints the command)."
            )
        row = self._read(self.folder / Path(named).name, answer.choices[0], len(tokens), url)
        is_again = url in self._instances or bool(self._ended)
        engine_checks.check_facts(row.facts, self.expected, is_again, self._ended)
        engine_checks.check_tokens(row, torch.tensor(tokens), self.target.hidden_size)
        return row

    def _read(self, file: Path, choice: _PrefilledRow, count: int, url: str) -> EngineRow:
        """Return the row of `count` tokens in a file, as soon as it is there, and remove it."""
        begin = looked = time.monotonic()
        failed = file.with_suffix(FAILED)
        pause = 0.002
        while file.name not in (names := os.listdir(self.folder)):  # network disks cache that a file is not there
            if failed.name in names:
                raise BadInputError(f"the engine wrote no states: {read_text(failed, MEGABYTE)[:500]}")
            if time.monotonic() > looked + 1:
                _first_model(url)  # one that ended after its answer writes nothing more
                looked = time.monotonic()
            if self._stopped.wait(pause):
                raise BadInputError("the others of these rows failed.")
            pause = min(2 * pause, 0.05)
            if time.monotonic() > begin + self.spec.timeout:
                raise BadInputError(
                    f"the engine answered, and no hidden states are in {self.folder} after {self.spec.timeout:g} s. "
                    "Do this machine and the engine's see the same folder (target.engine.folder)?"
                )
        numbers = count * (len(self.layers) + 1) * self.target.hidden_size
        try:
            facts, states, token_ids = read_states(file, 4 * numbers + 8 * count + MEGABYTE)
        finally:  # what is refused takes no room, either
            with suppress(IsADirectoryError):
                file.unlink(missing_ok=True)
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else None
        logprob = logprobs[0] if logprobs else None
        prompt_logprobs = choice.prompt_logprobs_of(token_ids.flatten().tolist())
        return EngineRow(states, token_ids, facts, choice.token_ids[0], logprob, prompt_logprobs)


def _facts_in(file: Path) -> dict[str, Any]:
    """Return the connector's metadata of a file, whose header must be sound; {} of another program's file."""
    stored_tensors(file)
    with safe_open(file, framework="pt") as opened:
        found = (opened.metadata() or {}).get("outrider")
    return {} if found is None else parse_json(found, str(file))


def _is_states(file: Path) -> bool:
    """Return whether the connector wrote a file, by its header."""
    try:
        return bool(_facts_in(file))
    except (BadInputError, SafetensorError, OSError):
        return False


def read_states(file: Path, most: int) -> tuple[EngineFacts, Tensor, Tensor]:
    """Return the facts, the states `[T, K, H]` and the tokens `[T]` in a connector's file of at most `most` bytes.

    They are copies: the file's place on the disk is free once it is removed.

    Raises:
        UntrustedStatesError: it is damaged, or no connector's, or another version's.
    """
    try:
        facts = _facts_in(file)
        engine_checks.require(
            facts["version"] == VERSION,
            "connector version",
            f"the engine runs version {facts['version']!r} of the connector, this is {VERSION}. Copy "
            "engine_connector.py again, and restart the engine.",
        )
        tensors = load(read_bytes(file, most))
        states, token_ids = tensors.pop("hidden_states"), tensors.pop("token_ids")
        is_whole = facts.pop("digest") == engine_connector.tensors_digest(states, token_ids) and not tensors
        engine_checks.require(is_whole, "altered file", f"{file.name} is not what the connector wrote.")
        return _FACTS.validate_python(facts), states, token_ids.long()
    except UntrustedStatesError:
        raise
    except (BadInputError, SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UntrustedStatesError("altered file", f"{file.name} cannot be read ({type(error).__name__}).") from error


def _alive(urls: Iterable[str]) -> dict[str, str]:
    """Return the first model of each server that answers, by URL."""
    found = {}
    for url in urls:
        with suppress(BadAnswerError):
            found[url] = _first_model(url)
    return found


def _first_model(url: str) -> str:
    """Return the name of a server's first model."""
    place = f"{url}/v1/models"
    return read_answer(ModelList, ask(place), place).data[0].id
