"""What __main__.py is made of: the package's names, digests of exact bits, the record of cases, and tiny models."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any

# The libraries read these when they are imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}

import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Names by the modules that may hold them, all under `outrider`; `Old|New` is one name that has changed.
PLACES = {
    "targets": "Target",
    "heads": "HEADS Drafter TargetBatch drafter_config load_drafter",
    "heads.losses heads.divergences": "DIVERGENCES divergence Reference|TargetDistribution",
    "heads.losses": "chunked_compare ComparisonSettings|LossSettings",
    "heads.parts.unrolled_attention heads.unrolled_attention heads.eagle.unrolled_attention": "attend plain Span",
    "formats": "LAYOUTS export_drafter import_drafter",
    "formats.lint": "lint",
    "decode": "Decoder Plan Sampling best_tree",
    "decode.verify decode.rules": "match rejection block",
    "decode.verify_tree decode.rules": "match_tree without_replacement traversal typical",
    "decode.rng": "uniforms",
    "decode.sampling": "draw probabilities penalize shared_gumbel",
    "recipes": "load_recipe packaged_recipes",
    "train": "train",
}
TABLES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))


class Package:
    """The package's names, under their first name here, each from the first of its places that has it."""

    def __getattr__(self, name: str) -> Any:
        for modules, names in PLACES.items():
            alike = next((listed.split("|") for listed in names.split() if listed.split("|")[0] == name), [])
            for module, now in product(modules.split(), alike):
                try:
                    return getattr(importlib.import_module(f"outrider.{module}"), now)
                except (ModuleNotFoundError, AttributeError):
                    continue
        raise LookupError(f"missing: {name}")


at = Package()


