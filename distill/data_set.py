"""The finished data set of responses: a folder that says where it came from, and that tells whether it was altered."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value, load_from_disk
from datasets.arrow_writer import ArrowWriter
from datasets.table import MemoryMappedTable
from datasets.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ..common import BadInputError, digests
from ..common.atomic import replacing_folder, working_name, write_atomically
from ..common.safe_load import read_json

PROVENANCE = "provenance.json"
SCHEMA_VERSION = 2
_WITHOUT_DIGESTS = 1  # what older versions wrote
_TYPES = {"id": Value("string"), "suite": Value("string"), "input_ids": List(Value("int32"))}
_NEEDED = Features(**_TYPES, loss_mask=List(Value("int8")))
_FEATURES = Features(**_NEEDED, content=Value("string"))
DEPTHS = "depths"  # the column of a data set for which a drafter speculated
ROUNDS = "rounds"  # what its provenance says of them
COLUMNS = tuple(_NEEDED)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingRow:
    """What a drafter learns from: tokens `[T]`, and a mask that is 1 on those that the target wrote `[T]`.

    `content` is a digest of what was asked: it decides which rows are held out, whatever their ids and places. `depths`
    says at which depth a round of decoding reached each token `[T]`, 0 where none did; None where nobody drafted.
    """

    id: str
    suite: str
    input_ids: list[int]
    loss_mask: list[int]
    content: str
    depths: list[int] | None = None


def load_responses(folder: str | Path) -> Dataset:
    """Return the data set in `folder`: id, suite, input_ids (prompt and response), loss_mask (1 on response tokens).

    Where a drafter speculated for some of them there are `depths`, too (see `TrainingRow`; null for the others).
    """
    require_whole(Path(folder), provenance(folder))
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


def rounds_of(folder: Path) -> dict[str, int]:
    """Return for how many prompts of a data set each drafter speculated, whose rounds `depths` are.

    Raises:
        BadInputError: for none: nobody knows which tokens rounds of decoding reached.
    """
    found: dict[str, int] = provenance(folder).get(ROUNDS, {})
    if not found:
        raise BadInputError(
            f"data.verified: the responses in {folder} were written without a drafter that speculates, or by an older "
            "Outrider that kept no rounds. Name a drafter (data.drafter) and delete that folder, so that the target "
            "answers again (the text will be the same), or leave out data.verified."
        )
    return found


def require_whole(folder: Path, saved: dict[str, Any]) -> None:
    """Refuse responses that were altered after they were written; of an older version's nobody can tell."""
    if saved["schema_version"] == _WITHOUT_DIGESTS and not (folder / digests.LIST).exists():
        _log.warning("%s was written by an older Outrider: whether it was altered since cannot be checked.", folder)
        return
    digests.require_whole(folder, "Take a good copy, or delete the folder and run distill again.")


def save_data_set(
    folder: Path,
    rows: Iterable[TrainingRow],
    workplace: Path,
    describe: Callable[[], dict[str, Any]],
    name: str,
    with_depths: bool = False,
) -> None:
    """Write a data set beside its place, then move it there. Its rows are never all in memory.

    Args:
        workplace: a folder for what is made on the way.
        describe: returns the provenance, when all rows were written.
        name: of this content, by which the library knows what it has computed of it.
        with_depths: whether there is a column of them.
    """
    features = Features(**_FEATURES, **({DEPTHS: List(Value("int16"))} if with_depths else {}))
    stream = working_name(workplace / "rows.arrow", "tmp")  # by which the next run clears what a kill leaves
    try:
        with ArrowWriter(path=str(stream), features=features) as writer:
            for row in rows:
                writer.write({column: value for column, value in vars(row).items() if column in features})
            writer.finalize()
        with replacing_folder(folder) as building:
            with _quiet_datasets():
                Dataset(MemoryMappedTable.from_file(str(stream)), fingerprint=name).save_to_disk(str(building))
            write_atomically(building / PROVENANCE, json.dumps(describe(), indent=2) + "\n")
            digests.seal(building)
    finally:
        stream.unlink(missing_ok=True)


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
