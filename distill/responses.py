"""Distilling from beginning to end: the recipe's prompts are read, answered, and written as a data set of responses.

A run is identified by what decides its text (target, prompts, sampling, length), not by how it was batched or by how
many processes answered. Each finished batch becomes one file in `<folder>.partial/` (`journal`), so that an interrupted
run continues; the finished data set (`data_set`) appears at once. Our own decoder answers (`decoding`), or servers do
(`server_pool`).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console

from ..common import BadInputError, IncompatibleError
from ..common.atomic import keeping, writing
from ..common.digests import digest_json
from ..common.file_process_group import LaunchGroup
from ..common.locks import locked
from ..common.places import COMPARISON, RUN, TRAINED, mark, require_place
from ..common.progress import progress
from ..common.runtime import require_extra, versions
from ..heads import HEADS
from ..recipes import DataSpec, Recipe, TargetSpec
from ..targets import Fingerprint, Target, config_only_target
from ..targets.config_only import target_without_layers
from ..targets.sharding import processes
from .client import read_key
from .conversation import Supervised, given_sequences, sequences, why_ended
from .data_set import (
    IMAGES,
    SCHEMA_VERSION,
    TrainingRow,
    provenance,
    require_whole,
    save_data_set,
)
from .decoding import Responder, answer_all, batches
from .engine_states import answering
from .journal import Answer, Answers, Identity, Journal, RemainingWork
from .launch import launch_group, one_leads
from .prompt_table import Prompt, PromptTable, digest_prompts
from .recipe_prompts import Collection, recipe_prompts
from .server_pool import answer_by_servers
from .sources import check_sources

_EMPTY = "empty"  # the target ended at once
_UNLEARNABLE = "unlearnable"  # of an answer that came with its prompt, the template or the length leaves nothing
_IMAGE_TOKENS = "image_token"  # the target wrote one, of which no image is known
_DROPPED = "_responses"  # ends the names of what is counted
ENDS = ("answers", "answers_cut", "ends_unknown", "answers_unlearnable")  # what is counted of answers' ends
_MANY_CUT = 0.2  # of the answers; more of them are warned about

_log = logging.getLogger(__name__)


def distill(recipe: Recipe, target: Target | None = None, console: Console | None = None) -> Path:
    """Let the target answer the recipe's prompts; return the folder of the data set, `<output>/data`.

    A finished folder of the same target, prompts and sampling is used as it is; an unfinished one is continued. Where a
    launcher started several processes, all of them call this, and all answer.

    Args:
        target: loaded from the recipe if None, without its weights where it does not answer itself.
        console: shows progress if it is a terminal.

    Raises:
        BadInputError: no prompts (names the source), prompts that leave no room for a response, a folder made with
            other settings (names them), one whose files were altered (names them), a full disk, another process that
            writes there.
        IncompatibleError: `data.responses` were tokenized differently.
        PeerError: another process of the launch failed; the message is its own.
    """
    spec = recipe.data
    if spec.responses is None:
        check_sources(spec.prompts)
    if spec.servers is not None:
        require_extra("serving", "data.servers")
        read_key(spec.requests.key)
    target, folder = target or target_of(recipe), data_folder(recipe)
    with launch_group(recipe.output_folder) as group:
        if group.is_main:
            require_place(recipe.output_folder, *TRAINED, COMPARISON)
        if spec.responses is not None:
            group.on_main("given", lambda: _require_responses(folder, target, recipe))
            return folder
        # All processes read the prompts: those that only take part in passes need them as little as they harm.
        collected = recipe_prompts(
            recipe, target.require_tokenizer(), console, recipe.output_folder, group.is_main, target.images
        )
        if collected.has_images:
            check_images(recipe, target)
        with locked(recipe.output_folder) if group.is_main else nullcontext():
            mark(recipe.output_folder, RUN)
            _ResponsesBuilder(folder, recipe, target, collected, group).make(console)
    return folder


def check_images(recipe: Recipe, target: Target) -> None:
    """Raise BadInputError if a recipe asks for what does not work with images in its data."""
    spec, kind = recipe.data, str(recipe.drafter.get("type"))
    reads_text = {
        "data.servers": spec.servers is not None,
        "target.engine": recipe.target.engine is not None,
        "data.on_policy": bool(spec.on_policy),
        "data.learn_prompts": spec.learn_prompts,
        f"drafter.type: {kind}": kind in HEADS and HEADS[kind].text_only,
    }
    if asked := [name for name, is_asked in reads_text.items() if is_asked]:
        raise BadInputError(f"{asked[0]}: this works with text alone, and rows of data.prompts have images.")
    if (why := target.why_no_images()) is not None:
        raise BadInputError(f"{why} Rows of data.prompts have images.")


def target_of(recipe: Recipe) -> Target:
    """Return a recipe's target: on the device where it answers, or without weights where others answer."""
    if recipe.target.engine is not None:
        return target_in_engine(recipe.target)
    spec, values = recipe.data, recipe.target.to_load()
    if spec.servers is None and spec.answers == "target" and spec.responses is None:
        return Target.load(**values, device=PartialState().device if processes() > 1 else None)
    del values["sharding"]  # there is nothing to share
    return config_only_target(**values)


