"""What a stranger's tokenizer and templates compute, in one process of its own with limits of time and memory.

A tokenizer.json is a program: normalisers, regular expressions and decoders, each of which may double a text. So are a
chat template and a response template. A library's call that takes hours, or all memory, cannot be stopped from inside;
a process can. It is started when it is first needed, and ends itself at its limits, or when this process is gone.

A folder's tokenizer is tried there before it is opened here, on texts that hold what its own programs look for; one
that passed is not tried again. Every chat is rendered there, except by the template that ships with Outrider,
and by tokenizers that have code of their own for it: a stranger's is trusted, or it would not be there.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import re
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..common import digest_cache
from ..common.digests import file_digest
from ..common.errors import BadInputError, IncompatibleError, OutriderError
from ..common.runtime import give_back_unused
from ..common.safe_load import MEGABYTE

try:
    import resource
except ImportError:  # Windows, where only the time is limited
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = {"try": 5.0, "render": 3.0, "parse": 3.0}  # of the processor, for one piece of work
# All data of the process: a tokenizer to try has so many bytes more for each of its files' own.
MEMORY, _MOST_MEMORY, _TIMES_ITS_FILES = 320 * MEGABYTE, 960 * MEGABYTE, 24
_WALL = 8  # times the seconds: another program may have the processor
_LONGEST_TEMPLATE, _LONGEST_TEXT, _LONGEST_ERROR = MEGABYTE, 8 * MEGABYTE, 1000
_READ = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.bpe")  # what libraries may read of a tokenizer
_LARGEST = 128 * MEGABYTE
_EMBEDDED = Path(__file__).resolve().parents[1] / "recipes" / "embedded" / "target"
_MARKERS = re.compile(r"\{%-?\s*generation\b")

# One of everything that texts consist of, and runs of one kind, which are hard for regular expressions.
_SAMPLE = (
    "def add(first, second):\n    return first + second  # 1,234.5 €\r\n\tÜñï e\u0301 漢字 かな 한국어 עברית العربية "
    "👩\u200d👩\u200d👧 \u200b\x00\ufffd"
)
_RUNS = ("a", " ", "1", "\n", "_", "é", "漢", "Aa", "a ", "=-")
_LENGTH = 16_384  # characters of a long text


class OverBudgetError(BadInputError):
    """Work for a stranger's file that takes more time or memory than it may."""


class BrokenOffError(Exception):
    """Work that a library broke off with this message."""


class Rendered(NamedTuple):
    """A chat as text, and the spans of characters inside the template's `{% generation %}` markers, if it has any."""

    text: str
    generated: Sequence[Sequence[int]]


def try_tokenizer(folder: Path) -> None:
    """Open the tokenizer in a folder that was checked, and let it read and write, where it can do no harm.

    Raises BadInputError if that takes too much, or fails. Who opens it here says why it cannot be opened.
    """
    if folder.resolve() == _EMBEDDED:
        return
    files = sorted({file for pattern in _READ for file in folder.glob(pattern) if file.is_file()})
    sizes = {file: file.stat().st_size for file in files}
    contents = [(f.name, file_digest(f) if size <= _LARGEST else size) for f, size in sizes.items()]
    versions = [version(name) for name in ("outrider", "tokenizers", "transformers")]
    tried = f"tokenizer {sha256(json.dumps([contents, versions]).encode()).hexdigest()}"
    if digest_cache.is_noted(tried):
        return
    try:
        _process.ask("try", _TIMES_ITS_FILES * sum(sizes.values()), folder=str(folder))
    except (OverBudgetError, BrokenOffError) as error:
        raise BadInputError(
            f"the tokenizer in {str(folder)!r} cannot be used. It was tried in a process of its own: {error}."
        ) from error
    digest_cache.note(tried)


