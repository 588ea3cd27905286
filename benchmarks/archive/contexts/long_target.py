"""The embedded target, continued on long rows with rotary positions of an eighth: it holds contexts.

    python benchmarks/archive/contexts/long_target.py runs/long-target
    python benchmarks/archive/contexts/long_target.py runs/longer-target --factor 32 --lengths 3072x30 16384x4 \
        --suite runs/library.jsonl

The embedded target learned from rows of 512 tokens at most: beyond, it says other things for itself, and a fall of τ
there is its own as much as a drafter's. This one learns 40 rows of the same texts (`archive/make_embedded`), held-out
files left out. With a larger factor it holds longer ones. `--suite` writes prompts of held-out files.
"""

from __future__ import annotations

import argparse
import json
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

LINES, PIECES = 32, 120


def main(asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    out, path = asked.out, embedded_path()
    tokenizer, config = AutoTokenizer.from_pretrained(path), LlamaConfig.from_pretrained(path)
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": asked.factor}
    rows = [map(int, each.split("x")) for each in asked.lengths]
    lengths = [length for length, count in rows for _ in range(count)]
    config.max_position_embeddings = max(config.max_position_embeddings, *lengths)
    config.dtype = "float32"
    model = LlamaForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).train()
    files = read_library(Path(sysconfig.get_paths()["stdlib"]))
    if asked.suite:
        asked.suite.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in held_out_texts(files)))
    texts = [text for name, text in files.items() if not is_held_out(name) and "site-packages" not in name]
    random.Random(0).shuffle(texts)
    tokens: list[int] = []
    while len(tokens) <= sum(lengths):
        tokens += [*tokenizer(texts.pop(0))["input_ids"], 0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    steps = len(lengths)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 5) * min(1, (steps - step) / (0.6 * steps))
    )
    for step, length in enumerate(lengths):
        row, tokens = torch.tensor([tokens[:length]]), tokens[length:]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(row).logits[0, :-1].float()
        lost = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")
        lost.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        late, early = length * 2 // 3, f"{lost[:512].mean():.3f} in the first 512 places"
        print(step, f"{early}, {lost[late:].mean():.3f} from {late} on", flush=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name in ("generation_config.json", "chat_template.jinja"):
        shutil.copy(Path(path) / name, out / name)


def held_out_texts(files: dict[str, str]) -> list[str]:
    """Return pieces of files that the target never saw."""
    pieces = []
    for name in sorted(name for name in files if is_held_out(name) and "site-packages" not in name):
        lines = files[name].splitlines(keepends=True)
        pieces += ["".join(lines[i : i + LINES]) for i in range(0, len(lines) - LINES, LINES)]
    return random.Random(0).sample(pieces, PIECES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--factor", type=float, default=8.0, help="of the rotary positions")
    parser.add_argument("--lengths", nargs="+", default=["3072x40"], help="rows: so many tokens, so many times")
    parser.add_argument("--suite", type=Path, help="a file of prompts to write")
    main(parser.parse_args())
