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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..common import BadInputError
from ..common.atomic import writing
from ..common.http_client import AnswerLimits, BadAnswerError, ModelList, ask, read_answer
from ..common.locks import locked
from ..common.machine import free_bytes
from ..common.runtime import require_extra
from ..common.safe_load import MEGABYTE, parse_json, read_text
from ..common.server_process import CPU_ENVIRONMENT, python_of, running_server
from ..recipes import DataSpec, EngineSpec, Recipe, ServerSpec
from ..targets import Target
from ..targets.loading import folder_of, target_path
from ..targets.weights import stored_tensors
from . import engine_connector
from .conversation import render
from .engine_checks import (
    EngineRow,
    ExpectedFacts,
    UntrustedStatesError,
    check_facts,
    check_forward,
    check_logits,
    check_next_token,
    check_template,
    check_tokens,
)
from .engine_connector import FAILED, NAME, SUFFIX, EngineFacts
from .features import stored_taps

CHECKED_ROWS = 2  # of each start of an engine, at every position
_MODULE, _SERVED_AS = "engine_connector", "target"
_BYTES_OF_A_TOKEN, _MOST_FAILURES = 2048, 5
_ROOM_OF_A_FORWARD = 0.5  # of the free memory, which the whole target may take for the comparison

_log = logging.getLogger(__name__)


class _PrefilledRow(BaseModel):
    token_ids: list[int] = Field(min_length=1)
    logprobs: Any = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class _PrefillAnswer(BaseModel):
    """The answer of `/v1/completions`, with the place of the states."""

    choices: list[_PrefilledRow] = Field(min_length=1, max_length=1)
    kv_transfer_params: dict[str, Any] | None = None


class _TokenizedChat(BaseModel):
    tokens: list[int]


