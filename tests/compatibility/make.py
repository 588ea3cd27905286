"""Write files of this version, which every later one must read: `python tests/compatibility/make.py FOLDER`.

A tiny random target, a drafter of each type with its loss on one text, and by the command a run with stored hidden
states, a report, a tuned pair and a registry. `tar cJf DATE.tar.xz -C FOLDER .` packs them for the tests beside this.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.heads import HEADS, Drafter, LowRank, TargetBatch, fuse, load_drafter
from outrider.heads.registry import drafter_config
from outrider.targets import Target

TEXT = ["def add(first, second):\n    return first + second\n"] * 4
RECIPE = {
    "name": "tiny",
    "target": {"path": "target"},
    "drafter": {"type": "eagle1"},
    "data": {"prompts": ["prompts.jsonl"], "max_new_tokens": 6, "holdout": 0.0, "features": "cached"},
    "training": {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", "disable_tqdm": True},
    "eval": {"suites": ["suite.jsonl"], "max_new_tokens": 6, "repeats": 1, "temperatures": [0.0], "depth": 2},
    "output": "run",
}
MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
SETTINGS: dict[str, dict] = {"draft_model": {"model": MODEL}, "pard": {"model": MODEL, "mask_token_id": 299}}
SETTINGS |= {"dflash2": {"selector_rank": 8}, "dspark": {"markov_rank": 8}}


def make_target(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(special_tokens=["<eos>"], initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    more = {"vocab_size": 300, "num_key_value_heads": 1, "max_position_embeddings": 128, "eos_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**sizes, **more, pad_token_id=0)).save_pretrained(folder)


def loss_of(drafter: Drafter, target: Target) -> float:
    """The sum of a drafter's loss on one text."""
    tokens = torch.arange(5, 29)[None]
    supervised = torch.ones_like(tokens, dtype=torch.bool)
    supervised[:, :4] = False
    with torch.no_grad():
        out = target.forward(tokens, taps=drafter.taps, logits=False)
        return float(drafter.eval().loss(TargetBatch(target, tokens, supervised, out.hidden, out.last)).total)


def make_drafters(folder: Path, target: Target) -> None:
    losses, counts = {}, torch.arange(target.vocab_size)
    for kind in sorted(HEADS.keys() - {"cascade", "fusion"}):
        torch.manual_seed(0)
        head, config = drafter_config({"type": kind, **SETTINGS.get(kind, {})})
        drafter = head.build(config, target, counts)
        for parameter in drafter.parameters():  # those that begin at zero would change nothing; few values pack well
            parameter.data = ((parameter.data + 0.05 * torch.randn(parameter.shape)) * 16).round() / 16
        drafter.save(folder / kind)
        losses[kind] = loss_of(load_drafter(folder / kind, target), target) if drafter.trainable else None
    fuse({"type": "ngram"}, load_drafter(folder / "eagle1", target)).save(folder / "fusion")
    LowRank.over(folder / "eagle1", target, 2).save(folder / "low_rank")
    (folder / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")


def outrider(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "outrider.scripts.cli", *words], cwd=folder, check=True)


def main(folder: Path) -> None:
    make_target(folder / "target")
    make_drafters(folder / "drafters", Target.load(folder / "target"))
    for name, function in (("prompts", "learn"), ("suite", "ask")):
        rows = [{"id": f"p{i}", "text": f"def {function}_{i}(first, second):\n"} for i in range(3)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    outrider(folder, "train", "tiny.yaml")
    outrider(folder, "eval", "tiny.yaml")
    outrider(folder, "pair", "new", "pair", "tiny.yaml")
    outrider(folder, "tune", "pair", "--limit", "1", "--max-new-tokens", "4")
    outrider(folder, "pair", "push", "pair", "--registry", "registry")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