def open_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder, whatever it computes; raises the library's errors, and IncompatibleError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    from .model_folder import without_questions

    with without_questions():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise IncompatibleError(f"{type(tokenizer).__name__} is no tokenizer of one language model.")
    return tokenizer


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    answer: bool,
    arguments: Mapping[str, Any],
) -> Rendered:
    """Return a chat rendered by the tokenizer's template; raises what the template does, and OverBudgetError."""
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        own: Any = list(messages)
        text: Any = tokenizer.apply_chat_template(
            own, tools=tools, tokenize=False, add_generation_prompt=answer, **arguments
        )
        return Rendered(str(text), ())
    if not messages:
        raise ValueError("there is no message")
    template = tokenizer.get_chat_template(None, tools)
    known = [{name: value for name, value in message.items() if value is not None} for message in messages]
    more = {**tokenizer.special_tokens_map, **arguments, "add_generation_prompt": answer}
    if template == _embedded_template():
        return Rendered(*_render(template, known, tools, more))
    if len(template) > _LONGEST_TEMPLATE:
        raise OverBudgetError(f"it is longer than {_LONGEST_TEMPLATE // MEGABYTE} MB")
    return Rendered(*_process.ask("render", template=template, messages=known, tools=tools, arguments=more))


def parse_response(tokenizer: PreTrainedTokenizerBase, text: str, before: str) -> dict[str, Any]:
    """Return an answer parsed by the tokenizer's response template; raises what the library does, OverBudgetError."""
    return dict(_process.ask("parse", template=tokenizer.response_template, text=text, before=before))


@cache
def _embedded_template() -> str:
    return (_EMBEDDED / "chat_template.jinja").read_text(encoding="utf-8")