def states_words(spec: EngineSpec, layers: Sequence[int], folder: str) -> list[str]:
    """Return what a vLLM's command line says so that it writes hidden states.

    Args:
        layers: HF `hidden_states` indices, in order, the number of layers for the last state before the norm.
        folder: for the states, as the engine sees it.
    """
    drafting: dict[str, Any] = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    drafting |= {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}}
    extra = {"shared_storage_path": folder, "disk_budget": int(spec.disk_gb * 1e9)}
    connector: dict[str, Any] = {"kv_connector": NAME, "kv_connector_module_path": _MODULE, "kv_role": "kv_producer"}
    connector |= {"kv_connector_extra_config": extra}
    words = ["--enforce-eager", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
    words += ["--max-num-seqs", str(spec.concurrency)]
    return [*words, "--speculative-config", json.dumps(drafting), "--kv-transfer-config", json.dumps(connector)]


def _plain_words(recipe: Recipe, target: Target) -> list[str]:
    """Return the words of a vLLM server of the target, after its Python."""
    data, own, spec = recipe.data, recipe.target, recipe.target.engine
    longest = data.max_prompt_tokens + data.max_new_tokens + 1
    longest = min(longest, target.max_context or longest)
    folder = folder_of(target_path(own.path), own.dtype, own.revision, own.trust_remote_code)
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", _SERVED_AS]
    words += ["--dtype", str(target.dtype).removeprefix("torch."), "--max-model-len", str(longest)]
    words += ["--max-num-batched-tokens", str(max(longest, 2048))]
    return [*words, *([] if spec is None else spec.arguments)]


def _started(recipe: Recipe, words: Sequence[str], more: Mapping[str, str]) -> AbstractContextManager[str]:
    """Return the context of a server on this machine, which yields its URL."""
    spec = recipe.target.engine
    assert spec is not None
    python = str(python_of(Path(spec.python or "")))
    environment = CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"} | dict(os.environ) | dict(more)
    log = recipe.output_folder / "engine.log"
    _log.info("starting the target's engine; its output is in %s", log)

    def command(port: int) -> list[str]:
        return [python, *words, "--host", "127.0.0.1", "--port", str(port)]

    return running_server(command, environment, log, _models, seconds=spec.start_seconds)


@contextmanager
def answering(recipe: Recipe, target: Target) -> Iterator[DataSpec]:
    """Yield the recipe's data with the servers that answer: its own, or the target's engine, started without states.

    Raises BadInputError if the engine is not ours to start, and nobody else answers.
    """
    spec = recipe.target.engine
    if recipe.data.servers is not None or spec is None:
        yield recipe.data
        return
    if spec.url is not None:
        raise BadInputError(
            "target.engine.url makes hidden states, and writes them for every answer, too: name who answers "
            "(data.servers), take responses that are finished (data.responses), or let Outrider start the engine "
            "(target.engine.python)."
        )
    require_extra("serving", "target.engine")
    with _started(recipe, _plain_words(recipe, target), {}) as url:
        yield recipe.data.model_copy(update={"servers": [ServerSpec(url=f"{url}/v1")]})


class EngineStates:
    """The hidden states of rows, from one engine.

    Attributes:
        target: with its final norm and output embedding. layers: the taps without the last state.
        expected: what the engine must say of itself.
    """

    def __init__(self, recipe: Recipe, target: Target, layers: Sequence[int]):
        spec = recipe.target.engine
        assert spec is not None
        require_extra("serving", "target.engine")
        self.spec, self.recipe, self.target, self.layers = spec, recipe, target, tuple(layers)
        self.folder = Path(spec.folder or recipe.output_folder / "engine").expanduser().absolute()
        self.url, self._stack, self._lock = "", ExitStack(), threading.Lock()
        self._trusted: EngineFacts | None = None
        self._ended: set[str] = set()  # instances
        self._probes: list[list[int]] = []

    @classmethod
    def of_recipe(cls, recipe: Recipe, target: Target, taps: Sequence[int]) -> EngineStates | None:
        """Return the states of a drafter's taps from the recipe's engine; None where it names none."""
        return None if recipe.target.engine is None else cls(recipe, target, stored_taps(taps, target.num_layers))

    @cached_property
    def expected(self) -> ExpectedFacts:
        """What the engine must say of itself; the checkpoint's digest is made when it is first asked for."""
        spec, target = self.recipe.target, self.target
        folder = folder_of(target_path(spec.path), spec.dtype, spec.revision, spec.trust_remote_code)
        quantised = getattr(target.model.config, "quantization_config", None) or {}
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else str(quantised.quant_method)
        digest = engine_connector.checkpoint_digest(folder)
        return ExpectedFacts(self.layers, target.num_layers, target.dtype, str(method or ""), digest)

    @property
    def identity(self) -> list[Any]:
        """The settings that decide its states, beside the target's own identity: sums are another engine's."""
        return [self.spec.kind, engine_connector.VERSION]

    @contextmanager
    def running(self, probes: Sequence[Sequence[int]]) -> Iterator[EngineStates]:
        """Have the engine ready inside, and trusted: `probes` are rows by which each start of it is checked."""
        self._probes = [list(tokens) for tokens in probes if len(tokens) > 2][:CHECKED_ROWS]
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder), self._stack:
            self._start()
            yield self
        self.url = ""

    def _start(self) -> None:
        """Start the engine, or look for the user's, and trust it, or not."""
        for left in self.folder.glob("*"):  # of a run that was killed
            if left.suffix in (SUFFIX, FAILED, ".part"):
                left.unlink(missing_ok=True)
        if self.spec.url is not None:
            self.url = self.spec.url.rstrip("/").removesuffix("/v1")
            _models(self.url)
        else:
            self.url = self._stack.enter_context(self._own_server())
        self._check_template()
        self._compare()

    def _compare(self) -> None:
        """Trust this start of the engine, once its states of the probes are right."""
        whole, row = self._whole(), None
        for tokens in self._probes:
            row = self._asked(tokens, probe=True)
            check_logits(self.target, row)
            if whole is not None:
                check_forward(whole, row, self.expected)
        if row is not None:
            before, self._trusted = self._trusted, row.facts
            if before is not None and before.instance != row.facts.instance:
                self._ended.add(before.instance)
        _log.info("the engine's states were compared on %d rows: trusted", len(self._probes))

    def _own_server(self) -> AbstractContextManager[str]:
        """Return the context of a server with the connector, on this machine."""
        module = self.folder / f"{_MODULE}.py"
        shutil.copyfile(engine_connector.__file__, module)
        layers = (*self.layers, self.target.num_layers)
        words = _plain_words(self.recipe, self.target) + states_words(self.spec, layers, str(self.folder))
        path = os.pathsep.join(filter(None, [str(module.parent), os.environ.get("PYTHONPATH")]))
        return _started(self.recipe, words, {"PYTHONPATH": path})

    def _check_template(self) -> None:
        """Compare the engine's tokens of a chat with our own, where the target has a template."""
        tokenizer = self.target.require_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            return
        messages = [{"role": "user", "content": "Say in a word: yes or no?"}]
        text = render(tokenizer, messages, "a chat for comparison", template=self.recipe.template)
        body = {"model": self._name, "messages": messages, "add_generation_prompt": True}
        body |= {"add_special_tokens": False, "chat_template_kwargs": dict(self.recipe.template)}
        place = f"{self.url}/tokenize"
        theirs = read_answer(_TokenizedChat, ask(place, json.dumps(body).encode()), place).tokens
        check_template(theirs, tokenizer(text, add_special_tokens=False)["input_ids"])

    def _whole(self) -> Target | None:
        """Return the whole target for a plain forward, if it fits beside everything else; the check ends its life."""
        room, own = free_bytes(torch.device("cpu")), self.recipe.target
        folder = folder_of(target_path(own.path), own.dtype, own.revision, own.trust_remote_code)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if (
            self.spec.check == "logits"
            or self.expected.quantization
            or (self.spec.check == "auto" and size > _ROOM_OF_A_FORWARD * (room or 0))
        ):
            _log.info("the target is not loaded for a plain forward: taps before the last are checked by their names")
            return None
        return Target.load(**own.to_load(), device="cpu")

    def of(self, rows: Mapping[int, np.ndarray]) -> Iterator[tuple[int, Tensor | None, Tensor]]:
        """Yield number, taps `[T, K, H]` (None without taps) and last state after the norm `[T, H]` of each row.

        An engine that ended, or is away, is started again, or waited for.
        """
        left, failures = dict(rows), 0
        while left:
            try:
                for i, row in self._answers(left):
                    with torch.inference_mode():
                        last = self.target.final_norm(row.states[:, -1].to(self.target.device)).cpu()
                    del left[i]
                    yield i, row.states[:, :-1] if self.layers else None, last
            except BadAnswerError as error:
                failures += 1
                if failures > _MOST_FAILURES or error.reason.startswith("HTTP status 4"):  # it would say so again
                    raise
                self._mend(error)

    def _answers(self, rows: Mapping[int, np.ndarray]) -> Iterator[tuple[int, EngineRow]]:
        """Yield each row, checked, in order, while others are asked."""
        with ThreadPoolExecutor(self.spec.concurrency) as pool:
            asked = [(i, pool.submit(self._row, tokens.tolist())) for i, tokens in rows.items()]
            try:
                for i, future in asked:
                    yield i, future.result()
            finally:
                for _, future in asked:
                    future.cancel()

    def _row(self, tokens: list[int]) -> EngineRow:
        row = self._asked(tokens)
        with self._lock:
            if self._trusted is not None and row.facts.instance not in {self._trusted.instance, *self._ended}:
                self._compare()  # the user's engine was started again, between two rows
        check_next_token(self.target, row)
        return row

    def _mend(self, error: BadAnswerError) -> None:
        """Bring the engine back, in the thread that lives as long as it: the kernel ends it with its thread."""
        _log.warning("the engine failed (%s); it is asked again", error.reason)
        self._stack.close()
        limit = time.monotonic() + self.spec.start_seconds
        while True:
            try:
                return self._start()
            except BadAnswerError:
                if self.spec.url is None or time.monotonic() > limit:
                    raise
                time.sleep(2)

    @cached_property
    def _name(self) -> str:
        return _models(self.url, name=True)

    def _asked(self, tokens: list[int], probe: bool = False) -> EngineRow:
        """Return an engine's row of these tokens, with its facts and tokens checked."""
        ended = frozenset(self._ended)  # before this request: an answer may come from an engine that ends meanwhile
        body = {"model": self._name, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "logprobs": 0}
        body |= {"return_token_ids": True, "add_special_tokens": False}
        body |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        body |= {"prompt_logprobs": 0} if probe else {}
        limits = AnswerLimits(self.spec.timeout, MEGABYTE + _BYTES_OF_A_TOKEN * len(tokens))
        place = f"{self.url}/v1/completions"
        answer = read_answer(_PrefillAnswer, ask(place, json.dumps(body).encode(), limits=limits), place)
        named = str((answer.kv_transfer_params or {}).get("hidden_states_path", ""))
        if not named.endswith(SUFFIX):
            raise BadInputError(
                f"{place} names no file of hidden states: start the engine with Outrider's connector (outrider plan "
                "prints the command)."
            )
        row = self._read(self.folder / Path(named).name, answer.choices[0])
        check_facts(row.facts, self.expected, self._trusted, ended)
        check_tokens(row, torch.tensor(tokens), self.expected)
        return row

    def _read(self, file: Path, choice: _PrefilledRow) -> EngineRow:
        """Return the row in a file, as soon as it is there, and remove it."""
        limit, failed = time.monotonic() + self.spec.timeout, file.with_suffix(FAILED)
        while not file.exists():
            if failed.exists():
                raise BadInputError(f"the engine could not write hidden states: {read_text(failed)[:500]}")
            if time.monotonic() > limit:
                raise BadInputError(
                    f"the engine answered, and no hidden states are in {self.folder} after {self.spec.timeout:g} s. "
                    "Do this machine and the engine's see the same folder (target.engine.folder)?"
                )
            time.sleep(0.002)
        facts, states, token_ids = read_states(file)
        file.unlink(missing_ok=True)
        logprob = (choice.logprobs or {}).get("token_logprobs") if isinstance(choice.logprobs, dict) else None
        told = [_logprob(one, int(t)) for one, t in zip(choice.prompt_logprobs or [], token_ids, strict=False)][1:]
        given = torch.tensor(told) if told and None not in told else None
        return EngineRow(states, token_ids, facts, choice.token_ids[0], logprob[0] if logprob else None, given)


