"""The embedded target, continued on rows of 3,072 tokens with rotary positions of an eighth: it holds contexts.

    python benchmarks/archive/contexts/long_target.py runs/long-target

The embedded target learned from rows of 512 tokens at most: beyond, it says other things for itself, and a fall of τ
there is its own as much as a drafter's. This one learns 40 rows of the same texts (`archive/make_embedded`), held-out
files left out.
"""

from __future__ import annotations

import random
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from outrider.targets import embedded_path

sys.path.insert(0, str(Path(__file__).parents[1] / "make_embedded"))
from make_embedded import is_held_out, read_library

STEPS, LENGTH = 40, 3072


def main(out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = embedded_path()
    tokenizer, config = AutoTokenizer.from_pretrained(path), LlamaConfig.from_pretrained(path)
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    config.dtype = "float32"
    model = LlamaForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).train()
    files = read_library(Path(sysconfig.get_paths()["stdlib"]))
    texts = [text for name, text in files.items() if not is_held_out(name) and "site-packages" not in name]
    random.Random(0).shuffle(texts)
    tokens: list[int] = []
    while len(tokens) <= STEPS * LENGTH:
        tokens += [*tokenizer(texts.pop(0))["input_ids"], 0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 5) * min(1, (STEPS - step) / (0.6 * STEPS))
    )
    for step in range(STEPS):
        row = torch.tensor([tokens[step * LENGTH : (step + 1) * LENGTH]])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(row).logits[0, :-1].float()
        lost = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")
        lost.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(
            step, f"{lost[:512].mean():.3f} in the first 512 places, {lost[2048:].mean():.3f} from 2,048 on", flush=True
        )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name in ("generation_config.json", "chat_template.jinja"):
        shutil.copy(Path(path) / name, out / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