def target_in_engine(spec: TargetSpec, device: torch.device | str = "cpu") -> Target:
    """Return a target that lives in an engine, without its layers."""
    return target_without_layers(spec.path, spec.revision, spec.dtype, spec.trust_remote_code, device)


def data_folder(recipe: Recipe) -> Path:
    """Return the folder of the recipe's responses, whether they are there yet or not."""
    given = recipe.data.responses
    return recipe.output_folder / "data" if given is None else Path(given).expanduser()


class _ResponsesBuilder:
    """A data set in the making."""

    def __init__(self, folder: Path, recipe: Recipe, target: Target, collected: Collection, group: LaunchGroup):
        self.folder = folder
        self.recipe = recipe
        self.spec = recipe.data
        self.target = target
        self.collected = collected
        self.group = group
        self.prompts: Sequence[Prompt] = collected.prompts
        self.tokenizer = target.require_tokenizer()
        self.journal = Journal(folder.with_name(folder.name + ".partial"))
        self.is_given = recipe.data.answers == "given"  # the answers came with the prompts

    def make(self, console: Console | None) -> None:
        """Answer what is missing, with the other processes, and write the data set, on the main one."""
        opened = self.group.on_main("work", self._open)
        if not opened:
            return
        work = RemainingWork(**json.loads(opened))
        is_peer = not (self.group.is_main or self.target.sharded)
        if is_peer and digest_prompts(self.prompts, self.is_given) != work.prompts:
            raise BadInputError(
                f"process {self.group.rank} reads other prompts than process 0: the files of data.prompts must be the "
                "same on all machines."
            )
        with keeping(self._kept), writing(self.folder):
            self._answer(work, console)
            self.group.barrier("answered")
            self.group.on_main("written", self._write)

    def _open(self) -> str:
        """Return the work that is left; "" if the data set is there. One made differently is never overwritten."""
        digest = digest_prompts(self.prompts, self.is_given)
        answered_by: dict[str, Any] | None = None
        if self.is_given:
            answered_by = {"given": True}
        elif self.spec.servers is not None:
            answered_by = {"model": self.spec.requests.model}
        elif self.recipe.target.engine is not None:
            answered_by = {"engine": self.recipe.target.engine.kind}
        self.identity = Identity(self.target.fingerprint(), digest, self._sampling(), answered_by)
        if self.folder.exists():
            saved = provenance(self.folder)
            require_whole(self.folder)
            self.identity.require_same(self.folder, saved, self.recipe.target.allow_changed)
            _require_target_of(self.folder, self.target, self.recipe, self.identity.target)
            self.journal.remove()  # of a run that was killed just before it did so
            return ""
        table = self.prompts
        lengths = table.lengths.tolist() if isinstance(table, PromptTable) else [len(p.tokens) for p in table]
        longest, limit = max(lengths), self.target.max_context
        if limit is not None and longest + self.spec.max_new_tokens > limit:
            raise BadInputError(
                f"the longest prompt has {longest} tokens; with data.max_new_tokens={self.spec.max_new_tokens} it "
                f"exceeds the target's context of {limit}. Lower data.max_prompt_tokens or data.max_new_tokens."
            )
        with keeping(self._kept), writing(self.folder):
            self.journal.open(self.identity)
        answered = Answers(self.journal.files(), len(self.prompts))
        # By length: equal ones side by side, and the batch that needs most memory first.
        longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        missing = [] if self.is_given else [i for i in longest_first if i not in answered]
        parts = batches(missing, self.spec.batch_size, 1 if self.target.sharded else self.group.size)
        return json.dumps({"prompts": digest, "begin": self.journal.next_number(), "batches": parts})

    def _sampling(self) -> dict[str, Any]:
        """Return the settings of the draws, and the limits of questions and answers."""
        sampling = {**self.spec.sampling.model_dump(), "max_new_tokens": self.spec.max_new_tokens}
        # The prompts hold all of single questions; the limit ends conversations, and rows with answers of their own.
        if self.is_given or any(prompt.later for prompt in self.prompts):
            sampling["max_prompt_tokens"] = self.spec.max_prompt_tokens
        if self.collected.has_images and self.target.images is not None:
            sampling[IMAGES] = self.target.images.digest
        return sampling

    def _kept(self) -> str:
        """Return a sentence about the responses that stay if the run ends now."""
        if not self.journal.files():
            return "No responses were kept."
        return f"The responses finished so far are kept in {self.journal.folder}."

    def _answer(self, work: RemainingWork, console: Console | None) -> None:
        left = sum(map(len, work.batches))
        total = len(self.prompts)
        with one_leads(self.group, self.target), progress(console, "target answers", total, total - left) as advance:
            if self.spec.servers is not None or self.recipe.target.engine is not None:
                if self.group.is_main and left:
                    with answering(self.recipe, self.target) as spec:
                        answer_by_servers(self.target, self.prompts, spec, work, self.journal, advance)
            elif not self.target.sharded or self.group.is_main:
                group = LaunchGroup() if self.target.sharded else self.group
                responder = Responder.of(self.target, self.prompts, self.spec)
                answer_all(responder, work, self.journal, group, advance)

    def _write(self) -> str:
        answers, counts = Answers(self.journal.files(), len(self.prompts)), Counter[str]()
        save_data_set(
            self.folder,
            self._rows(answers, counts),
            self.journal.folder,
            lambda: self._provenance(counts),
            name=digest_json(self.identity.to_dict())[:16],
            with_images=self.collected.has_images,
        )
        self.journal.remove()
        return ""

    def _rows(self, answers: Answers, counts: Counter[str]) -> Iterator[TrainingRow]:
        """Yield the rows to learn, in the order of the prompts, and count them."""
        for index, prompt in enumerate(self.prompts):
            answer = Answer(index) if self.is_given else answers[index]
            reason, rows = self._given(prompt, counts) if self.is_given else self._learnt(prompt, answer)
            self._count_ends(prompt, answer, counts)
            if reason:
                counts[f"{reason}{_DROPPED}"] += 1
            for tokens, mask in rows:
                counts["sequences"] += 1
                counts["response_tokens"] += sum(mask)
                counts["prompt_tokens"] += len(mask) - sum(mask)
                yield TrainingRow(
                    id=prompt.id,
                    suite=prompt.suite,
                    input_ids=tokens,
                    loss_mask=mask,
                    content=prompt.content,
                    asked=prompt.asked_digests(),
                    images=self.target.images_in(tokens, prompt.images),
                )
        self._report_dropped(counts)

    def _count_ends(self, prompt: Prompt, answer: Answer, counts: Counter[str]) -> None:
        """Count how the target's answers to a prompt end, and whether its questions ended early."""
        for turn in answer.turns:
            counts["answers"] += 1
            if turn and turn[-1] not in self.target.eos_ids:
                counts["answers_cut" if len(turn) >= self.spec.max_new_tokens else "ends_unknown"] += 1
        if early := why_ended(prompt, answer.turns, self.tokenizer):
            counts[f"conversations_ended_by_{early}"] += 1

    def _learnt(self, prompt: Prompt, answer: Answer) -> tuple[str, list[Supervised]]:
        """Return the rows of the target's answers to a prompt, or the name of the reason for none."""
        is_empty = all(t in self.target.eos_ids for turn in answer.turns for t in turn)
        has_image = bool(prompt.images) and any(self.target.image_token in turn for turn in answer.turns)
        reason = answer.dropped or _EMPTY * is_empty or _IMAGE_TOKENS * has_image
        return reason, [] if reason else sequences(prompt, answer.turns, self.tokenizer)

    def _given(self, prompt: Prompt, counts: Counter[str]) -> tuple[str, list[Supervised]]:
        """Return the rows of the answers that came with a prompt, as `_learnt` does."""
        longest = self.spec.max_prompt_tokens + self.spec.max_new_tokens
        try:
            rows = given_sequences(prompt, self.tokenizer, longest, self.target.eos_ids, counts)
            for tokens, _ in rows:
                self.target.images_in(tokens, prompt.images)  # refuses what was cut inside an image
        except BadInputError as error:
            _log.debug("%s", error)
            rows = []
        return "" if rows else _UNLEARNABLE, rows

    def _report_dropped(self, counts: Counter[str]) -> None:
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
            _log.warning("of %d responses some are dropped: %s", len(self.prompts), words)
        for sentence in answers_in_words(counts, self.spec):
            _log.warning("%s", sentence)

    def _provenance(self, counts: Counter[str]) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            **self.identity.to_dict(),
            "source": {"target": self.target.source, **self.spec.model_dump(include={"prompts", "limit", "sample"})},
            "counts": {**self.collected.counts(), f"{_EMPTY}{_DROPPED}": 0, **counts},
            "sources": self.collected.by_source(),
            "versions": versions("outrider", "torch", "transformers", "datasets"),
        }


