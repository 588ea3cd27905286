"""The target's own responses: what a drafter learns to predict.

A run is identified by what decides its text (target, prompts, sampling, length), not by how it was batched or by how
many processes answered. Each finished batch becomes one file in `<folder>.partial/` (`unfinished`), so that an
interrupted run continues; the finished data set (`data_set`) appears at once. Who answers is our own decoder
(`decoding`), or servers (`servers`).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console

from ..common import BadInputError, IncompatibleError
from ..common.atomic import keeping, writing
from ..common.digests import digest_json
from ..common.locks import locked
from ..common.process_group import LaunchGroup
from ..common.progress import progress
from ..common.runtime import versions
from ..recipes import DataSpec, Recipe
from ..targets import Fingerprint, Target, config_only_target
from ..targets.sharding import processes
from .client import read_key, require_client
from .collect import gather
from .conversation import Supervised, given_sequences, sequences, why_ended
from .data_set import ROUNDS, SCHEMA_VERSION, TrainingRow, provenance, require_whole, save_data_set
from .decoding import Answering, answer_all, batches
from .depths import along
from .launched import launch_group, one_leads
from .prompts import Collection, digest_prompts
from .resume_store import LONGEST_QUESTION, Answer, Answers, Identity, RemainingWork, Unfinished
from .servers import answer_by_servers
from .sources import check_sources
from .table import Prompt, PromptTable

_EMPTY = "empty"  # the target ended at once
_UNLEARNABLE = "unlearnable"  # of an answer that came with its prompt, the template or the length leaves nothing
_DROPPED = "_responses"  # ends the names of what is counted

_log = logging.getLogger(__name__)


def distill(recipe: Recipe, target: Target | None = None, console: Console | None = None) -> Path:
    """Let the target answer the recipe's prompts, and return the folder of the data set, `<output>/data`.

    A finished folder of the same target, prompts and sampling is used as it is; an unfinished one is continued. Where a
    launcher started several processes, all of them call this, and all answer.

    Args:
        target: loaded from the recipe if None, without its weights where somebody else answers.
        console: shows progress if it is a terminal.

    Raises:
        BadInputError: no prompts (names the source), prompts that leave no room for a response, a folder made with
            other settings (names them), one whose files were altered (names them), a full disk, another process that
            writes there.
        IncompatibleError: `data.responses` were tokenized differently.
        PeerError: another process of the launch failed; it says why.
    """
    spec = recipe.data
    if spec.responses is None:
        check_sources(spec.prompts)
    if spec.servers is not None:
        require_client()
        read_key(spec.requests.key)
    target = target or _target_of(recipe)
    folder = data_folder(recipe)
    with launch_group(recipe.output_folder) as group:
        if spec.responses is not None:
            return Path(group.on_main("given", lambda: str(_given(folder, target))))
        # All processes read the prompts: those that only take part in passes need them as little as they harm.
        found = gather(recipe, target.require_tokenizer(), console, recipe.output_folder, warn=group.is_main)
        run = _ResponsesBuilder(folder, spec, target, found, group)
        run.make(locked(recipe.output_folder) if group.is_main else nullcontext(), console)
    return folder


def _target_of(recipe: Recipe) -> Target:
    """Return the recipe's target: on the device where it answers, or without weights where nobody asks it."""
    spec, values = recipe.data, recipe.target.model_dump()
    if spec.servers is None and spec.answers == "target" and spec.responses is None:
        return Target.load(**values, device=PartialState().device if processes() > 1 else None)
    del values["sharding"]  # there is nothing to share
    return config_only_target(**values)


def data_folder(recipe: Recipe) -> Path:
    """Return the folder where the recipe's responses are, or will be."""
    return (
        Path(recipe.data.responses).expanduser() if recipe.data.responses is not None else recipe.output_folder / "data"
    )


