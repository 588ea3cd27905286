"""Showing text while it is generated: tokens to text, and what the drafter contributed to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..common import BadInputError
from ..decode import Decoder, Plan, Sampling, StreamEvent
from ..distill.conversation import render
from ..heads import Drafter
from ..targets import Target
from ..targets.tokenizers import TextStream

DRAFTED, OWN = "green", "magenta"


@dataclass
class Tally:
    """The counts and the seconds of a stream, without the time in which its text is shown.

    The first event is the prefill's token, which belongs to no round.
    """

    tokens: int = 0
    events: int = 0
    seconds: float = 0.0

    @property
    def rounds(self) -> int:
        return max(0, self.events - 1)

    @property
    def tau(self) -> float:
        """Mean tokens that a round emitted; nan without rounds."""
        return (self.tokens - 1) / self.rounds if self.rounds else float("nan")

    def watch(self, events: Iterator[StreamEvent]) -> Iterator[StreamEvent]:
        """Pass `events` on, counting and timing them."""
        while True:
            began = time.perf_counter()
            event = next(events, None)
            self.seconds += time.perf_counter() - began
            if event is None:
                return
            self.events += 1
            self.tokens += len(event.tokens)
            yield event


@dataclass
class StreamedCompletion:
    """One prompt completed with a drafter, and what that amounted to."""

    target: Target
    drafter: Drafter
    plan: Plan
    sampling: Sampling
    max_new_tokens: int
    tally: Tally = field(default_factory=Tally)
    prompt: list[int] = field(default_factory=list)
    template: Mapping[str, Any] = field(default_factory=dict)

    def stream(self, prompt: str, chat: bool = False) -> Iterator[tuple[str, bool]]:
        """Yield `(text, was it drafted)` as it comes."""
        tokenizer = self.target.require_tokenizer()
        self.prompt = prompt_tokens(tokenizer, prompt, chat, self.template)
        decoder = Decoder(self.target, self.drafter)
        # The first calls are slow, and no part of the figures.
        decoder.generate([self.prompt], min(8, self.max_new_tokens), self.sampling, self.plan)
        events = decoder.stream(self.prompt, self.max_new_tokens, self.sampling, self.plan)
        yield from pieces(self.tally.watch(events), TextStream(tokenizer, self.prompt))

    def show(self, prompt: str, chat: bool, compare: bool, console: Console) -> None:
        """Print it in two colours, a prompt that is continued before its continuation, and the figures.

        `compare` runs the plain target on the same prompt for the speedup.
        """
        console.print(Text("" if chat else prompt, style="dim"), end="")
        for piece, drafted in self.stream(prompt, chat):
            console.print(Text(piece, style=DRAFTED if drafted else OWN), end="")
        console.print()
        tally = self.tally
        rate = tally.tokens / tally.seconds if tally.seconds else float("nan")
        rounds = f"{tally.tokens} tokens in {tally.rounds} rounds"
        line = f"τ {tally.tau:.2f} ({self.plan.within(self.max_new_tokens)}) · {rounds} · {rate:.0f} tokens/s"
        if compare:
            stats = Decoder(self.target).generate([self.prompt], self.max_new_tokens, self.sampling).stats
            plain = stats.tokens_per_second
            line += f" · plain {plain:.0f} tokens/s · {rate / plain:.2f}× (one run; `outrider eval` measures)"
        console.print(Text(line, style="dim"))


def pieces(events: Iterator[StreamEvent], text: TextStream) -> Iterator[tuple[str, bool]]:
    """Yield `(text, was it drafted)` in the order of the tokens."""
    for event in events:
        for i, token in enumerate(event.tokens):
            if new := text.push(token):
                yield new, i < event.accepted
    if rest := text.flush():
        yield rest, False


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool, template: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the prompt as ids: raw text, or one user turn through the chat template with its arguments."""
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise BadInputError(
            "--chat: this target's tokenizer has no chat template; leave --chat out to continue the text as it is."
        )
    turns: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    return list(tokenizer(render(tokenizer, turns, "--chat", template=template), add_special_tokens=False)["input_ids"])