def answers_in_words(counts: Mapping[str, int], spec: DataSpec) -> list[str]:
    """Return sentences about the ends of answers, by the counts of a data set: many were cut, or some are unknown."""
    answers, cut, unknown, unlearnable = (counts.get(name, 0) for name in ENDS)
    lines = []
    if cut > _MANY_CUT * answers:
        limit = "data.max_prompt_tokens + data.max_new_tokens" if spec.answers == "given" else "data.max_new_tokens"
        lines.append(
            f"{cut} of {answers} answers ({cut / answers:.0%}) were cut at {limit}: a drafter hardly learns how this "
            "target ends. Raise it to what is served."
        )
    if unknown:
        lines.append(
            f"of {unknown} of {answers} answers the end is unknown: text alone came, and the chat template ends a turn "
            "by no end token of the target, or raw text may end by several. They are learnt without an end."
        )
    if unlearnable:
        lines.append(f"the chat template writes {unlearnable} answers nowhere, after one of the same turn for example.")
    return lines


def _require_responses(folder: Path, target: Target, recipe: Recipe) -> str:
    """Refuse a folder that the recipe names, and that holds no responses of this target."""
    provenance(folder)  # refuses a folder of something else
    require_whole(folder)
    _require_target_of(folder, target, recipe, target.fingerprint())
    return ""


def _require_target_of(folder: Path, target: Target, recipe: Recipe, found: Fingerprint) -> None:
    """Refuse responses of another target than the one `found`, unless that is allowed and the tokens are the same."""
    saved = Fingerprint.from_dict(provenance(folder)["target"])
    if saved.tokenizer != found.tokenizer:
        raise IncompatibleError(
            f"the responses in {folder} were written with another tokenizer than this target's; distill new ones "
            "(another output, and without data.responses)."
        )
    target.check_same(saved, f"the data set of responses in {folder}", recipe.target.allow_changed, found)
