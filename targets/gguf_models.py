"""GGUF files as targets: read once, in float32, and kept as plain models in the user's cache folder.

A GGUF is llama.cpp's: one file with weights, most of them quantised, sizes, and the tokenizer. `transformers`
dequantises it. What is computed with afterwards, and known by its fingerprint, are those weights. The folder's record
keeps the file's digest and quantisation, which a target's `source` names.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)

from ..common import digest_cache
from ..common.atomic import replacing_folder, require_space, write_atomically
from ..common.digests import digest_json, file_digest, read_sealed, seal, write_json
from ..common.errors import (
    BadInputError,
    IncompatibleError,
    OutriderError,
    Refusal,
    first_line,
    reason,
)
from ..common.locks import locked
from ..common.runtime import versions
from .model_folder import FETCHED, SINGLE, check_config, without_questions
from .smoke_check import few_logits, require_same_logits
from .weights import no_more_than, stored_digests

RECORD = "gguf.json"
_ENDS = ("eos", "eot", "eom")  # tokens that end an answer: of a text, of a turn, of a message
_PATIENCE = 3600.0  # seconds that another process may take to read the same file
_MAKE_AGAIN = "Remove the folder, and it is made again."
_GOOD_COPY = "Take a good copy of it."

_MOST_READS = 5_000_000  # of a header: a vocabulary of 256,000 with its merges takes two million

_log = logging.getLogger(__name__)


class _BoundedReader(gguf.GGUFReader):
    """A reader that refuses what a file counts beyond its end: the library would go on, and take memory for each."""

    reads = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        self.reads += 1
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data) or self.reads > _MOST_READS:
            raise ValueError(f"it counts more than its {len(self.data):,} bytes can hold")
        return super()._get(offset, dtype, count, override_order)


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file: values by key (of arrays their lengths), the tensors' types, and their elements."""

    values: dict[str, Any]
    types: dict[str, gguf.GGMLQuantizationType]
    elements: int

    @classmethod
    def of(cls, file: Path) -> GgufHeader:
        """Return the header of `file`; raises Refusal if it is damaged, cut short, or holds less than it says."""
        try:
            read = _BoundedReader(file)
            if (taken := sum(tensor.n_bytes for tensor in read.tensors)) > file.stat().st_size:
                raise ValueError(f"its {len(read.tensors)} tensors take {taken:,} bytes")
            values = {
                name: len(field.data) if gguf.GGUFValueType.ARRAY in field.types else field.contents()
                for name, field in read.fields.items()
            }
        except (ValueError, TypeError, RuntimeError, KeyError, IndexError, ArithmeticError) as error:
            found = f"damaged, cut short, or no GGUF file ({reason(error)})"
            raise Refusal.of(file, found, "GGUF version 2 or 3", _GOOD_COPY) from error
        types = {tensor.name: tensor.tensor_type for tensor in read.tensors}
        return cls(values, types, sum(tensor.n_elements for tensor in read.tensors))

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    @property
    def type_counts(self) -> dict[str, int]:
        """The number of tensors by type, the most frequent first."""
        return dict(Counter(kind.name for kind in self.types.values()).most_common())

    @property
    def quantisation(self) -> str:
        """The file's type, and its tensors by type: `Q4_1 (210 Q4_1, 61 F32, 1 Q6_K)`."""
        known = {int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in gguf.LlamaFileType}
        counts = self.type_counts
        name = known.get(self.values.get("general.file_type", -1), next(iter(counts), "empty"))
        return f"{name} ({', '.join(f'{count} {kind}' for kind, count in counts.items())})"

    def require_whole_model(self, file: Path) -> None:
        """Raise BadInputError for a part of a model, and for one without a tokenizer."""
        if self.values.get("split.count", 1) > 1:
            raise BadInputError(
                f"{file} is one of {self.values['split.count']} parts of a model. Join them first: "
                "llama-gguf-split --merge."
            )
        if not self.values.get("tokenizer.ggml.tokens"):
            raise BadInputError(f"{file} holds no tokenizer, which a target needs. Take a file with one.")

    def stretches_positions(self) -> bool:
        """Return whether rotary positions are stretched, which `transformers` does not read from here."""
        scaling = f"{self.architecture}.rope.scaling"
        factor = self.values.get(f"{scaling}.factor", self.values.get(f"{self.architecture}.rope.scale_linear", 1))
        stretched = self.values.get(f"{scaling}.type", "none") != "none" and factor != 1
        return stretched or any(name.startswith(("rope_freqs", "rope_factors")) for name in self.types)


def read_gguf(file: Path, config: PreTrainedConfig | None = None) -> Any:
    """Return the model in `file`, in fp32, as `transformers` reads it, which may be saved as any other.

    `config`: as it was read from there, which takes a while.

    Raises BadInputError if it cannot be read, IncompatibleError if it lacks weights.
    """
    # Newer versions leave weights packed unless told otherwise, and then cannot save the model.
    asked: Any = getattr(transformers, "GgufConfig", None)
    options: dict[str, Any] = {} if asked is None else {"quantization_config": asked(dequantize=True)}
    options |= {} if config is None else {"config": config}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # of the library, which expects good files
        raise BadInputError(f"{file}: cannot be read as GGUF ({first_line(error)}).") from error
    model, info = loaded
    if misfits := sorted(str(name) for name, *_ in info["mismatched_keys"]):  # which the library fills at random
        raise BadInputError(f"{file}: the sizes that transformers reads there do not fit {misfits[0]}.")
    if missing := sorted(info["missing_keys"]):
        raise IncompatibleError(f"{file}: transformers finds no {missing[0]} there, which its architecture has.")
    return model.eval().requires_grad_(False)


