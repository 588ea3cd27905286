"""The finished data set of responses: a folder with its provenance, and with digests that show alterations.

Rows with images name them by their digests; the files lie in the folder `images` of the data set, each once.

Shapes: T tokens of a row.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from datasets import Dataset, Features, List, Value, load_from_disk
from datasets.arrow_writer import ArrowWriter
from datasets.table import MemoryMappedTable
from datasets.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ..common import BadInputError, digests
from ..common.atomic import replacing_folder, working_name, write_atomically
from ..common.untrusted_files import read_json, read_text
from ..targets import Target
from ..targets.images import PromptImage, StoredImages

PROVENANCE = "provenance.json"
LEARNT = "learnt.txt"  # digests of the questions, one in a line
_LARGEST = 2**30  # bytes of such a file: 60 million questions
SCHEMA_VERSION = 2
_TYPES = {"id": Value("string"), "suite": Value("string"), "input_ids": List(Value("int32"))}
_NEEDED = Features(**_TYPES, loss_mask=List(Value("int8")))
_FEATURES = Features(**_NEEDED, content=Value("string"))
IMAGES = "images"  # the column of a data set with images, and the folder of their files
COLUMNS = tuple(_FEATURES)


@dataclass(frozen=True)
class TrainingRow:
    """A row that a drafter learns from: tokens `[T]`, and a mask that is 1 on those that the target wrote `[T]`.

    `content` is a digest of the question: it decides which rows are held out, whatever their ids and places. `asked`
    are digests of its questions (`Prompt.asked_digests`). `images` are those that its tokens show, in order.
    """

    id: str
    suite: str
    input_ids: list[int]
    loss_mask: list[int]
    content: str
    asked: Sequence[str] = ()
    images: Sequence[PromptImage] = ()


def load_responses(folder: str | Path) -> Dataset:
    """Return the data set in `folder`: id, suite, input_ids, loss_mask (1 on response tokens)."""
    provenance(folder)  # refuses a folder of something else
    require_whole(Path(folder))
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


def images_of(folder: str | Path, dataset: Dataset, target: Target) -> StoredImages | None:
    """Return the images of a data set's rows; None if they have none. BadInputError: the target sees no images."""
    if IMAGES not in dataset.column_names:
        return None
    if target.images is None:
        raise BadInputError(f"{folder}: its rows have images, and this target sees none; take one that does.")
    return StoredImages(Path(folder) / IMAGES, dataset[IMAGES], target.images)


def learnt_questions(folder: str | Path) -> set[str]:
    """Return the digests of all questions in a data set (`Prompt.asked_digests`); none without one."""
    file = Path(folder) / LEARNT
    return read_digests(file) if file.is_file() else set()


def read_digests(file: Path) -> set[str]:
    """Return the digests of questions in a file, one in a line."""
    return set(read_text(file, _LARGEST).split())


def provenance(folder: str | Path) -> dict[str, Any]:
    """Return the provenance of a data folder: target fingerprint, prompts, sampling, versions, counts."""
    file = Path(folder) / PROVENANCE
    if not file.is_file():
        raise BadInputError(f"{folder}: is no data folder made by distill ({PROVENANCE} is missing).")
    saved = read_json(file)
    if saved.get("schema_version") != SCHEMA_VERSION:
        raise BadInputError(
            f"{file}: has schema version {saved.get('schema_version')}, this Outrider reads {SCHEMA_VERSION}; distill "
            "into another `output`."
        )
    return saved


def require_whole(folder: Path) -> None:
    """Refuse responses that were altered after they were written."""
    digests.require_whole(folder, "Take a good copy, or delete the folder and run distill again.")


def save_data_set(
    folder: Path,
    rows: Iterable[TrainingRow],
    workplace: Path,
    describe: Callable[[], dict[str, Any]],
    name: str,
    with_images: bool = False,
) -> None:
    """Write a data set beside its place, then move it there. Its rows are never all in memory.

    Args:
        workplace: a folder for temporary files.
        describe: returns the provenance, when all rows were written.
        name: the fingerprint of this content, by which the library caches results.
        with_images: whether there is a column of them.
    """
    more = {IMAGES: List(Value("string"))} if with_images else {}
    features = Features(**_FEATURES, **more)
    pictures = working_name(workplace / IMAGES, "tmp")
    stream = working_name(workplace / "rows.arrow", "tmp")  # by which the next run clears what a kill leaves
    learnt = working_name(workplace / LEARNT, "tmp")
    was_quiet = are_progress_bars_disabled()
    disable_progress_bars()  # the library's own would run through ours
    try:
        with (
            ArrowWriter(path=str(stream), features=features) as writer,
            pyarrow.OSFile(str(learnt), "wb") as questions,
        ):
            for row in rows:
                questions.write("".join(f"{digest}\n" for digest in row.asked).encode())
                values = vars(row) | {IMAGES: [_kept_image(image, pictures) for image in row.images]}
                writer.write({column: value for column, value in values.items() if column in features})
            writer.finalize()
        with replacing_folder(folder) as building:
            Dataset(MemoryMappedTable.from_file(str(stream)), fingerprint=name).save_to_disk(str(building))
            shutil.copyfile(learnt, building / LEARNT)
            if pictures.exists():
                shutil.copytree(pictures, building / IMAGES)
            write_atomically(building / PROVENANCE, json.dumps(describe(), indent=2) + "\n")
            digests.seal(building)
    finally:
        stream.unlink(missing_ok=True)
        learnt.unlink(missing_ok=True)
        shutil.rmtree(pictures, ignore_errors=True)
        if not was_quiet:
            enable_progress_bars()


def _kept_image(image: PromptImage, folder: Path) -> str:
    """Keep an image's file in a folder, once; return its digest, which is its name there."""
    folder.mkdir(exist_ok=True)
    file = folder / image.digest
    if not file.exists():
        write_atomically(file, image.read())
    return image.digest