def bits(value: Any) -> Iterator[bytes]:
    """Yield the exact bits of a nested value, without the names of its classes and fields."""
    if isinstance(value, Tensor):
        held = value.detach().contiguous()
        yield f"{held.dtype}{tuple(held.shape)}".encode() + held.flatten().view(torch.uint8).numpy().tobytes()
    elif is_dataclass(value):
        yield from bits([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, list | tuple | dict):
        yield f"[{len(value)}".encode()
        for inner in value.items() if isinstance(value, dict) else value:
            yield from bits(inner)
    else:
        yield (value.hex() if isinstance(value, float) else repr(value)).encode() + b";"


def digest(value: Any) -> str:
    return hashlib.sha256(b"".join(bits(value))).hexdigest()[:16]


class Cases:
    """What each case gave, by its name: a text, or lines whose order means nothing."""

    def __init__(self) -> None:
        self.results: dict[str, str | list[str]] = {}

    def note(self, name: str, make: str | Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """Record what `make` (or the package's function of that name) gives, or how it fails; return the result."""
        result = None
        try:
            result = (getattr(at, make) if isinstance(make, str) else make)(*inputs, **named)
            text = result if isinstance(result, str) else digest(result)
        except Exception as error:  # a failure must be the same on both sides, too
            code, lines = getattr(error, "exit_code", None), str(error).splitlines() or [""]
            failed = lines[0] if isinstance(error, LookupError) else f"failed: {type(error).__name__}: {lines[0]}"
            text = failed if code is None else f"refused with exit code {code}"
        self.add(name, text)
        return result

    def add(self, name: str, text: str | list[str]) -> None:
        if name in self.results:
            raise ValueError(f"two cases are called {name!r}")
        self.results[name] = text

    def files(self, name: str, folder: Path) -> None:
        """Record weights, with names and without, and configs, without versions and paths, of all files in a folder."""
        for file in sorted(folder.rglob("*")):
            case = f"{name}/{file.relative_to(folder)}"
            if file.suffix == ".safetensors":
                weights = {key: (list(tensor.shape), digest(tensor)) for key, tensor in load_file(file).items()}
                self.add(f"{case} by content", digest(sorted(held for _, held in weights.values())))
                self.add(f"{case} by name", sorted(f"{key} {shape} {held}" for key, (shape, held) in weights.items()))
            elif file.suffix == ".gguf":
                self.add(case, digest(file.read_bytes()))
            elif file.name.endswith("config.json"):
                self.add(case, digest(json.dumps(json.loads(file.read_text(), object_hook=lasting), sort_keys=True)))


def lasting(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings without what differs between versions, machines and runs; peft writes sets as lists."""
    kept = {k: v for k, v in values.items() if not re.search("version|path|runtime|second", k)}
    return {k: sorted(v) if k == "target_modules" else v for k, v in kept.items()}


class Products(TorchDispatchMode):
    """A mode that keeps a digest of every product of matrices, attention and softmax, whichever code asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **kwargs or {})
        if re.search("linear|mm|attention|softmax|conv", operation.name()):
            self.digests += [digest(x) for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
        return result


def differences(before: dict[str, Any], after: dict[str, Any], renamed: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield one text for each case that differs, or that only one fingerprint has."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, "no such case"), after.get(name, "no such case")
        if isinstance(old, list) and isinstance(new, list):
            for pattern, replacement in renamed:
                old = [re.sub(pattern, replacement, line) for line in old]
            old, new = [line for line in old if line not in new], [line for line in new if line not in old]
        if old != new:
            yield f"{name}\n  - {old}\n  + {new}"


WITHOUT_WEIGHTS = {"cascade", "fusion", "lookahead", "ngram", "suffix"}  # of their own


def model(kind: str = "llama", seed: int = 0, dtype: str = "float32", **values: Any) -> Any:
    """Return a new random model of the library."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **TABLES["llama"] | values)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return made.eval().requires_grad_(False)


def drafter_of(name: str, target: Any, settings: dict[str, Any] | None = None) -> Any:
    """Return a new drafter for `target`, none of whose weights is zero: that would hide what it reads."""
    kind, values = name.split()[0], dict(TABLES["drafters"][name] if settings is None else settings)
    parts = values.pop("parts", ())
    head, config = at.drafter_config({"type": kind} | values)
    torch.manual_seed(3)
    if parts:
        drafter = head(*(drafter_of(part, target) for part in parts), config)
    elif kind in ("draft_model", "pard"):
        drafter = head(model(seed=1, vocab_size=target.vocab_size, num_hidden_layers=2, eos_token_id=None), config)
    else:
        drafter = head.build(config, target, torch.randperm(target.vocab_size))
    for _, parameter in sorted(drafter.named_parameters(), key=lambda named: lasting_name(named[0])):
        parameter.data += 0.05 * torch.randn(parameter.shape).to(parameter.dtype)
    return drafter


def lasting_name(name: str) -> str:
    """Return a weight's name as it is today: EAGLE's layers were `layer`, then `others.0`, and so on."""
    name = re.sub(r"^layer\.", "layers.0.", name)
    return re.sub(r"^others\.(\d+)", lambda match: f"layers.{int(match[1]) + 1}", name)


def save(folder: str, *settings: Any) -> str:
    """Save a new drafter, and return its own digest."""
    drafter = drafter_of(*settings)
    drafter.save(folder)
    return str(drafter.digest())


def narrow_target(embedded: Any) -> Any:
    """Return a narrow random target with the embedded one's tokenizer."""
    tokenizer = embedded.require_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return at.Target(model(vocab_size=embedded.vocab_size, **ends), tokenizer)


def native_checkpoint(folder: Path) -> Path:
    """Write a small checkpoint with an MTP module, which `transformers` neither makes nor saves; return its folder."""
    model("qwen3_next", **TABLES["families"]["qwen3_next"]).save_pretrained(folder)
    weights, last = load_file(folder / "model.safetensors"), "model.layers.3."
    weights |= {n.replace(last, "mtp.layers.0."): t.clone() for n, t in weights.items() if n.startswith(last)}
    weights |= {f"mtp.{n}.weight": torch.zeros(32) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    save_file(weights | {"mtp.fc.weight": 0.1 * torch.randn(32, 64)}, folder / "model.safetensors", {"format": "pt"})
    return folder
