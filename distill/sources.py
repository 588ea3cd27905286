"""Where rows of data come from: packaged sets, files, folders, the Hub. Every source is read as a stream.

A source is a string in a recipe (`embedded:code`, `chats.jsonl`, `org/name:split`), or a mapping that says more about
it: {path, weight, layout, column, split, revision, limit}.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from ..common import BadInputError
from ..common.errors import first_line
from ..common.untrusted_files import (
    Unreadable,
    decoded,
    parse_json,
    read_byte_lines,
    read_json_items,
    read_lines,
    require_regular,
)
from ..recipes import SourceSpec, packaged_file
from .dataset_formats import Row, RowError, understand
from .prompt_table import LinesOnDisk
from .tables import hub_rows, num_parquet_rows, table_rows

EMBEDDED = "embedded:"
PACKAGED = {EMBEDDED: ("embedded", "prompts/"), "smollm2:": ("smollm2", "")}  # whose prompts, and where these are
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".txt")

T = TypeVar("T")

_TIMES_STREAMED, _LEAST_STREAMED = 100, 10_000  # rows of a Hub data set, from which a sample is drawn
_TRIED = 10  # rows of a source that are understood before anything is loaded
_SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # what `save_to_disk` writes beside the rows
_SPLITS = ("train", "test", "validation", "valid", "dev", "eval")
_NONDESCRIPT = {"question", "questions", "data", "prompts", *_SPLITS}


def as_specs(sources: Sequence[str | SourceSpec]) -> list[SourceSpec]:
    """Return sources as mappings; a string is a path."""
    return [source if isinstance(source, SourceSpec) else SourceSpec(path=source) for source in sources]


def check_sources(sources: Sequence[str | SourceSpec]) -> None:
    """Raise BadInputError for a source that cannot exist, or gives no row, before anything expensive is loaded."""
    for source in as_specs(sources):
        if not is_hub(source.path) and (why := _why_unreadable(source)) is not None:
            raise BadInputError(f"no prompts in {source.path!r}: {why}")


def _why_unreadable(source: SourceSpec) -> str | None:
    """Return what is wrong with the first row of a source; None if one of the first few can be read."""
    why = None
    for number, row in enumerate(islice(rows_of(source), _TRIED), 1):
        try:
            if isinstance(row, RowError):
                raise row
            understand(row, f"{source.path}, row {number}", source.layout, source.column, images_folder(source))
            return None
        except RowError as error:
            why = why or str(error)
    return why or "it is empty."


def count_rows(source: str | SourceSpec) -> int | None:
    """Return the number of a source's rows, prompts or not; None for a Hub data set, which is not read for that."""
    [spec] = as_specs([source])
    if is_hub(spec.path):
        return None
    files = files_of(spec)
    if all(file.suffix == ".parquet" for file in files):
        with _readable(Path(spec.path), *files):
            return min(sum(map(num_parquet_rows, files)), spec.limit or 2**63)
    return sum(1 for _ in rows_of(spec))


def rows_of(source: SourceSpec, found: Callable[[str], object] = str) -> Iterator[Row | RowError]:
    """Yield the first `source.limit` rows of a source, or the error of a line. BadInputError: it cannot be read.

    Args:
        found: gets the commit of a Hub data set, before its first row.
    """
    yield from islice(_all_rows(source, found), source.limit)


def _all_rows(source: SourceSpec, found: Callable[[str], object]) -> Iterator[Row | RowError]:
    files = [] if is_hub(source.path) else files_of(source)
    return chain.from_iterable(_READERS[file.suffix](file) for file in files) if files else _hub_rows(source, found)


