"""Answers by OpenAI-compatible servers: a fleet of them, of which any may fail, be busy, or come back.

Each server is asked by as many workers as it may work on requests at once. They take prompts from one queue, so that a
fast server answers more of them, and no more are read than are asked: a slow fleet slows down the reading, and memory
stays flat. A prompt whose attempt failed returns to the queue, for any server. A server that fails again and again is
put aside, and looked at until it answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ..common import BadInputError
from ..recipes import DataSpec
from ..targets import Target
from .client import Asker, DroppedError, Form, PassingError, Question, RefusedError, Tokens, openai, require_client
from .conversation import next_question
from .decoding import Advance, fits
from .resume_store import Answer, RemainingWork, Unfinished
from .table import Prompt

SECONDS_BETWEEN_FILES, ANSWERS_OF_A_FILE = 5.0, 256
FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0
FAILURES_IN_A_ROW = 8  # after which a server is put aside; at once, if it cannot be reached
_ATTEMPTS_AT_A_FORM = 3

_log = logging.getLogger(__name__)


def answer_by_servers(
    target: Target,
    prompts: Sequence[Prompt],
    spec: DataSpec,
    work: RemainingWork,
    partial: Unfinished,
    advance: Advance,
) -> None:
    """Let the servers answer what is left.

    Raises:
        BadInputError: none of them answers, or not any more; they refuse us; or some prompts could not be answered. All
            answers are kept.
    """
    require_client()
    with_raw = any(prompt.messages is None for prompt in prompts)
    asker = Asker(spec, target.require_tokenizer(), target.eos_ids, with_raw, target.vocab_size)
    fleet = Fleet(asker, prompts, target.max_context, Journal(partial, work.begin), advance)
    fleet.answer([index for batch in work.batches for index in batch])


@dataclass
class ChatJob:
    """A conversation with a prompt.

    Attributes:
        turns: what was answered so far.
        failures: attempts that failed, of which `last` was the last.
    """

    index: int
    turns: list[Tokens] = field(default_factory=list)
    failures: int = 0
    last: str = ""


class Journal:
    """What was answered, written to the disk every few seconds."""

    def __init__(self, partial: Unfinished, begin: int):
        self.partial, self.number = partial, begin
        self.waiting: list[Answer] = []

    def add(self, answer: Answer) -> None:
        """Keep an answer."""
        self.waiting.append(answer)
        if len(self.waiting) >= ANSWERS_OF_A_FILE:
            self.write()

    def write(self) -> None:
        """Write what is waiting."""
        if self.waiting:
            self.partial.keep(self.number, sorted(self.waiting, key=lambda answer: answer.index))
            self.number, self.waiting = self.number + 1, []

    async def now_and_then(self) -> None:
        """Write every few seconds, for ever."""
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_FILES)
            self.write()


class Queue:
    """Prompts that nobody asks at present: those that came back first, then the next fresh one."""

    def __init__(self, indices: Sequence[int]):
        self.fresh, self.returned, self.left = iter(indices), deque[ChatJob](), len(indices)
        self.changed = asyncio.Condition()

    async def take(self) -> ChatJob:
        """Return the next one; where all are being asked, wait for one that comes back."""
        async with self.changed:
            while True:
                job = self.returned.popleft() if self.returned else next(map(ChatJob, self.fresh), None)
                if job is not None:
                    return job
                await self.changed.wait()

    async def put_back(self, job: ChatJob) -> None:
        """Let somebody else ask it."""
        async with self.changed:
            self.returned.append(job)
            self.changed.notify_all()

    async def end_one(self) -> None:
        """Say that one needs no further attempt."""
        async with self.changed:
            self.left -= 1
            if not self.left:
                self.changed.notify_all()

    async def ended(self) -> None:
        """Wait until none needs a further attempt."""
        async with self.changed:
            await self.changed.wait_for(lambda: not self.left)


class Health:
    """How a server is doing.

    Attributes:
        up: set while it answers. last_answer: when it last did; at first, when we began.
        failures: in a row, of which `last` was the last.
    """

    def __init__(self) -> None:
        self.up, self.last_answer, self.failures, self.last = asyncio.Event(), time.monotonic(), 0, ""
        self._not_before = 0.0

    def answered(self) -> None:
        """Note an answer."""
        self.failures, self.last_answer = 0, time.monotonic()

    def failed(self, error: PassingError, message: str) -> bool:
        """Note a failure, and tell whether the server is put aside for it: one too many in a row."""
        self.failures, self.last = self.failures + 1, message
        self._not_before = max(self._not_before, time.monotonic() + error.after)
        if not self.up.is_set() or not (error.unreachable or self.failures >= FAILURES_IN_A_ROW):
            return False
        self.up.clear()
        return True

    async def pause(self) -> None:
        """Wait until it answers, and a while after a failure: longer after each, by chance, so that nobody crowds."""
        await self.up.wait()
        if self.failures:
            await asyncio.sleep(_delay(self.failures) * random.random())
        await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))


class Server:
    """One server.

    Attributes:
        form: how it is asked; None before its first answer.
    """

    def __init__(self, url: str, concurrency: int, asker: Asker):
        self.url, self.concurrency, self.asker, self.health = url.rstrip("/"), concurrency, asker, Health()
        requests = asker.spec.requests
        base = self.url if self.url.endswith("/v1") else f"{self.url}/v1"
        # The client's own further attempts would hide failures from us.
        self.client = openai.AsyncOpenAI(
            base_url=base, api_key=asker.key or "none", timeout=requests.timeout, max_retries=0
        )
        self.model = requests.model or ""
        self.form: Form | None = None

    def failed(self, error: PassingError) -> None:
        """Note a failure; after several in a row, the server is put aside."""
        if self.health.failed(error, str(error)):
            last = self.health.last
            _log.warning("%s does not answer (%s); the others go on, and it is tried again.", self.url, last)

    async def ask(self, question: Question) -> Tokens:
        """Return the tokens of its answer.

        Raises:
            PassingError, RefusedError, DroppedError, BadInputError: see `asking`.
        """
        assert self.form is not None  # it has been up
        try:
            said = await self.asker.ask(self.client, self.model, self.form, question)
        except BadInputError as error:
            raise BadInputError(f"{self.url}: {error} {self._about_key()}") from None
        self.health.answered()
        return self.asker.tokens(said, question, self.form)

    async def watch(self, question: Question) -> None:
        """Look at the server, whenever it is put aside, until it answers."""
        attempts = 0
        while True:
            if self.health.up.is_set():
                attempts = 0
                await asyncio.sleep(FIRST_DELAY)
                continue
            try:
                await self.greet(question)
            except PassingError as error:
                self.health.last = str(error)
                attempts += 1
                await asyncio.sleep(_delay(attempts) * (0.5 + random.random() / 2))

    async def greet(self, question: Question) -> None:
        """Find out whether the server answers, and at first, which model it serves and how it is asked.

        Raises:
            PassingError: it does not answer. BadInputError: it never will.
        """
        try:
            if not self.model or self.form is not None:
                models = await self.client.models.list(timeout=30.0)
                self.model = self.model or str(models.data[0].id)
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise BadInputError(f"{self.url} refuses us: {self.asker.line(error)}. {self._about_key()}") from None
            if error.status_code >= 500 or not self.model:
                raise PassingError(f"HTTP {error.status_code}") from None
        except (openai.APIError, LookupError, AttributeError, TypeError, ValueError) as error:  # or what is no JSON
            raise PassingError(self.asker.line(error), unreachable=True) from None
        await (self._find_form(question) if self.form is None else self._ask_again(question))
        self.health.answered()
        self.health.up.set()

    async def _ask_again(self, question: Question) -> None:
        """Ask a server that was put aside: that it lists its models does not say that it answers.

        Raises:
            PassingError: it does not.
        """
        try:
            await self._try(question)
        except (RefusedError, DroppedError) as error:
            raise PassingError(str(error)) from None

    async def _find_form(self, question: Question) -> None:
        """Take the best way to ask that the server understands."""
        refused = []
        for form in self.asker.forms(question.prompt):
            self.form = form
            try:
                await self._try(question)
            except (RefusedError, DroppedError) as error:
                refused.append(f"{self.form}: {error}")
            except PassingError:
                self.form = None  # nothing is known yet
                raise
            else:
                _log.info("%s (%s) is asked for %s", self.url, self.model, self.form)
                return
        raise BadInputError(
            f"{self.url} cannot be asked in any way ({'; '.join(refused) or 'there is none'}). Raw text needs "
            "completions; top_k, min_p, repetition_penalty and template need a server that knows them, such as vLLM."
        )

    async def _try(self, question: Question) -> None:
        for attempt in range(_ATTEMPTS_AT_A_FORM):
            try:
                await self.ask(question)
                return
            except PassingError as error:
                if error.unreachable or attempt + 1 == _ATTEMPTS_AT_A_FORM:
                    raise
            except DroppedError as error:
                if error.about_form:
                    raise
                return  # of another question it may be fine

    def _about_key(self) -> str:
        requests = self.asker.spec.requests
        return f"The key is read from ${requests.key}, which is {'set' if self.asker.key else 'not set'}."


def _delay(failures: int) -> float:
    return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(failures, 20))


class Fleet:
    """All servers, and the prompts that they answer."""

    def __init__(
        self, asker: Asker, prompts: Sequence[Prompt], max_context: int | None, kept: Journal, advance: Advance
    ):
        self.asker, self.prompts, self.max_context, self.kept = asker, prompts, max_context, kept
        self.unanswered: list[ChatJob] = []
        self.tokens, self.started = 0, time.perf_counter()
        self.advance = advance

    def answer(self, indices: Sequence[int]) -> None:
        """Ask these prompts, each until it is answered once.

        Raises:
            BadInputError: no server answers, or some prompts could not be answered; the others are kept.
        """
        if indices:
            asyncio.run(self._answer(indices))
        if self.unanswered:
            first = self.unanswered[0]
            raise BadInputError(
                f"{len(self.unanswered)} prompts could not be answered in {self.asker.spec.requests.retries} attempts "
                f"each. The first is {self.prompts[first.index].id}: {first.last}. All the others are kept; run the "
                "same command again to ask these, or take them out of the prompts."
            )

    async def _answer(self, indices: Sequence[int]) -> None:
        spec = self.asker.spec
        servers = [
            Server(server.url, server.concurrency or spec.requests.concurrency, self.asker)
            for server in spec.servers or ()
        ]
        # The shortest prompt greets them: they come longest first, and a long one may be refused for its length.
        queue, first = Queue(indices), self._question(ChatJob(indices[-1]))
        await self._greet_all(servers, first)
        forever = [server.watch(first) for server in servers]
        forever += [self._work(server, queue) for server in servers for _ in range(server.concurrency)]
        forever += [self.kept.now_and_then(), self._be_patient(servers)]
        tasks = [asyncio.create_task(task) for task in (queue.ended(), *forever)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:  # the first has ended, or another one has raised
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.kept.write()
            for server in servers:
                with suppress(Exception):
                    await server.client.close()

    async def _greet_all(self, servers: Sequence[Server], question: Question) -> None:
        """Find out how each is asked; at least one must answer now, for a URL may be mistyped."""
        found = await asyncio.gather(*(server.greet(question) for server in servers), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, PassingError):
                raise error
        if all(isinstance(error, PassingError) and error.unreachable for error in found):
            lines = "; ".join(f"{server.url}: {e}" for server, e in zip(servers, found, strict=True))
            raise BadInputError(f"none of data.servers answers: {lines}. Are they running there?")
        for server, error in zip(servers, found, strict=True):
            if error is not None:
                _log.warning("%s does not answer (%s); the others begin without it.", server.url, error)

    async def _be_patient(self, servers: Sequence[Server]) -> None:
        """Raise BadInputError when no server has answered for too long.

        One that is not put aside may still be at work on an answer, for as long as that may take.
        """
        patience, timeout = self.asker.spec.requests.patience, self.asker.spec.requests.timeout
        while True:
            await asyncio.sleep(min(1.0, patience))
            since = time.monotonic() - max(server.health.last_answer for server in servers)
            at_work = any(server.health.up.is_set() for server in servers)
            if since > patience + timeout * at_work:
                raise BadInputError(
                    f"no server has answered for {patience:g} s (data.requests.patience): "
                    f"{'; '.join(f'{server.url}: {server.health.last}' for server in servers)}."
                )

    # ------------------------------------------------------------ one request at a time

    async def _work(self, server: Server, queue: Queue) -> None:
        """Ask the server one prompt after the other, for ever."""
        while True:
            await server.health.pause()
            job = await queue.take()
            if await self._converse(server, job):
                await queue.end_one()
            else:
                await queue.put_back(job)

    async def _converse(self, server: Server, job: ChatJob) -> bool:
        """Ask until the conversation ends or an attempt fails; tell whether it needs no further attempt."""
        try:
            while not await self._ask(server, job):
                pass
        except PassingError as error:
            return self._failed(server, job, error)
        except RefusedError as error:
            if not error.about_question:  # it took others before
                return self._failed(server, job, PassingError(str(error)))
            self._log_refusal(job, str(error))
            self._end(Answer(job.index, dropped="refused"))
        except DroppedError as error:
            self._end(Answer(job.index, dropped=str(error)))
        return True

    def _failed(self, server: Server, job: ChatJob, error: PassingError) -> bool:
        """Note an attempt that failed, and tell whether it was the last one."""
        server.failed(error)
        # That a server is gone is no fault of the prompt's.
        job.failures, job.last = job.failures + (not error.unreachable), str(error)
        if job.failures < self.asker.spec.requests.retries:
            return False
        self.unanswered.append(job)
        return True

    async def _ask(self, server: Server, job: ChatJob) -> bool:
        """Ask the next question of a conversation, and tell whether it was the last."""
        job.turns.append(await server.ask(self._question(job)))
        if self._tokens(job) is not None:
            return False
        self._end(Answer(job.index, tuple(job.turns)))
        return True

    def _question(self, job: ChatJob) -> Question:
        tokens = self._tokens(job)
        assert tokens is not None  # a job ends when nothing more is asked
        return Question.of(job.index, self.prompts[job.index], job.turns, tokens, self.asker)

    def _tokens(self, job: ChatJob) -> tuple[int, ...] | None:
        """Return the tokens of the next question; None if there is none, or no room for it."""
        prompt = self.prompts[job.index]
        if len(job.turns) > len(prompt.later):
            return None
        found = next_question(prompt, job.turns, self.asker.tokenizer, self.asker.spec.max_prompt_tokens)
        fitting = found is not None and fits(found, self.asker.spec.max_new_tokens, self.max_context)
        return found if fitting or not job.turns else None

    def _end(self, answer: Answer) -> None:
        self.kept.add(answer)
        self.tokens += sum(map(len, answer.turns))
        self.advance(1, f"{self.tokens / (time.perf_counter() - self.started):,.0f} tokens/s")

    def _log_refusal(self, job: ChatJob, message: str) -> None:
        _log.warning("%s is left out: the server refuses it (%s)", self.prompts[job.index].id, message)
