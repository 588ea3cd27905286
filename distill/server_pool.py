"""Answers by OpenAI-compatible servers, of which any may fail, be busy, or come back.

Each server is asked by as many workers as it may work on requests at once. They take prompts from one queue, and no
more are read than are asked, so that memory stays flat. A prompt whose attempt failed returns to the queue, for any
server. A server that fails again and again is put aside until it answers the shortest prompt.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..common import BadInputError
from ..common.progress import Advance
from ..recipes import DataSpec
from ..targets import Target
from .client import Client, DroppedError, Form, PassingError, Question, RefusedError
from .conversation import next_question
from .decoding import longest_question
from .journal import Answer, Journal, RemainingWork, Tokens
from .prompt_table import Prompt

SECONDS_BETWEEN_FILES, ANSWERS_OF_A_FILE = 5.0, 256
FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0  # before a server that was put aside is asked again
FAILURES_IN_A_ROW = 8  # after which a server is put aside; at once, if it cannot be reached
_TRIES = 2  # that the client makes beside the first, of what fails for a moment, before an attempt counts as failed

_log = logging.getLogger(__name__)


def answer_by_servers(
    target: Target, prompts: Sequence[Prompt], spec: DataSpec, work: RemainingWork, journal: Journal, advance: Advance
) -> None:
    """Let the servers answer the prompts that are left, each once. All answers are kept.

    Raises:
        BadInputError: none of them answers, or not any more; they refuse us; or some prompts could not be answered.
    """
    indices = [index for batch in work.batches for index in batch]
    with_raw = any(prompt.messages is None for prompt in prompts)
    client = Client(spec, target.require_tokenizer(), target.eos_ids, with_raw, target.vocab_size)
    run = _ServerRun(client, prompts, longest_question(spec, target.max_context), journal, work.begin, advance)
    if indices:
        asyncio.run(run.answer(indices))
    if run.unanswered:
        first = run.unanswered[0]
        raise BadInputError(
            f"{len(run.unanswered)} prompts could not be answered in {spec.requests.retries} attempts each. The first "
            f"is {prompts[first.index].id}: {first.last_error}. All the others are kept; run the same command again to "
            "ask these, or take them out of the prompts."
        )


class _Server:
    """One server.

    Attributes:
        form: of its requests; None before its first answer.
        is_up: whether it answers; False while it is put aside, and at first.
        last_answer: the time of its last answer; at first, that of our beginning.
        failures: in a row, of which `last_error` was the last.
    """

    def __init__(self, url: str, concurrency: int, client: Client):
        self.url = url.rstrip("/")
        self.concurrency = concurrency
        self.client = client
        self.api = client.connection(self.url if self.url.endswith("/v1") else f"{self.url}/v1", _TRIES)
        self.model = client.spec.requests.model or ""
        self.form: Form | None = None
        self.is_up = False
        self.last_answer = time.monotonic()
        self.failures = 0
        self.last_error = ""
        self._gate = asyncio.Lock()

    async def ask(self, question: Question) -> Tokens:
        """Return the tokens of its answer; raises as `Client.complete` and `Client.tokens`."""
        assert self.form is not None  # it has been up
        try:
            return await self._tokens(self.form, question)
        except RefusedError as error:
            if error.about_question:
                raise
            raise PassingError(str(error)) from None  # it took others before

    async def _tokens(self, form: Form, question: Question) -> Tokens:
        completion = await self.client.complete(self.api, self.model, form, question)
        self.failures = 0
        self.last_answer = time.monotonic()
        return self.client.tokens(completion, question, form)

    def failed(self, error: PassingError) -> None:
        """Count a failure; after several in a row, or if it cannot be reached, the server is put aside."""
        self.failures += 1
        self.last_error = str(error)
        if self.is_up and (error.unreachable or self.failures >= FAILURES_IN_A_ROW):
            self.is_up = False
            _log.warning("%s does not answer (%s); the others go on, and it is tried again.", self.url, error)

    async def ready(self, question: Question) -> None:
        """Wait until the server is up: one worker greets it, at growing intervals, while the others wait for that."""
        async with self._gate:
            delay = FIRST_DELAY
            while not self.is_up:
                await asyncio.sleep(delay * (0.5 + random.random() / 2))
                delay = min(2 * delay, LONGEST_DELAY)
                try:
                    await self.greet(question)
                except PassingError as error:
                    self.last_error = str(error)

    async def greet(self, question: Question) -> None:
        """Ask the server for a first answer, by its first model, in the best form that it takes.

        Raises:
            PassingError: it does not answer. BadInputError: it never will.
        """
        try:
            self.model = self.model or await self.client.first_model(self.api)
        except RefusedError as error:
            raise PassingError(str(error)) from None
        refused = []
        for form in self.client.forms(question.prompt) if self.form is None else [self.form]:
            try:
                await self._tokens(form, question)
            except RefusedError as error:
                refused.append(f"{form}: {error}")
                continue
            except DroppedError as error:
                if error.about_form:  # otherwise the answer to another question may be fine
                    refused.append(f"{form}: {error}")
                    continue
            if self.form is None:
                _log.info("%s (%s) is asked for %s", self.url, self.model, form)
            self.form = form
            self.is_up = True
            return
        if self.form is not None:
            raise PassingError("; ".join(refused))
        raise BadInputError(
            f"{self.url} cannot be asked in any way ({'; '.join(refused) or 'there is none'}). Raw text needs "
            "completions; top_k, min_p, repetition_penalty and template need a server that knows them, such as vLLM."
        )


@dataclass
class _ChatJob:
    """A conversation with a prompt: the answers so far, and the attempts that failed, the last one by `last_error`."""

    index: int
    turns: list[Tokens] = field(default_factory=list)
    failures: int = 0
    last_error: str = ""


class _ServerRun:
    """The prompts on their way to the servers and back, and the answers that are not on the disk yet.

    Attributes:
        longest: tokens of a later question, after which a conversation ends.
        number: of the journal's next file.
        jobs: the conversations that have begun and not ended.
        unanswered: those that failed too often.
    """

    def __init__(
        self, client: Client, prompts: Sequence[Prompt], longest: int, journal: Journal, number: int, advance: Advance
    ):
        self.client = client
        self.requests = client.spec.requests
        self.prompts = prompts
        self.longest = longest
        self.journal = journal
        self.number = number
        self.advance = advance
        self.jobs: dict[int, _ChatJob] = {}
        self.unanswered: list[_ChatJob] = []
        self.waiting: list[Answer] = []
        self.tokens = 0
        self.started = time.perf_counter()

    async def answer(self, indices: Sequence[int]) -> None:
        """Ask these prompts, the longest first, each until it is answered once or has failed too often."""
        servers = [
            _Server(server.url, server.concurrency or self.requests.concurrency, self.client)
            for server in self.client.spec.servers or ()
        ]
        self.queue = asyncio.Queue[int]()
        for index in indices:
            self.queue.put_nowait(index)
        # The shortest prompt greets them: a long one may be refused for its length.
        shortest = self.prompts[indices[-1]]
        greeting = self.client.question(indices[-1], shortest, (), shortest.tokens)
        await _greet_all(servers, greeting)
        forever = [self._work(server, greeting) for server in servers for _ in range(server.concurrency)]
        forever += [self._write_often(), self._be_patient(servers)]
        tasks = [asyncio.create_task(task) for task in (self.queue.join(), *forever)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:  # the first has ended, or another one has raised
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._write()
            for server in servers:
                with suppress(Exception):
                    await server.api.close()

    async def _be_patient(self, servers: Sequence[_Server]) -> None:
        """Raise BadInputError when no server has answered for too long."""
        patience, timeout = self.requests.patience, self.requests.timeout
        while True:
            await asyncio.sleep(min(1.0, patience))
            since = time.monotonic() - max(server.last_answer for server in servers)
            # One that is not put aside may still be at work on an answer, for as long as that may take.
            if since > patience + timeout * any(server.is_up for server in servers):
                said = "; ".join(f"{server.url}: {server.last_error or 'no answer'}" for server in servers)
                raise BadInputError(f"no server has answered for {patience:g} s (data.requests.patience): {said}.")

    async def _work(self, server: _Server, greeting: Question) -> None:
        """Ask the server one prompt after the other, for ever."""
        while True:
            await server.ready(greeting)
            index = await self.queue.get()
            await self._converse(server, self.jobs.setdefault(index, _ChatJob(index)))
            self.queue.task_done()

    async def _converse(self, server: _Server, job: _ChatJob) -> None:
        """Ask until the conversation ends, or an attempt fails: then it goes back to the queue."""
        prompt, tokenizer = self.prompts[job.index], self.client.tokenizer
        try:
            while (tokens := next_question(prompt, job.turns, tokenizer, self.longest)) is not None:
                job.turns.append(await server.ask(self.client.question(job.index, prompt, job.turns, tokens)))
            answer = Answer(job.index, tuple(job.turns))
        except DroppedError as error:
            answer = Answer(job.index, dropped=str(error))
        except RefusedError as error:
            _log.warning("%s is dropped: the server refuses it (%s)", prompt.id, error)
            answer = Answer(job.index, dropped="refused")
        except PassingError as error:
            server.failed(error)
            # That a server is gone is no fault of the prompt's.
            job.failures += not error.unreachable
            job.last_error = str(error)
            if job.failures < self.requests.retries:
                self.queue.put_nowait(job.index)
            else:
                self.unanswered.append(self.jobs.pop(job.index))
            return
        del self.jobs[job.index]
        self.waiting.append(answer)
        if len(self.waiting) >= ANSWERS_OF_A_FILE:
            self._write()
        self.tokens += sum(map(len, answer.turns))
        self.advance(1, f"{self.tokens / (time.perf_counter() - self.started):,.0f} tokens/s")

    async def _write_often(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_FILES)
            self._write()

    def _write(self) -> None:
        if self.waiting:
            self.journal.add(self.number, sorted(self.waiting, key=lambda answer: answer.index))
            self.number += 1
            self.waiting = []


async def _greet_all(servers: Sequence[_Server], question: Question) -> None:
    """Greet each of them; at least one must be reached now, for a URL may be mistyped."""
    errors = await asyncio.gather(*(server.greet(question) for server in servers), return_exceptions=True)
    for error in errors:
        if isinstance(error, BaseException) and not isinstance(error, PassingError):
            raise error
    if all(isinstance(error, PassingError) and error.unreachable for error in errors):
        lines = "; ".join(f"{server.url}: {error}" for server, error in zip(servers, errors, strict=True))
        raise BadInputError(f"none of data.servers answers: {lines}. Are they running there?")
    for server, error in zip(servers, errors, strict=True):
        if error is not None:
            _log.warning("%s does not answer (%s); the others begin without it.", server.url, error)
