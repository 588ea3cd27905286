"""The target's own responses: what a drafter learns to predict.

A run is identified by what decides its text (target, prompts, sampling, length), not by how it was batched. Each
finished batch becomes one file in `<folder>.partial/`, so that an interrupted run continues; the finished data set
appears at once.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, List, Value, load_from_disk
from datasets.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from rich.console import Console

from ..decode import Decoder, Plan, Sampling
from ..ground import BadInputError, IncompatibleError, Refusal, digests
from ..ground.disk import keeping, writing
from ..ground.files import read_json, write_atomically
from ..ground.locks import locked
from ..ground.progress import progress
from ..ground.replacing import replacing_folder
from ..ground.versions import versions
from ..recipes import DataSpec, Recipe
from ..targets import Fingerprint, Target
from .prompts import Collection, Prompt, check_sources, collect, digest_prompts
from .unfinished import Unfinished

PROVENANCE = "provenance.json"
SCHEMA_VERSION = 2
_WITHOUT_DIGESTS = 1  # what older versions wrote
COLUMNS = ("id", "suite", "input_ids", "loss_mask")

_log = logging.getLogger(__name__)


def distill(recipe: Recipe, target: Target | None = None, console: Console | None = None) -> Path:
    """Let the target answer the recipe's prompts, and return the folder of the data set, `<output>/data`.

    A finished folder of the same target, prompts and sampling is used as it is; an unfinished one is continued.

    Args:
        target: loaded from the recipe if None.
        console: shows progress if it is a terminal.

    Raises:
        BadInputError: no prompts (names the source), prompts that leave no room for a response, a folder made with
            other settings (names them), one whose files were altered (names them), a full disk, another process that
            writes there.
        IncompatibleError: `data.responses` were tokenized differently.
    """
    spec = recipe.data
    if spec.responses is None:
        check_sources(spec.prompts)
    if target is None:
        target = Target.load(**recipe.target.model_dump())
    if spec.responses is not None:
        return _given(data_folder(recipe), target)
    found = collect(spec.prompts, target.require_tokenizer(), spec.limit, spec.max_prompt_tokens)
    run = _Answering(data_folder(recipe), spec, target, found)
    with locked(recipe.output_folder):
        if not run.finished():
            with keeping(run.kept), writing(run.folder):
                run.answer(console)
                run.assemble()
    return run.folder


def data_folder(recipe: Recipe) -> Path:
    """Return the folder where the recipe's responses are, or will be."""
    return (
        Path(recipe.data.responses).expanduser() if recipe.data.responses is not None else recipe.output_folder / "data"
    )


def load_responses(folder: str | Path) -> Dataset:
    """Return the data set in `folder`: id, suite, input_ids (prompt and response), loss_mask (1 on response tokens)."""
    _require_whole(Path(folder), provenance(folder))
    try:
        dataset = load_from_disk(str(folder))
    except Exception as error:
        raise BadInputError(
            f"{folder}: its data set cannot be read ({error}). Delete the folder and run distill again."
        ) from error
    missing = [c for c in COLUMNS if c not in dataset.column_names]
    if missing:
        raise BadInputError(
            f"{folder}: the columns {', '.join(missing)} are missing; found {', '.join(dataset.column_names)}."
        )
    return dataset


def provenance(folder: str | Path) -> dict[str, Any]:
    """Return where a data folder came from: target fingerprint, prompts, sampling, versions, counts."""
    file = Path(folder) / PROVENANCE
    if not file.is_file():
        raise BadInputError(f"{folder}: is no data folder made by distill ({PROVENANCE} is missing).")
    saved = read_json(file)
    if saved.get("schema_version") not in (_WITHOUT_DIGESTS, SCHEMA_VERSION):
        raise BadInputError(
            f"{file}: has schema version {saved.get('schema_version')}, this Outrider reads {SCHEMA_VERSION}; distill "
            "into another `output`."
        )
    return saved