class Reservoir:
    """An even sample of a source's rows, each with its number from 1 (Vitter 1985, algorithm R).

    It lies on the disk. Of a Hub data set, which has to be fetched, the first `_TIMES_STREAMED` times as many rows are
    looked at, at least `_LEAST_STREAMED`.

    Attributes:
        seen: rows that were looked at.
        is_spent: all rows of the sample were read.
    """

    def __init__(
        self, source: SourceSpec, size: int, chance: random.Random, found: Callable[[str], object], folder: Path | None
    ):
        most = max(_LEAST_STREAMED, _TIMES_STREAMED * size) if is_hub(source.path) else None
        self.chance = chance
        self.size = size
        self.seen = 0
        self.is_spent = False
        self._lines = LinesOnDisk(folder)
        self._places = list[int]()
        for self.seen, row in enumerate(islice(_all_rows(source, found), most), 1):
            drawn = self.seen - 1 if self.seen <= size else chance.randrange(self.seen)
            if drawn < size:
                kept = {"error": [row.where, row.reason]} if isinstance(row, RowError) else {"row": row}
                self._places[drawn : drawn + 1] = [self._lines.add([self.seen, kept])]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def is_sample(self) -> bool:
        return self.seen > len(self)

    def rows(self, shuffled: bool) -> Iterator[tuple[int, Row | RowError]]:
        """Yield the sample in the source's order, or in a drawn one."""
        places = sorted(self._places)
        if shuffled:
            self.chance.shuffle(places)
        for place in places:
            number, kept = self._lines.read(place)
            yield number, RowError(*kept["error"]) if "error" in kept else kept["row"]
        self.is_spent = True


def some_of_each(items: Sequence[T], limit: int | None, kind: Callable[[T], str]) -> list[T]:
    """Return at most `limit` items, as evenly over their kinds as they allow and of each the first, in their order."""
    ranks = Counter[str]()
    placed = []
    for place, item in enumerate(items):
        placed.append((ranks[kind(item)], place))
        ranks[kind(item)] += 1
    return [items[place] for place in sorted(place for _, place in sorted(placed)[:limit])]


def in_turn(streams: Iterable[Iterable[T]]) -> Iterator[T]:
    """Yield one from each stream, again and again, until all have ended."""
    alive = list(map(iter, streams))
    while alive:
        for stream in list(alive):
            item = next(stream, None)
            if item is None:
                alive.remove(stream)
            else:
                yield item


def images_folder(source: SourceSpec) -> Path | None:
    """Return the folder below which the images of a source's rows are: its file's, or itself; None on the Hub."""
    if is_hub(source.path):
        return None
    place = locate(source.path)
    return place if place.is_dir() else place.parent


def title(source: str) -> str:
    """Return the name of a source's prompts: the file's or folder's, or that of the folder around it."""
    if source.startswith(EMBEDDED):
        return source.removeprefix(EMBEDDED)
    if is_hub(source):
        return source.partition(":")[0].split("/")[-1]
    file = Path(os.path.realpath(Path(source).expanduser()))  # also of a link to itself, which reading refuses
    return file.parent.name if file.stem in _NONDESCRIPT else file.stem


def is_hub(source: str) -> bool:
    """Return whether a source is neither packaged nor a path: what is left is a name on the Hub."""
    if source.startswith((*PACKAGED, ".", "/", "~")) or Path(source).exists():
        return False
    return Path(source).suffix not in SUFFIXES


def locate(source: str) -> Path:
    """Return the file or folder that an `embedded:` name or a path means. BadInputError: there is none of a kind."""
    for prefix, (model, folder) in PACKAGED.items():
        if source.startswith(prefix):
            return packaged_file(model, f"{folder}{source.removeprefix(prefix)}.jsonl")
    file = Path(source).expanduser()
    if not file.exists():
        raise BadInputError(
            f"the prompt source {source!r} does not exist; expected embedded:code, embedded:docs, embedded:prose, "
            "smollm2:answers, a file, a folder, or a Hub id like org/name."
        )
    if not file.is_dir() and file.suffix not in SUFFIXES:
        raise BadInputError(
            f"the prompt source {source!r} is a {file.suffix or 'suffixless'} file; expected one of "
            f"{', '.join(SUFFIXES)}."
        )
    return file


