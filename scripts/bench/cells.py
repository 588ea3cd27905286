"""Everything that one context length and one batch size show: parts of a round, whole loops in turns, overhead, gaps.

All rows are ragged by up to 3 tokens, and all loops write the same tokens: the plain target's own. Drafters propose
them by force (`forced.py`), so that their speed is known at any acceptance. What does not fit in memory is written
down as that, and the rest goes on.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan
from outrider.eval.bandwidth import Bandwidth, Floor, weight_bytes
from outrider.eval.costs import draft_times, verify_times
from outrider.heads import Drafter, DraftModel, Ngram
from outrider.targets import Target

from .forced import Forced, forced_assistant, make_script
from .gaps import profile
from .loops import Loop, Ours, Texts, Theirs, Timed, assist, take_turns
from .overhead import loop_overhead, of_parts

Result = TypeVar("Result")


@dataclass(frozen=True)
class CellSettings:
    """What is measured in every cell.

    Attributes:
        depth: of chains. shares: acceptances that are forced, at each depth given the one before.
        new_tokens: of each row; one from the prompt, and 13 full rounds of depth 4. repeats: turns of the loops.
            cost_repeats: turns of single passes.
        widths: drafts beside the root in a pass of the target. seed: of what is accepted.
    """

    depth: int = 4
    shares: tuple[float, ...] = (1.0, 0.7)
    new_tokens: int = 66
    repeats: int = 3
    cost_repeats: int = 20
    widths: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16)
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "depth": self.depth,
            "forced_shares": list(self.shares),
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
            "cost_repeats": self.cost_repeats,
            "widths": list(self.widths),
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Cell:
    """One context length and batch size.

    Attributes:
        prompts: of the rows. repeated: whether they hold what follows them, so that a lookup finds it: acceptance
            forced through the prompt.
        drafters: that grow, by name. lookup: whether n-gram and prompt lookup take part.
    """

    target: Target
    drafters: dict[str, Drafter]
    prompts: Texts
    repeated: bool
    settings: CellSettings
    bandwidth: Bandwidth
    lookup: bool = True

    @property
    def batch(self) -> int:
        return len(self.prompts)

    @property
    def context(self) -> int:
        return max(map(len, self.prompts))

    def measure(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        found: dict[str, Any] = {"context": self.context, "batch": self.batch}
        found["verify"] = guarded(self._verify)
        found["draft_seconds"] = {
            name: guarded(partial(self._draft, drafter)) for name, drafter in self.drafters.items()
        }
        known = guarded(self._continuation)
        if isinstance(known, dict):
            return found | {"loops": known}
        loops = list(self._loops(known))
        found |= self._race(loops, [tokens[: self.settings.new_tokens] for tokens in known])
        found["floor"] = self._floor(found["loops"]["plain"].get("seconds_per_round"))
        found["loop_overhead"] = self._overheads(loops, found)
        found["gaps"] = {loop.name: self._gaps(loop, found["loops"][loop.name]) for loop in loops if _once(loop)}
        release(loops)
        return found

    def _continuation(self) -> Texts:
        """What the target writes, past the end of the last round."""
        loop = Ours("plain", Decoder(self.target), _chain(0), self.settings.new_tokens + self.settings.depth + 1)
        found = loop(self.prompts).tokens
        release([loop])
        return found

    # ------------------------------------------------------------ parts of a round

    def _verify(self) -> list[dict[str, Any]]:
        """T_verify(n) / T_verify(1), n tokens per row: the root and n − 1 drafts."""
        widths, taps = (
            sorted({0, self.settings.depth, *self.settings.widths}),
            next((d.taps for d in self.drafters.values() if d.taps), ()),
        )
        times = verify_times(self.target, widths, self.batch, self.context, self.settings.cost_repeats, taps)
        return [
            {"tokens": n + 1, "seconds": seconds, "over_one_token": seconds / times[0]} for n, seconds in times.items()
        ]

    def _draft(self, drafter: Drafter) -> list[float]:
        return draft_times(
            self.target, drafter, self.settings.depth, self.batch, self.context, self.settings.cost_repeats
        )

    def _floor(self, round_seconds: float | None) -> dict[str, Any]:
        """The floor of a plain step, and what of its time it is."""
        floor = Floor(weight_bytes(self.target), self.target.cache_bytes(self.batch, self.context), self.bandwidth)
        if not round_seconds:
            return floor.to_dict()
        shares = {"at_copy": floor.at_copy, "at_read": floor.at_read, "with_cache_at_read": floor.with_cache}
        return floor.to_dict() | {f"share_{name}": seconds / round_seconds for name, seconds in shares.items()}

    # ------------------------------------------------------------ whole loops

    def _loops(self, continuation: Texts) -> Iterator[Loop]:
        """All contestants, the plain target first; forced ones propose `continuation`."""
        target, new, plan = self.target, self.settings.new_tokens, _chain(self.settings.depth)
        texts = [list(prompt) + tokens for prompt, tokens in zip(self.prompts, continuation, strict=True)]
        scripts = {
            share: make_script(texts, share, target.vocab_size, self.settings.seed) for share in self.settings.shares
        }
        yield Ours("plain", Decoder(target), _chain(0), new)
        for name, drafter in self.drafters.items():
            decoder = Decoder(target, Forced(drafter))
            for share, script in scripts.items():
                yield Ours(
                    f"{name}, forced {share:g}", decoder, plan, new, {"forced acceptance": True, "share": share}, script
                )
        told = (
            {"forced acceptance": True, "through": "the prompt holds what follows it"}
            if self.repeated
            else {"forced acceptance": False}
        )
        if self.lookup:
            yield Ours("ngram", Decoder(target, Ngram()), plan, new, told)
        yield Theirs("transformers.generate", target, new)
        if self.batch > 1:
            return  # transformers drafts for one row only
        for drafter in self.drafters.values():
            if isinstance(drafter, DraftModel):
                yield from (self._assisted(drafter, share, script) for share, script in scripts.items())
        if self.lookup:
            yield Theirs("transformers.prompt_lookup", target, new, lookup=self.settings.depth, told=told)

    def _assisted(self, drafter: DraftModel, share: float, script: Tensor) -> Theirs:
        return Theirs(
            f"transformers.assisted, forced {share:g}",
            self.target,
            self.settings.new_tokens,
            assist(drafter.model, self.settings.depth),
            around=partial(forced_assistant, drafter.model, script),
            told={"forced acceptance": True, "share": share},
        )

    def _race(self, loops: Sequence[Loop], plain: Texts) -> dict[str, Any]:
        """Return figures by loop; all take turns if there is memory for what each keeps, else one after the other."""
        tried = [guarded(partial(loop, self.prompts)) for loop in loops]
        if together := not any(isinstance(t, dict) for t in tried):
            runs: dict[str, list[Timed]] = {loop.name: [] for loop in loops}
            for loop, timed in take_turns(loops, self.prompts, self.settings.repeats):
                runs[loop.name].append(timed)
            found = {loop.name: loop.told | _figures(runs[loop.name], plain) for loop in loops}
        else:
            release(loops)
            found = {loop.name: loop.told | self._alone(loop, plain) for loop in loops}
        return {"interleaved": together, "loops": found}

    def _alone(self, loop: Loop, plain: Texts) -> dict[str, Any]:
        runs = guarded(lambda: [loop(self.prompts) for _ in range(1 + self.settings.repeats)])
        release([loop])
        return runs if isinstance(runs, dict) else _figures(runs[1:], plain)

    # ------------------------------------------------------------ around the passes

    def _overheads(self, loops: Sequence[Loop], found: dict[str, Any]) -> dict[str, Any]:
        """Of loops whose rounds are all alike: plain, and full acceptance."""
        alike: list[Ours] = [
            loop for loop in loops if isinstance(loop, Ours) and (loop.name == "plain" or loop.told.get("share") == 1.0)
        ]
        if self.target.device.type == "cuda":
            return {loop.name: self._of_parts(loop, found) for loop in alike}
        return {loop.name: guarded(partial(self._overhead, loop)) for loop in alike}

    def _overhead(self, loop: Ours) -> dict[str, Any]:
        return loop_overhead(loop, [self.prompts], self.settings.repeats).to_dict()

    def _of_parts(self, loop: Ours, found: dict[str, Any]) -> dict[str, Any] | None:
        depth, seconds = loop.plan.depth, found["loops"][loop.name].get("seconds_per_round")
        drafts = found["draft_seconds"].get(loop.name.partition(",")[0], [0.0])
        passes = {row["tokens"]: row["seconds"] for row in found["verify"]} if isinstance(found["verify"], list) else {}
        if seconds is None or isinstance(drafts, dict) or 1 + depth not in passes:
            return None
        return of_parts(seconds, [drafts[depth], passes[1 + depth]])

    def _gaps(self, loop: Loop, figures: dict[str, Any]) -> dict[str, Any] | None:
        if "error" in figures:
            return None
        gaps = guarded(partial(profile, loop, self.prompts, self.target.device.type))
        loop.release()
        return gaps if gaps is None or isinstance(gaps, dict) else gaps.to_dict(figures["seconds_per_round"])


def _chain(depth: int) -> Any:
    return Plan(depth)


def _once(loop: Loop) -> bool:
    """One acceptance of each kind is enough for a profile."""
    return loop.told.get("share", 1.0) == 1.0


def _figures(runs: Sequence[Timed], plain: Texts) -> dict[str, Any]:
    """Medians over the repeats. Steady: all steps but the first, which read the prompt."""
    first = runs[0]
    total, steady = statistics.median([r.seconds for r in runs]), statistics.median([r.steady_seconds for r in runs])
    useful = first.steady_rounds > 0
    return {
        "tokens_per_second": sum(map(len, first.tokens)) / total,
        "steady_tokens_per_second": first.steady_tokens / steady if useful else None,
        "seconds_per_round": steady / first.steady_rounds if useful else None,
        "tau": first.tau if useful else None,
        "rounds": first.rounds,
        "seconds": [round(r.seconds, 6) for r in runs],
        "steady_seconds": [round(r.steady_seconds, 6) for r in runs] if useful else None,
        "identical_to_plain": sum(a == b for a, b in zip(first.tokens, plain, strict=True)),
    }


def guarded(work: Callable[[], Result]) -> Result | dict[str, str]:
    """Return the result of `work`, or what was missing: too little memory, as the decoder says before it begins."""
    try:
        return work()
    except (torch.OutOfMemoryError, BadInputError) as error:
        return {"error": str(error).splitlines()[0]}
    finally:
        free_memory()


def release(loops: Sequence[Loop]) -> None:
    """Free what loops keep from call to call."""
    for loop in loops:
        loop.release()
    free_memory()


def free_memory() -> None:
    """What is not used any more goes back to the GPU, where the next part may need all of it."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
