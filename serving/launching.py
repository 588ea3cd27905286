"""Starting an engine of the user's own on this machine, and stopping it again, whatever happens in between."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..common import BadInputError
from ..common.server_process import CPU_ENVIRONMENT, START_SECONDS, running_server
from ..formats.engines import lora_words
from .engine import Engine


class Command(Protocol):
    """A server that can be started on a port."""

    def command(self, port: int) -> list[str]:
        """Return the command line."""

    def variables(self) -> dict[str, str]:
        """Return the environment that it runs in."""

    @property
    def asked_as(self) -> str | None:
        """The name of the model that is asked; None for the only one."""


@dataclass(frozen=True)
class VllmLaunch:
    """How a vLLM is started.

    Attributes:
        python: of the environment that vLLM is installed in: the user's, never ours.
        target: folder or Hub id of the target. dtype: of its weights.
        speculation: its `--speculative-config`; None serves the plain target.
        adapter: the target's, served as a LoRA module that requests ask for; see `formats.EngineLaunch`.
        max_length: tokens of a prompt and its answer together.
        arguments: more of the server's own.
        environment: more environment variables.
    """

    python: Path
    target: str
    dtype: str
    speculation: Mapping[str, Any] | None = None
    adapter: Mapping[str, Any] | None = None
    max_length: int = 1024
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """Return the command line."""
        words = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", self.target]
        words += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype]
        words += ["--max-model-len", str(self.max_length), "--max-num-seqs", "4", "--enforce-eager"]
        if self.speculation is not None:
            words += ["--speculative-config", json.dumps(dict(self.speculation))]
        words += [] if self.adapter is None else lora_words(self.adapter)
        return [*words, *self.arguments]

    @property
    def asked_as(self) -> str | None:
        """The name by which requests ask for the target; None for the only one."""
        return None if self.adapter is None else str(self.adapter["name"])

    def variables(self) -> dict[str, str]:
        """Return the environment that the server runs in; the user's own settings win."""
        return CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"} | dict(os.environ) | dict(self.environment)


@dataclass(frozen=True)
class LlamaLaunch:
    """How a llama.cpp is started.

    Attributes:
        program: its llama-server. model: of the target, as a GGUF file.
        speculation: its drafting, by the names of its options; None serves the plain target.
        exact: with caches in float32 and without fast attention, so that its text is the model's.
        threads: of passes. max_length: tokens of a prompt and its answer together.
        arguments: more of the server's own, which win.
        environment: more environment variables.
    """

    program: Path
    model: Path
    speculation: Mapping[str, object] | None = None
    exact: bool = True
    threads: int = 1
    max_length: int = 2048
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    asked_as: ClassVar[None] = None

    def command(self, port: int) -> list[str]:
        """Return the command line."""
        count = str(self.threads)
        words = [str(self.program), "--model", str(self.model), "--host", "127.0.0.1", "--port", str(port), "--metrics"]
        words += ["--threads", count, "--threads-batch", count, "--ctx-size", str(self.max_length), "--parallel", "1"]
        words += ["--no-cache-prompt"]
        if self.exact:
            words += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
            words += ["--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]
        words += [word for name, value in (self.speculation or {}).items() for word in (f"--{name}", str(value))]
        return [*words, *self.arguments]

    def variables(self) -> dict[str, str]:
        """Return the environment that the server runs in."""
        return dict(os.environ) | dict(self.environment)


SETTING = "--speculative-config."  # as vLLM spells one key of a JSON argument


def split_speculation(arguments: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the drafting settings among a vLLM's arguments, and the other arguments.

    vLLM takes one `--speculative-config`, which is ours; `--speculative-config.KEY VALUE` (or `=VALUE`) changes one key
    of it. A value that is JSON is read as such.

    Raises:
        BadInputError: a setting without a value.
    """
    settings: dict[str, Any] = {}
    others: list[str] = []
    words = iter(arguments)
    for word in words:
        if not word.startswith(SETTING):
            others.append(word)
            continue
        name, has_value, value = word.removeprefix(SETTING).partition("=")
        text = value if has_value else next(words, None)
        if text is None:
            raise BadInputError(f"{word} has no value; expected {SETTING}KEY VALUE.")
        try:
            settings[name] = json.loads(text)
        except json.JSONDecodeError:
            settings[name] = text
    return settings, tuple(others)


@contextmanager
def running(launch: Command, log: Path, seconds: float = START_SECONDS) -> Iterator[Engine]:
    """Start a server, yield a client of it as soon as it answers, and stop it at the end.

    Args:
        log: the file of the server's output.
        seconds: that it may take to start.

    Raises:
        BadInputError: it ended, did not answer in time, or refused a request; with its last lines.
    """

    def answers(url: str) -> Engine:
        engine = Engine(url, name=launch.asked_as)
        engine.counters()
        return engine

    with running_server(launch.command, launch.variables(), log, answers, _beyond_vocabulary, seconds) as engine:
        yield engine


def _beyond_vocabulary(lines: Sequence[str]) -> str:
    """Return the advice for an engine that stopped at a row that its embeddings do not have; else ""."""
    row = next((m for line in lines if (m := re.search(r"index (\d+) is out of bounds .* size (\d+)", line))), None)
    if row is None:
        return ""
    return (
        f" It looked up row {row[1]} of {row[2]}. If these are embeddings, a draft was no token of the target: "
        "suspect the draft vocabulary (d2t must hold offsets, not ids); `outrider lint` reads the export's files."
    )
