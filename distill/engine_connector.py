"""The part of Outrider that runs inside vLLM: it writes the hidden states of each finished request into a file.

vLLM imports this file by `kv_connector_module_path`, so it needs nothing but vLLM's own packages, and holds all that
the engine's side and ours must agree about. Ours imports it, too, without vLLM: for the file's format and digests.

A file `<request>.safetensors` appears whole or not at all. It holds

    hidden_states   [T, K, H], in the engine's own dtype, taps in the order of `layers`; the last one before the norm
    token_ids       [T]
    outrider        in its metadata, JSON: `EngineFacts`, and the digest of the two tensors

The first process of a tensor-parallel group writes, in threads. Files that wait to be read take `disk_budget` bytes at
most: then the engine itself waits, so that neither memory nor the disk fills.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

if "vllm" in sys.modules:  # which imports this file; on our side vLLM is not imported, even where it is installed
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as theirs
else:
    theirs = None

VERSION = 1  # of the file's format and of what its facts mean
NAME = "OutriderHiddenStates"
SUFFIX, FAILED = ".safetensors", ".failed"
_BLOCK, _BLOCKS = 4096, 1024  # of each file of a checkpoint, of which the digest is made
_WAIT_SECONDS, _POLL_SECONDS = 120.0, 0.05  # for room on the disk


@dataclass(frozen=True)
class EngineFacts:
    """The facts of an engine that writes states.

    Attributes:
        version: of the connector. instance: of this start of the engine, never the same twice.
        layers: HF `hidden_states` indices of the taps, ascending, as vLLM writes them. num_layers: of the target.
        dtype: of the states.
        quantization: of the weights as they are served, by the checkpoint's own name for it; "" for none.
        weights: `checkpoint_digest` of the target's folder as the engine started.
    """

    version: int
    instance: str
    layers: tuple[int, ...]
    num_layers: int
    dtype: str
    quantization: str
    weights: str


def tensors_digest(hidden_states: torch.Tensor, token_ids: torch.Tensor) -> str:
    """Return the SHA-256 of a file's tensors: their shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in (hidden_states, token_ids):
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{data.dtype}{tuple(data.shape)}".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checkpoint_digest(folder: str | Path) -> str:
    """Return a digest of a checkpoint's files that is made in seconds whatever their size.

    It covers names, sizes and headers of the files that the index names (of all of them without an index), config.json,
    and blocks of 4 KB at 1024 places of each file: a model that was trained further has another one. It tells copies
    apart that were mixed up, not ones that were forged.
    """
    digest, index = hashlib.sha256(), Path(folder) / "model.safetensors.index.json"
    files = sorted(Path(folder).glob("*.safetensors"))
    if (single := Path(folder) / "model.safetensors").exists():
        files = [single]
    elif index.exists():
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [file for file in files if file.name in named]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
            digest.update(opened.read(min(header, size)))
            for begin in range(0, size, max(_BLOCK, size // _BLOCKS)):
                opened.seek(begin)
                digest.update(opened.read(_BLOCK))
    config = Path(folder) / "config.json"
    digest.update(config.read_bytes() if config.exists() else b"")
    return digest.hexdigest()


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """Yield a file that takes the place of `file` when the block ends well."""
    part = file.with_name(f".{file.name}.part")
    yield part
    os.replace(part, file)


def write_states(file: Path, hidden_states: torch.Tensor, token_ids: torch.Tensor, facts: EngineFacts) -> None:
    """Write a request's file, all of it or nothing."""
    tensors = {"hidden_states": hidden_states.contiguous(), "token_ids": token_ids.contiguous()}
    said = json.dumps({**asdict(facts), "digest": tensors_digest(**tensors)})
    with _replacing(file) as part:
        save_file(tensors, part, metadata={"outrider": said})


def wait_for_room(folder: Path, needed: int, budget: int, seconds: float = _WAIT_SECONDS) -> bool:
    """Wait until `needed` more bytes of states are within the budget of `folder`; return False if they never are.

    One file always has room, however large.
    """
    limit = time.monotonic() + seconds
    while True:
        waiting = 0
        for entry in os.scandir(folder):
            if entry.name.endswith((SUFFIX, ".part")):
                with suppress(FileNotFoundError):  # just read
                    waiting += entry.stat().st_size
        if not waiting or waiting + needed <= budget:
            return True
        if time.monotonic() > limit:
            return False
        time.sleep(_POLL_SECONDS)


_FINISHED = SimpleNamespace(query=lambda: True, synchronize=lambda: None)  # the event of a copy on a CPU


def _model_folder(config: Any) -> str:
    """Return the folder that vLLM loaded its model from."""
    if os.path.isdir(config.model):
        return str(config.model)
    from huggingface_hub import snapshot_download

    return str(snapshot_download(config.model, revision=config.revision, local_files_only=True))


def require_plain(config: Any) -> None:
    """Raise ValueError if an engine of this `VllmConfig` leaves tokens out, or serves another model than its files."""
    if config.cache_config.enable_prefix_caching:
        raise ValueError("hidden states of a cached prefix are not computed: start with --no-enable-prefix-caching")
    if config.scheduler_config.enable_chunked_prefill:
        raise ValueError("hidden states need whole prompts: start with --no-enable-chunked-prefill")
    if config.model_config.hf_overrides:
        raise ValueError("it would serve another model than its files: start without --hf-overrides")
    if config.lora_config is not None:
        raise ValueError("an adapter makes other states than its files: start without --enable-lora; merge it instead")
    if config.parallel_config.data_parallel_size > 1:
        raise ValueError("states are trusted of one engine: start without --data-parallel-size")


def quantization_of(model: Any) -> str:
    """Return the checkpoint's own name for its quantisation; if it has none, that of the engine's. "" for none."""
    for config in (model.hf_config, model.hf_text_config):
        if found := getattr(config, "quantization_config", None):
            method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
            return str(getattr(method, "value", method) or "")
    return str(getattr(model, "quantization", None) or "")


def _facts(config: Any) -> EngineFacts:
    """Return the facts of an engine with this `VllmConfig`."""
    drafting, model = config.speculative_config.draft_model_config.hf_config, config.model_config
    return EngineFacts(
        version=VERSION,
        instance=uuid.uuid4().hex,
        layers=tuple(sorted(set(drafting.eagle_aux_hidden_state_layer_ids))),
        num_layers=int(model.hf_text_config.num_hidden_layers),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=quantization_of(model),
        weights=checkpoint_digest(_model_folder(model)),
    )


class OutriderHiddenStates(object if theirs is None else theirs.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """A KV connector that writes hidden states, on a CPU or a GPU. Extra settings: `disk_budget`, in bytes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None):
        require_plain(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._kv_transfer_config.kv_connector_extra_config
        self.use_lock = False  # a file is there when it is whole
        self._budget = int(settings["disk_budget"])
        self._config = vllm_config
        self._said: EngineFacts | None = None
        self._patience = _WAIT_SECONDS
        self._queued, self._counting = 0, threading.Lock()  # bytes that threads have still to write
        os.makedirs(self._storage_path, exist_ok=True)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero:  # which alone writes, and so alone reads the checkpoint
            self._said = _facts(self._config)

    def _submit_async_write(self, pending: Any) -> None:
        """Copy a finished request's states out of the cache, and have a thread write them."""
        if not self._is_tp_rank_zero:
            return
        states, copied = self._copied(pending)
        file = Path(pending.filename)
        has_room = wait_for_room(file.parent, self._queued + states.nbytes, self._budget, self._patience)
        self._patience = _WAIT_SECONDS if has_room else 0.0  # several rows wait as long as one: vLLM has its own limit
        if has_room:
            self._count(states.nbytes)
            future = self._executor.submit(self._write, file, states, pending.token_ids.clone(), copied)
            self._req_futures[pending.req_id] = future
            future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))
        else:
            _say_failed(file, f"its disk budget of {self._budget} bytes is full, and the states in it are not read")
        self._req_copy_events[pending.req_id] = copied

    def _copied(self, pending: Any) -> tuple[torch.Tensor, Any]:
        """Return a request's states `[T, K, H]` in main memory, and the event that tells when the copy is finished."""
        cache, size = self._kv_cache, self._block_size
        blocks = torch.tensor(pending.block_ids, dtype=torch.long, device=cache.device)
        slots = (blocks[:, None] * size + torch.arange(size, device=cache.device)).flatten()
        count = pending.token_ids.shape[0]
        if cache.device.type == "cpu":
            return theirs.extract_from_kv_cache(cache, slots, count).clone(), _FINISHED
        found = theirs.extract_from_kv_cache(cache, slots, count)
        states = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        states.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return states, event

    def _write(self, file: Path, states: torch.Tensor, token_ids: torch.Tensor, copied: Any) -> None:
        copied.synchronize()
        try:
            assert self._said is not None
            write_states(file, states, token_ids, self._said)
        except Exception as error:
            _say_failed(file, repr(error))
            raise
        finally:
            self._count(-states.nbytes)

    def _count(self, num_bytes: int) -> None:
        with self._counting:
            self._queued += num_bytes


def _say_failed(file: Path, why: str) -> None:
    """Leave a sentence where the states would be, for the client that waits for them."""
    with suppress(OSError), _replacing(file.with_suffix(FAILED)) as part:  # without a disk the client's time runs out
        part.write_text(why[:1000], encoding="utf-8")