def _require_whole(folder: Path, saved: dict[str, Any]) -> None:
    """Refuse responses that were altered after they were written; of an older version's nobody can tell."""
    if saved["schema_version"] == _WITHOUT_DIGESTS and not (folder / digests.LIST).exists():
        _log.warning("%s was written by an older Outrider: whether it was altered since cannot be checked.", folder)
        return
    digests.require_whole(folder, "Take a good copy, or delete the folder and run distill again.")


@dataclass(frozen=True)
class Identity:
    """What decides the text of a run. Two runs with equal identities give the same data set.

    `sampling` includes the length limit of a response; `prompts` is the digest of their tokens.
    """

    target: Fingerprint
    prompts: str
    sampling: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {"target": self.target.to_dict(), "prompts": self.prompts, "sampling": self.sampling}

    def differences(self, saved: dict[str, Any]) -> list[str]:
        """Return what was other when `saved` (from `to_dict`) was written."""
        changed = [f"target ({', '.join(Fingerprint.from_dict(saved['target']).differences(self.target))})"]
        lines = changed if saved["target"]["digest"] != self.target.digest else []
        lines += ["prompts (other sources, limit, or contents)"] if saved["prompts"] != self.prompts else []
        then = saved["sampling"]
        return lines + [f"{k} (was {then.get(k)}, is {v})" for k, v in self.sampling.items() if then.get(k) != v]