class _LimitedProcess:
    """The child process. It answers one request at a time, and another one takes its place when it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None

    def ask(self, work: str, more: int = 0, **values: Any) -> Any:
        """Return the result of a kind of work; raises OverBudgetError, and BrokenOffError with a library's words.

        Args:
            more: bytes that it may take beside `MEMORY`.
        """
        memory = min(MEMORY + more, _MOST_MEMORY)
        request = json.dumps([work, values, SECONDS[work], memory])
        with self._lock:
            if self._running is not None and self._running.poll() is not None:  # something ended it while it was idle
                self.end()
            child, self._running = self._running or _started(), None
            try:
                answer = _exchanged(child, request)
                self._running = child if answer else None
            finally:  # after a signal, too: the answer would be taken for that to the next request
                if self._running is None:
                    code = _ended(child)
        if not answer:
            is_slow = code in (1, -getattr(signal, "SIGPROF", 0))
            raise OverBudgetError(f"it takes longer than {SECONDS[work]:g} seconds" if is_slow else _too_much(memory))
        if "error" in answer:
            raise BrokenOffError(answer["error"]) if answer["error"] else OverBudgetError(_too_much(memory))
        return answer["value"]

    def end(self) -> None:
        """End the child process, if there is one."""
        if self._running is not None:
            _ended(self._running)
            self._running = None


def _too_much(memory: int) -> str:
    return f"it takes more than {memory // MEGABYTE} MB of memory, or breaks the process off"


_process = _LimitedProcess()
atexit.register(_process.end)
if hasattr(os, "register_at_fork"):  # the child is not the forked process's
    os.register_at_fork(after_in_child=_process.__init__)  # type: ignore[misc]


def _started() -> subprocess.Popen[str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        env=os.environ | one_thread | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="ascii",
    )
    if _exchanged(child) is None:
        _ended(child)
        raise OutriderError(
            "the process that opens tokenizers of strangers does not start. "
            f"`{Path(sys.executable).name} -P -m {__name__} < /dev/null` says why."
        )
    return child


def _exchanged(child: subprocess.Popen[str], request: str | None = None) -> dict[str, Any] | None:
    """Send a request, if any, and return the answer; None if the child is gone."""
    asked, answers = child.stdin, child.stdout
    assert asked is not None
    assert answers is not None
    try:
        if request is not None:
            asked.write(f"{request}\n")
            asked.flush()
        line = answers.readline()
    except BrokenPipeError:
        return None
    return json.loads(line) if line.endswith("\n") else None  # what our own child wrote


def _ended(child: subprocess.Popen[str]) -> int:
    """End a child, which may have ended itself, and return its exit code."""
    child.kill()
    with suppress(OSError):  # of a request that the child did not read to its end
        child.stdin.close()  # type: ignore[union-attr]
    with child:  # closes the other pipe, and waits
        return child.wait()


# Below is what the child does.


def _try(folder: str) -> None:
    """Open a tokenizer; read texts of many kinds with it, and write all of its tokens."""
    try:
        tokenizer = open_tokenizer(Path(folder))
    except MemoryError:
        raise
    except Exception:  # who opens it next, gets the same, and has words for it
        return
    ids = sorted(tokenizer.get_vocab().values())
    _require_ids(ids)
    written = "".join(str(tokenizer.decode(ids, skip_special_tokens=skip)) for skip in (False, True))
    for text in _texts(written, getattr(tokenizer, "backend_tokenizer", None)):
        _require_ids(tokenizer(text, return_offsets_mapping=tokenizer.is_fast)["input_ids"])
        tokenizer(text, add_special_tokens=False)


def _require_ids(ids: Sequence[int]) -> None:
    """Raise ValueError for an id that no table of tokens has: also of those that are put around a text."""
    if odd := [token for token in ids if not 0 <= token < 2**31]:
        raise ValueError(f"a token has the id {odd[0]}")


def _texts(written: str, backend: Any) -> Iterator[str]:
    """Yield texts to try a tokenizer with: of all kinds, of what it writes, and of what its own programs look for."""
    yield string.printable + _SAMPLE
    yield (_SAMPLE * _LENGTH)[:_LENGTH]
    yield from (f"{(run * _LENGTH)[:_LENGTH]}!" for run in _RUNS)
    yield "".join(sorted(set(written)))
    yield written[:_LENGTH]
    parts = [getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    level = [json.loads(part.__getstate__()) for part in parts if part is not None]
    while level:
        yield " ".join(value for value in level if isinstance(value, str))[:_LENGTH]
        holders = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [value for holder in holders if isinstance(holder, list) for value in holder]


def _render(
    template: str, messages: list[dict[str, Any]], tools: Any, arguments: dict[str, Any]
) -> tuple[str, Sequence[Sequence[int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    marked = _MARKERS.search(template) is not None
    rendered: Any = render_jinja_template(
        [messages], tools, chat_template=template, return_assistant_tokens_mask=marked, **arguments
    )
    texts, spans = rendered
    if len(texts[0]) > _LONGEST_TEXT:
        raise MemoryError
    return str(texts[0]), spans[0] if marked else ()


def _parse(template: dict[str, Any], text: str, before: str) -> dict[str, Any]:
    from transformers import PreTrainedTokenizerBase

    nothing: Any = SimpleNamespace()  # of text and a template the method asks no tokenizer
    return PreTrainedTokenizerBase.parse_response(nothing, text, template, prefix=before)


def _serve() -> None:
    """Answer requests, one on each line, until there are no more."""
    requests, answers = os.fdopen(os.dup(0), encoding="ascii"), os.fdopen(os.dup(1), "w", 1, encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # libraries that ask or print must not do it there
    os.dup2(2, 1)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # a signal to the whole group is for the parent
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers need none, and it takes seconds to import
    import transformers.models.auto.tokenization_auto  # noqa: F401 (before time counts)

    works: dict[str, Any] = {"try": _try, "render": _render, "parse": _parse}
    if resource is not None:
        _lower(resource.RLIMIT_CORE, 0)
    answers.write("{}\n")
    for line in requests:
        try:
            work, values, seconds, memory = json.loads(line)
            with _limited(seconds, memory):
                value = works[work](**values)
                json.dumps(value, ensure_ascii=False).encode()  # half of a pair of surrogates is no text
                answer = json.dumps({"value": value})
        except MemoryError:
            answer = json.dumps({"error": ""})
        except BaseException as error:  # a panic of Rust is no Exception
            answer = json.dumps({"error": (str(error) or type(error).__name__)[:_LONGEST_ERROR]})
        answers.write(f"{answer}\n")
        del answer
        give_back_unused()  # while the parent reads the text as tokens


@contextmanager
def _limited(seconds: float, memory: int) -> Iterator[None]:
    """End the process if the block takes longer than it may, whatever call it is in; give it so much memory."""
    faulthandler.dump_traceback_later(_WALL * seconds, exit=True)
    if resource is not None:
        _lower(resource.RLIMIT_DATA, memory)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor's time; no one handles its signal
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if resource is not None:
            signal.setitimer(signal.ITIMER_PROF, 0)


def _lower(what: int, most: int) -> None:
    """Set a limit of the process, which it can raise again, to `most` or to what is left to it."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    _serve()
