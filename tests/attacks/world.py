"""A small world of files that a stranger may have written: a target, prompts, a recipe, a run, pairs, an adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TEXT = [
    "def add(first, second):\n    return first + second\n",
    "for name in sorted(names):\n    print(name, len(name))\n",
    "The target verifies what the drafter proposes, and the text stays the same.\n",
]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class Attempt:
    """A change to a world, the commands that then read it, and the file that was changed, if it is one."""

    name: str
    plant: Callable[[Path], None]
    commands: list[list[str]]
    file: str = ""


def make_world(folder: Path) -> None:
    """Write everything into `folder`; relative paths in it hold in any copy."""
    from runner import run

    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = make_tokenizer(TEXT, 300, special, chat_template=TEMPLATE)
    for seed, (name, layers) in enumerate({"target": 6, "small": 1}.items()):
        make_llama(tokenizer, seed, num_hidden_layers=layers).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    _adapter(folder)
    rows = [{"id": f"p{i}", "text": text} for i, text in enumerate(TEXT * 2)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [{"id": f"c{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(TEXT)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    commands = []
    for name, drafter in {
        "eagle": {"type": "eagle3", "steps": 2, "draft_vocab_size": 64},
        "draft": {"type": "draft_model", "path": "small"},
        "medusa": {"type": "medusa", "num_heads": 2},
        "mtp": {"type": "mtp", "steps": 2},
    }.items():
        _write_recipe(folder / f"{name}.yaml", name, drafter)
        commands += [["train", f"{name}.yaml"], ["pair", "new", f"pair-{name}", f"{name}.yaml"]]
    for command in [*commands, ["eval", "eagle.yaml", "--out", "report"]]:
        said = run(command, folder)
        assert said.code == 0, said.said
    (folder / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    (folder / ".said").unlink()


def copied(world: Path, folder: Path) -> Path:
    """Return a copy of the world, in which one attack may change what it likes."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(world, folder, symlinks=True)
    return folder


def reseal(pair: Path) -> None:
    """Make pair.json true again for whatever was changed beside it, as a stranger can."""
    from outrider.pair.manifest import Manifest
    from outrider.targets.fingerprint import digest_file, digest_files

    values = json.loads((pair / "pair.json").read_text())
    values["drafter"]["files"] = digest_files(pair / "drafter")
    values["target"]["tokenizer_files"] = digest_files(pair / "tokenizer")
    if (pair / "adapter").is_dir():
        values["target"]["adapter_files"] = digest_files(pair / "adapter")
    values["recipe"] = digest_file(pair / "recipe.yaml")
    if (pair / "calibration.jsonl").exists():
        values["calibration"] = digest_file(pair / "calibration.jsonl")
    manifest = Manifest.model_validate(values).identified()
    there = [name for name in manifest.files() if (pair / name).is_file()]
    sizes = {name: (pair / name).stat().st_size for name in there}
    manifest.model_copy(update={"sizes": sizes}).sealed().write(pair)


def _write_recipe(file: Path, name: str, drafter: dict[str, Any]) -> None:
    recipe = {
        "name": name,
        "target": {"path": "target", "dtype": "float32"},
        "drafter": drafter,
        "data": {
            "prompts": ["prompts.jsonl"],
            "max_new_tokens": 8,
            "batch_size": 2,
            "holdout": 0.0,
            "allow_leaks": True,
        },
        "training": {"max_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True},
        "eval": {"suites": ["prompts.jsonl"], "limit": 2, "max_new_tokens": 8, "repeats": 1, "temperatures": [0.0]},
        "output": f"run-{name}",
    }
    recipe["eval"] |= {"depth": 2, "baselines": []}
    file.write_text(yaml.safe_dump(recipe))


def make_tokenizer(texts: list[str], size: int, special: list[str], **more: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", **more)


def make_llama(tokenizer: Any, seed: int, **changes: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    values = SIZES | {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**values | changes))


def _adapter(folder: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(folder / "target", trust_remote_code=False)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(folder / "adapter")