def models_folder() -> Path:
    """Return the folder of converted models: in the user's cache folder (`XDG_CACHE_HOME`)."""
    return digest_cache.cache_file().with_name("targets")


def converted(file: Path) -> Path:
    """Return the folder that holds the model of a GGUF, made of it at the first time, under a lock.

    Raises:
        BadInputError: it is damaged, is one of several parts, or has no tokenizer.
        IncompatibleError: `transformers` does not dequantise its architecture.
    """
    digest = file_digest(file)
    folder = models_folder() / digest
    if not (folder / RECORD).is_file():
        header = GgufHeader.of(file)
        header.require_whole_model(file)
        with locked(folder, _PATIENCE):
            if not (folder / RECORD).is_file():
                _log.info("%s (%s) is read once, and kept as float32 in %s", file, header.quantisation, folder)
                _convert(file, header, digest, folder)
    return folder


def gguf_facts(folder: Path) -> dict[str, str]:
    """Return digest and quantisation of the GGUF that the model in `folder` was made of; {} for any other."""
    if folder.parent != models_folder():
        return {}
    record = read_sealed(folder / RECORD, _MAKE_AGAIN)
    return {"gguf": record["sha256"], "gguf_type": record["quantisation"]}


def fetched_folder(name: str) -> Path:
    """Return the folder of a model that was fetched; raises BadInputError if it was not, or has other weights."""
    folder = models_folder() / FETCHED[name].gguf
    if not (folder / RECORD).is_file():
        raise BadInputError(f"{name} is not on this machine yet: run `outrider fetch {name}`.")
    found, expected = read_sealed(folder / RECORD, _MAKE_AGAIN)["weights"], FETCHED[name].weights
    if found != expected:
        raise BadInputError(
            f"{folder}: the weights made of the GGUF have the digest {found[:12]}…, expected {expected[:12]}…: this "
            f"transformers ({transformers.__version__}) computes others. Remove the folder, and take another version."
        )
    return folder


def _convert(file: Path, header: GgufHeader, digest: str, folder: Path) -> None:
    """Write the model of a GGUF into `folder`, with a record, and compare it, read again, with the one in memory."""
    with without_questions():
        model = read_gguf(file, _checked(file, header, folder))
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                str(file.parent), gguf_file=file.name, trust_remote_code=False
            )
        except Exception as error:
            raise BadInputError(f"{file}: its tokenizer cannot be read ({first_line(error)}). {_GOOD_COPY}") from error
    ends = [header.values.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    model.generation_config = GenerationConfig(
        eos_token_id=list(dict.fromkeys(end for end in ends if end is not None)) or None,
        bos_token_id=header.values.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=header.values.get("tokenizer.ggml.padding_token_id"),
    )
    vocab, kind = model.config.get_text_config().vocab_size, type(model)
    expected = few_logits(model, vocab)
    with replacing_folder(folder) as building:
        model.save_pretrained(building, max_shard_size="1TB")
        tokenizer.save_pretrained(str(building))
        write_atomically(building / "tokenizer.json", _vocabulary(tokenizer, header.values["tokenizer.ggml.tokens"]))
        del model  # there may not be memory for two
        again = kind.from_pretrained(building, dtype=torch.float32, use_safetensors=True, trust_remote_code=False)
        require_same_logits(f"{file}, kept as safetensors,", few_logits(again.eval(), vocab), expected, _GOOD_COPY)
        record = {
            "file": file.name,
            "sha256": digest,
            "architecture": header.architecture,
            "quantisation": header.quantisation,
            "types": header.type_counts,
            "weights": digest_json(stored_digests(building / SINGLE)),
            "versions": versions("outrider", "torch", "transformers", "gguf", "safetensors"),
        }
        write_json(building / RECORD, record)
        seal(building)


def _checked(file: Path, header: GgufHeader, folder: Path) -> PreTrainedConfig:
    """Return the config of a GGUF that `transformers` reads as llama.cpp does; no memory is taken for weights yet.

    Raises IncompatibleError for any other, and BadInputError where the disk has no room.
    """
    named = f"{file}: a GGUF of the architecture {header.architecture!r}"
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(file.parent), gguf_file=file.name, trust_remote_code=False
        )
        check_config(json.loads(config.to_json_string(use_diff=False)), str(file))
        with torch.device("meta"), no_more_than(len(header.types), str(file)):
            outline = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except OutriderError:
        raise
    except Exception as error:
        raise IncompatibleError(
            f"{named} is none that transformers {transformers.__version__} dequantises as a causal LM "
            f"({first_line(error)}). Take the model's safetensors."
        ) from error
    if header.stretches_positions() and config.rope_parameters.get("rope_type", "default") == "default":
        raise IncompatibleError(
            f"{named} stretches its rotary positions, which transformers leaves out: long texts would be other ones. "
            "Take the model's safetensors."
        )
    wanted = sum(parameter.numel() for parameter in outline.parameters())
    if wanted > header.elements:
        raise IncompatibleError(
            f"{named} has {wanted:,} parameters by its sizes, and the file holds {header.elements:,}. {_GOOD_COPY}"
        )
    require_space(folder.parent, 4 * wanted, "Free some, or set XDG_CACHE_HOME to a folder on a larger disk.")
    return config


def _vocabulary(tokenizer: Any, count: int) -> str:
    """Return the tokenizer.json without tokens that the library adds on its own, which have no embedding."""
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    values["added_tokens"] = [token for token in values["added_tokens"] if token["id"] < count]
    return json.dumps(values, indent=2, ensure_ascii=False)