def read_states(file: Path) -> tuple[EngineFacts, Tensor, Tensor]:
    """Return the facts, the states `[T, K, H]` and the tokens `[T]` in a connector's file.

    Raises:
        UntrustedStatesError: it is damaged, or no connector's.
    """
    try:
        names = set(stored_tensors(file))
        with safe_open(file, framework="pt") as opened:
            said = parse_json((opened.metadata() or {}).get("outrider", ""), str(file))
            states, token_ids = (opened.get_tensor(name) for name in ("hidden_states", "token_ids"))
        digest = said.pop("digest")
        facts = EngineFacts(**{**said, "layers": tuple(said["layers"])})
    except (BadInputError, SafetensorError, OSError, KeyError, TypeError, AttributeError) as error:
        raise UntrustedStatesError("altered file", f"{file.name} cannot be read ({type(error).__name__}).") from error
    if names != {"hidden_states", "token_ids"} or digest != engine_connector.tensors_digest(states, token_ids):
        raise UntrustedStatesError("altered file", f"{file.name} is not what the connector wrote.")
    return facts, states, token_ids.long()


def _logprob(one: dict[str, Any] | None, token: int) -> float | None:
    """Return the log-probability of a token in an engine's list for one position."""
    entry = (one or {}).get(str(token))
    return float(entry["logprob"]) if isinstance(entry, dict) and "logprob" in entry else None


def _models(url: str, name: bool = False) -> str:
    """Return the URL of a server that answers, or the name of its first model."""
    place = f"{url}/v1/models"
    first = read_answer(ModelList, ask(place), place).data[0].id
    return first if name else url
