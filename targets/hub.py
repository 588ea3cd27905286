"""Models of the Hub as folders: downloaded first, looked at next, and only then opened by any library.

Without a connection they come from the Hub's cache (`HF_HOME`).
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import IncompleteSnapshotError

from ..common.errors import BadInputError, reason
from .stored import plain_weight_map
from .vetting import INDEX, MODEL_CONFIG, SINGLE, is_local

_SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # configs, tokenizers, templates
_CODE = "*.py"


def model_folder(name: str, revision: str | None = None, trust_remote_code: bool = False, weights: bool = True) -> Path:
    """Return the folder that holds a model: the one that `name` says, or an id of the Hub's, which is downloaded.

    Args:
        trust_remote_code: code of the model is downloaded, too.
        weights: False for its configs and its tokenizer only.

    Raises:
        BadInputError: the Hub has no such model, or cannot be reached and the cache does not hold it.
        Refusal: its index names weights that are not beside it.
    """
    if is_local(name):
        return Path(name).expanduser()
    folder = _snapshot(name, revision, [*_SETTINGS, *([_CODE] if trust_remote_code else [])])
    if weights:
        index = folder / INDEX
        files = sorted(set(plain_weight_map(index).values())) if index.exists() else [SINGLE]
        folder = _snapshot(name, folder.name, files)  # of the same commit, whatever was pushed since
    return folder


def _snapshot(name: str, revision: str | None, files: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except IncompleteSnapshotError as error:
        config = try_to_load_from_cache(name, MODEL_CONFIG, revision=revision)
        if not isinstance(config, str):
            raise _unreachable(name, error) from error
        return Path(config).parent  # what the libraries need may be there all the same
    except Exception as error:  # of the Hub, of the connection, of the disk
        raise _unreachable(name, error) from error


def _unreachable(name: str, error: Exception) -> BadInputError:
    return BadInputError(
        f"the model {name!r} cannot be loaded: {reason(error)} Check the path, or the Hub id and your access to it."
    )