class _Answering:
    """One data set in the making."""

    def __init__(self, folder: Path, spec: DataSpec, target: Target, found: Collection):
        self.folder, self.unfinished = folder, Unfinished(folder.with_name(folder.name + ".partial"))
        self.spec, self.target, self.found = spec, target, found
        self.prompts: Sequence[Prompt] = found.prompts
        sampling = {**spec.sampling.model_dump(), "max_new_tokens": spec.max_new_tokens}
        self.identity = Identity(target.fingerprint(), digest_prompts(self.prompts), sampling)

    def finished(self) -> bool:
        """Tell whether the data set exists. One that was made differently is never overwritten."""
        if not self.folder.exists():
            return False
        saved = provenance(self.folder)
        _require_whole(self.folder, saved)
        self._require_same(self.folder, saved)
        self.unfinished.remove()  # of a run that was killed just before it did so
        return True

    def _require_same(self, folder: Path, saved: dict[str, Any]) -> None:
        try:
            lines = self.identity.differences(saved)
        except (KeyError, TypeError, AttributeError) as error:
            raise Refusal(
                f"{folder}: what it says of its target or sampling is damaged. Delete that folder."
            ) from error
        if lines:
            raise BadInputError(
                f"{folder} was made with other settings: {'; '.join(lines)}. Choose another `output`, or delete that "
                "folder."
            )

    def kept(self) -> str:
        """Return a sentence about what is there if the run ends now."""
        if self.unfinished.is_empty():
            return "No responses were kept."
        return f"The responses finished so far are kept in {self.unfinished.folder}."

    # ------------------------------------------------------------ answering

    def answer(self, console: Console | None) -> None:
        """Generate what is missing, batch by batch."""
        self._check_room()
        self.unfinished.open(self.identity.to_dict(), lambda saved: self._require_same(self.unfinished.folder, saved))
        answered = self.unfinished.answered()
        missing = [i for i in self._longest_first() if i not in answered]
        decoder, size = Decoder(self.target), self.spec.batch_size
        number = self.unfinished.next_number()
        tokens, started = 0, time.perf_counter()
        with progress(console, "target answers", len(self.prompts), len(answered)) as advance:
            for begin in range(0, len(missing), size):
                batch = missing[begin : begin + size]
                responses = self._generate(decoder, batch)
                self.unfinished.keep(number, batch, responses)
                number, tokens = number + 1, tokens + sum(map(len, responses))
                advance(len(batch), f"{tokens / (time.perf_counter() - started):,.0f} tokens/s")

    def _generate(self, decoder: Decoder, batch: list[int]) -> list[list[int]]:
        """Return responses to the prompts with these indices; each draws by its index, whatever the batch."""
        sampling = Sampling(**self.spec.sampling.model_dump())
        try:
            out = decoder.generate(
                [self.prompts[i].tokens for i in batch],
                self.spec.max_new_tokens,
                sampling,
                Plan(depth=0),
                sequence_ids=batch,
            )
        except torch.OutOfMemoryError as error:
            raise BadInputError(
                f"the device has too little memory for data.batch_size={self.spec.batch_size}. Finished responses are "
                "kept; run again with a smaller one."
            ) from error
        return out.tokens

    def _longest_first(self) -> list[int]:
        """Return the prompts by length: equal ones side by side, and the batch that needs most memory first."""
        return sorted(range(len(self.prompts)), key=lambda i: (-len(self.prompts[i].tokens), i))

    def _check_room(self) -> None:
        limit, longest = self.target.max_context, max(len(p.tokens) for p in self.prompts)
        if limit is not None and longest + self.spec.max_new_tokens > limit:
            raise BadInputError(
                f"the longest prompt has {longest} tokens; with data.max_new_tokens={self.spec.max_new_tokens} it "
                f"exceeds the target's context of {limit}. "
                "Lower data.max_prompt_tokens or data.max_new_tokens."
            )

    # ------------------------------------------------------------ the data set

    def assemble(self) -> None:
        """Write the data set beside its place, then move it there."""
        answered, ending = self.unfinished.answered(), set(self.target.eos_ids)
        kept = [i for i in range(len(self.prompts)) if any(t not in ending for t in answered[i])]
        if not kept:
            raise BadInputError(
                f"all {len(self.prompts)} responses are empty: the target ends at once. First prompt: "
                f"{self.prompts[0].text[:200]!r}. Check its chat template."
            )
        with replacing_folder(self.folder) as building:
            with _quiet_datasets():
                self._dataset(kept, answered).save_to_disk(str(building))
            write_atomically(building / PROVENANCE, json.dumps(self._provenance(kept, answered), indent=2) + "\n")
            digests.seal(building)
        self.unfinished.remove()

    def _dataset(self, kept: list[int], answered: dict[int, list[int]]) -> Dataset:
        rows = [(self.prompts[i], answered[i]) for i in kept]
        columns = {
            "id": [p.id for p, _ in rows],
            "suite": [p.suite for p, _ in rows],
            "input_ids": [[*p.tokens, *response] for p, response in rows],
            "loss_mask": [[0] * len(p.tokens) + [1] * len(response) for p, response in rows],
        }
        types = Features(
            id=Value("string"), suite=Value("string"), input_ids=List(Value("int32")), loss_mask=List(Value("int8"))
        )
        return Dataset.from_dict(columns, features=types)

    def _provenance(self, kept: list[int], answered: dict[int, list[int]]) -> dict[str, Any]:
        counts = {**self.found.counts(), "empty_responses": len(self.prompts) - len(kept), "sequences": len(kept)}
        counts |= {
            "prompt_tokens": sum(len(self.prompts[i].tokens) for i in kept),
            "response_tokens": sum(len(answered[i]) for i in kept),
        }
        return {
            "schema_version": SCHEMA_VERSION,
            **self.identity.to_dict(),
            "source": {"target": self.target.source, "prompts": self.spec.prompts, "limit": self.spec.limit},
            "counts": counts,
            "versions": versions("outrider", "torch", "transformers", "datasets"),
        }


def _given(folder: Path, target: Target) -> Path:
    """Return a folder that the recipe names, checked: responses of another target with the same tokens are allowed."""
    whole = provenance(folder)
    _require_whole(folder, whole)
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


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Turn off the library's own progress bars inside, which would run through ours."""
    was_quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            enable_progress_bars()