class _ResponsesBuilder:
    """One data set in the making."""

    def __init__(self, folder: Path, spec: DataSpec, target: Target, found: Collection, group: LaunchGroup):
        self.folder, self.partial = folder, Unfinished(folder.with_name(folder.name + ".partial"))
        self.spec, self.target, self.found, self.group = spec, target, found, group
        self.prompts: Sequence[Prompt] = found.prompts

    def make(self, alone: AbstractContextManager[None], console: Console | None) -> None:
        """Answer what is missing, with the other processes, and write the data set, on the main one.

        Args:
            alone: what the main process holds meanwhile.
        """
        with alone:
            said = self.group.on_main("work", self._open)
            if not said:
                return
            work = RemainingWork(**json.loads(said))
            self._require_same_prompts(work)
            with keeping(self._kept), writing(self.folder):
                self._answer(work, console)
                self.group.barrier("answered")
                self.group.on_main("written", self._write)

    # ------------------------------------------------------------ what is there

    def _open(self) -> str:
        """Return the work that is left; "" if the data set is there. One made differently is never overwritten."""
        digest = digest_prompts(self.prompts, self._is_given)
        self.identity = Identity(self.target.fingerprint(), digest, self._sampling(), self._who_answers())
        if self._finished():
            return ""
        self._check_room()
        with keeping(self._kept), writing(self.folder):
            self.partial.open(self.identity)
        answered = Answers(self.partial.files(), len(self.prompts))
        missing = [] if self._is_given else [i for i in self._longest_first() if i not in answered]
        at_work = 1 if self.target.sharded else self.group.size
        return RemainingWork(
            digest, self.partial.next_number(), batches(missing, self.spec.batch_size, at_work)
        ).to_json()

    def _sampling(self) -> dict[str, Any]:
        """Return how answers are drawn, and how long questions and answers may be."""
        found = {**self.spec.sampling.model_dump(), "max_new_tokens": self.spec.max_new_tokens}
        # Of a single question the prompts say it all; a conversation ends by it, and so do rows with their answers.
        decides = self._is_given or any(prompt.later for prompt in self.prompts)
        return found | ({LONGEST_QUESTION: self.spec.max_prompt_tokens} if decides else {})

    def _who_answers(self) -> dict[str, Any] | None:
        if self._is_given:
            return {"given": True}
        return None if self.spec.servers is None else {"model": self.spec.requests.model}

    def _finished(self) -> bool:
        if not self.folder.exists():
            return False
        saved = provenance(self.folder)
        require_whole(self.folder, saved)
        self.identity.require_same(self.folder, saved)
        self.partial.remove()  # of a run that was killed just before it did so
        return True

    def _longest_first(self) -> list[int]:
        """Return the prompts by length: equal ones side by side, and the batch that needs most memory first."""
        lengths = self._lengths()
        return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def _lengths(self) -> list[int]:
        """Return the numbers of the prompts' tokens; a table knows them without reading the prompts."""
        if isinstance(self.prompts, PromptTable):
            return [int(length) for length in self.prompts.lengths]
        return [len(prompt.tokens) for prompt in self.prompts]

    def _check_room(self) -> None:
        limit, longest = self.target.max_context, max(self._lengths())
        if limit is not None and longest + self.spec.max_new_tokens > limit:
            raise BadInputError(
                f"the longest prompt has {longest} tokens; with data.max_new_tokens={self.spec.max_new_tokens} it "
                f"exceeds the target's context of {limit}. "
                "Lower data.max_prompt_tokens or data.max_new_tokens."
            )

    @property
    def _is_given(self) -> bool:
        """Whether the answers came with the prompts."""
        return self.spec.answers == "given"

    def _require_same_prompts(self, work: RemainingWork) -> None:
        if (
            not self.group.is_main
            and not self.target.sharded
            and digest_prompts(self.prompts, self._is_given) != work.prompts
        ):
            raise BadInputError(
                f"process {self.group.rank} reads other prompts than process 0: the files of data.prompts must be the "
                "same on all machines."
            )

    def _kept(self) -> str:
        """Return a sentence about what is there if the run ends now."""
        if self.partial.is_empty():
            return "No responses were kept."
        return f"The responses finished so far are kept in {self.partial.folder}."

    # ------------------------------------------------------------ answers, and the data set of them

    def _answer(self, work: RemainingWork, console: Console | None) -> None:
        left = sum(map(len, work.batches))
        with (
            one_leads(self.group, self.target),
            progress(console, "target answers", len(self.prompts), len(self.prompts) - left) as advance,
        ):
            if self.spec.servers is not None:
                if self.group.is_main:
                    answer_by_servers(self.target, self.prompts, self.spec, work, self.partial, advance)
            elif not self.target.sharded or self.group.is_main:
                group = LaunchGroup() if self.target.sharded else self.group
                answering = Answering.of(self.target, self.prompts, self.spec)
                answer_all(answering, work, self.partial, group, advance)

    def _write(self) -> str:
        """Write the data set beside its place, then move it there."""
        answers, counts = Answers(self.partial.files(), len(self.prompts)), Counter[str]()
        name = digest_json(self.identity.to_dict())[:16]
        save_data_set(
            self.folder,
            self._rows(answers, counts),
            self.partial.folder,
            lambda: self._provenance(counts, answers.drafters),
            name,
            with_depths=bool(answers.drafters),
        )
        self.partial.remove()
        return str(self.folder)

    def _rows(self, answers: Answers, counts: Counter[str]) -> Iterator[TrainingRow]:
        """Yield what is learnt, in the order of the prompts, and count it."""
        for index, prompt in enumerate(self.prompts):
            answer = Answer(index) if self._is_given else answers[index]
            reason, learnt = self._given(prompt) if self._is_given else self._learnt(prompt, answer)
            self._count_early_end(prompt, answer, counts)
            if reason:
                counts[f"{reason}{_DROPPED}"] += 1
            for (tokens, mask), depths in zip(learnt, _depths(learnt, answer), strict=True):
                counts["sequences"] += 1
                counts["response_tokens"] += sum(mask)
                counts["prompt_tokens"] += len(mask) - sum(mask)
                yield TrainingRow(prompt.id, prompt.suite, tokens, mask, prompt.content, depths)
        self._say_what_is_dropped(counts)

    def _learnt(self, prompt: Prompt, answer: Answer) -> tuple[str, list[Supervised]]:
        """Return what is learnt of the target's answers to a prompt, or the name of the reason why nothing is."""
        ending = self.target.eos_ids
        is_empty = all(t in ending for turn in answer.turns for t in turn)
        reason = answer.dropped or _EMPTY * is_empty
        return reason, [] if reason else sequences(prompt, answer.turns, self.target.require_tokenizer())

    def _count_early_end(self, prompt: Prompt, answer: Answer, counts: Counter[str]) -> None:
        why = why_ended(prompt, answer.turns, self.target.require_tokenizer())
        if why:
            counts[f"conversations_ended_by_{why}"] += 1

    def _given(self, prompt: Prompt) -> tuple[str, list[Supervised]]:
        """Return what is learnt of the answers that came with a prompt, as `_learnt` does."""
        longest = self.spec.max_prompt_tokens + self.spec.max_new_tokens
        try:
            found = given_sequences(prompt, self.target.require_tokenizer(), longest)
        except BadInputError as error:
            _log.debug("%s", error)
            found = []
        return "" if found else _UNLEARNABLE, found

    def _say_what_is_dropped(self, counts: Counter[str]) -> None:
        dropped = {name: count for name, count in counts.items() if name.endswith(_DROPPED)}
        words = ", ".join(f"{name.removesuffix(_DROPPED)} {count}" for name, count in dropped.items())
        if counts[f"{_EMPTY}{_DROPPED}"] == len(self.prompts):
            raise BadInputError(
                f"all {len(self.prompts)} responses are empty: the target ends at once. First prompt: "
                f"{self.prompts[0].text[:200]!r}. Check its chat template."
            )
        if not counts["sequences"]:
            raise BadInputError(
                f"nothing can be learnt from the {len(self.prompts)} responses ({words}). Does the server have this "
                "target's tokenizer and chat template?"
            )
        if words:
            _log.warning("of %d responses some are left out: %s", len(self.prompts), words)

    def _provenance(self, counts: Counter[str], drafters: Counter[str]) -> dict[str, Any]:
        found = {**self.found.counts(), f"{_EMPTY}{_DROPPED}": 0, **counts}
        return {
            "schema_version": SCHEMA_VERSION,
            **self.identity.to_dict(),
            "source": {
                "target": self.target.source,
                "prompts": self.spec.model_dump()["prompts"],
                "limit": self.spec.limit,
            },
            "counts": found,
            "sources": self.found.by_source(),
            # Prompts for which each drafter speculated: the rounds are its own, the text is the target's.
            **({ROUNDS: dict(drafters)} if drafters else {}),
            "versions": versions("outrider", "torch", "transformers", "datasets"),
        }


def _depths(learnt: Sequence[Supervised], answer: Answer) -> Sequence[list[int] | None]:
    """Return the depths at which rounds of decoding reached the tokens of each row; None where nobody drafted."""
    return along([mask for _, mask in learnt], answer.rounds) if learnt and answer.rounds else [None] * len(learnt)


def _given(folder: Path, target: Target) -> Path:
    """Return a folder that the recipe names, checked: responses of another target with the same tokens are allowed."""
    whole = provenance(folder)
    require_whole(folder, whole)
    saved = whole["target"]
    differences = Fingerprint.from_dict(saved).differences(target.fingerprint())
    if "tokenizer" in differences:
        raise IncompatibleError(
            f"the responses in {folder} were written with another tokenizer than this target's; distill new ones "
            "(leave out data.responses)."
        )
    if differences:
        _log.warning(
            "the responses in %s come from a target that differs in: %s. A drafter learns best from its own target's.",
            folder,
            "; ".join(differences),
        )
    return folder