def files_of(source: SourceSpec) -> list[Path]:
    """Return the files of a local source in the order of their names; of a folder those of its split."""
    place = locate(source.path)
    if source.revision is not None:
        raise BadInputError(
            f"{source.path}: files here have no revisions, and the recipe asks for {source.revision!r}; leave it out."
        )
    if not place.is_dir():
        if source.split is not None:
            raise BadInputError(
                f"{source.path}: one file has no splits, and the recipe asks for {source.split!r}; leave `split` out, "
                "or name a folder."
            )
        return [place]
    files = sorted(_inside(place))
    kinds = sorted({f.suffix for f in files})
    if len(kinds) != 1:
        held = f"with {', '.join(kinds)} files" if kinds else "without files of rows"
        raise BadInputError(
            f"the prompt source {source.path!r} is a folder {held}; expected one kind of {', '.join(SUFFIXES)}."
        )
    return _of_split(files, place, source)


def _inside(folder: Path) -> Iterator[Path]:
    """Yield the files of rows in a folder and the folders in it; names that begin with a dot are hidden."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if Path(name).suffix in SUFFIXES and name not in _SAVED and not name.startswith("."):
                yield Path(place, name)


def _of_split(files: list[Path], folder: Path, source: SourceSpec) -> list[Path]:
    """Return the files of the split that is asked for; `train`, if none is named and there is one."""
    splits = {file: _split_name(file, folder) for file in files}
    named = sorted({name for name in splits.values() if name})
    if source.split is None:
        chosen = [f for f in files if splits[f] in ("train", None)] if "train" in named else files
    else:
        chosen = [f for f in files if splits[f] == source.split]
    if not chosen:
        raise BadInputError(
            f"the prompt source {source.path!r} has no split {source.split!r}; it has {', '.join(named) or 'none'}."
        )
    return chosen


def _split_name(file: Path, folder: Path) -> str | None:
    """Return the split in a file's or a folder's name: train.jsonl, train-00000-of-00002.parquet, train/…"""
    for part in file.relative_to(folder).parts:
        name = part.partition(".")[0].partition("-")[0]
        if name in _SPLITS:
            return name
    return None


def _jsonl_rows(file: Path) -> Iterator[Row | RowError]:
    for number, line in enumerate(read_byte_lines(file), 1):
        where = f"{file}: line {number}"
        try:
            text = decoded(line, where)
            row = parse_json(text, where) if text.strip() else None
        except Unreadable as error:
            yield RowError(where, f"{error.reason}.")
            continue
        if row is None and not text.strip():
            continue
        yield row if isinstance(row, dict) else _no_object(where, row)


def _json_rows(file: Path) -> Iterator[Row | RowError]:
    try:
        for number, row in enumerate(read_json_items(file), 1):
            yield row if isinstance(row, dict) else _no_object(f"{file}: entry {number}", row)
    except Unreadable as error:
        raise BadInputError(f"{error} One object per line is a .jsonl file.") from error


def _no_object(where: str, row: Any) -> RowError:
    return RowError(where, f"is a {type(row).__name__}; expected an object with named fields.")


def _text_rows(file: Path) -> Iterator[Row]:
    for line in read_lines(file):
        if line.strip():
            yield {"text": line.rstrip("\r\n")}


@contextmanager
def _readable(place: Path, *files: Path) -> Iterator[None]:
    try:
        for file in files:
            require_regular(file)
        yield
    except (ValueError, OSError) as error:
        raise BadInputError(f"{place}: not a readable {files[0].suffix[1:]} file ({error}).") from error


def _table_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file, or an Arrow file: a stream (so `datasets` writes them) or one with an index."""
    with _readable(file, file):
        yield from table_rows(file)


_READERS: dict[str, Callable[[Path], Iterator[Row | RowError]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _table_rows,
    ".arrow": _table_rows,
    ".txt": _text_rows,
}


def _hub_rows(source: SourceSpec, found: Callable[[str], object]) -> Iterator[Row]:
    """Yield the rows of a Hub data set, streamed: a limit then costs no more than it reads."""
    name, _, split = source.path.partition(":")
    organisation, _, rest = name.partition("/")
    repository, _, config = rest.partition("/")
    identifier = f"{organisation}/{repository}" if repository else organisation
    try:
        yield from hub_rows(identifier, config or None, source.split or split or "train", source.revision, found)
    except Exception as error:  # of any of the library's kinds
        raise BadInputError(
            f"the prompt source {source.path!r} is no file here, and the Hub gives no data set for it: "
            f"{first_line(error).rstrip('.')}. Expected org/name[/config][:split]."
        ) from error
