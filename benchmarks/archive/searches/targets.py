"""Two small targets of other families, for searches of recipes: every second layer of the embedded one, taught anew.

    python benchmarks/archive/searches/targets.py qwen3 runs/qwen3
    python benchmarks/archive/searches/targets.py gemma3 runs/gemma3

Six layers with the embedded target's embeddings and matrices, in Qwen3's shape (norms of queries and keys, two queries
to a key) or Gemma 3's (four norms a layer, GELU, scaled embeddings, five windows of 128 to one full layer). For
`SECONDS` of processor time they learn the texts of `archive/make_embedded`, held-out files left out.
"""

from __future__ import annotations

import math
import random
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider.targets import embedded_path

sys.path.insert(0, str(Path(__file__).parents[1] / "make_embedded"))
from make_embedded import is_held_out, read_library

SECONDS, ROWS, LENGTH, PEAK = 360, 4, 512, 3e-3


def config_of(family: str, given: LlamaConfig) -> Any:
    """Return the embedded target's config in another family's words, with half its layers."""
    layers = given.num_hidden_layers // 2
    names = "vocab_size hidden_size intermediate_size num_attention_heads head_dim rms_norm_eps max_position_embeddings"
    values = {name: getattr(given, name) for name in names.split()} | {"num_hidden_layers": layers}
    values |= {"num_key_value_heads": given.num_attention_heads // 2, "tie_word_embeddings": True}
    values |= {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None, "dtype": "float32"}
    if family == "qwen3":
        return Qwen3Config(**values)
    return Gemma3TextConfig(**values, query_pre_attn_scalar=given.head_dim, sliding_window=128)


def weights_of(family: str, given: dict[str, torch.Tensor], heads: int, hidden: int) -> dict[str, torch.Tensor]:
    """Return the embedded target's weights by the other family's names; two keys of it become one, their mean."""
    found = {}
    for name, weight in given.items():
        if ".layers." in name:
            layer = int(name.split(".")[2])
            if layer % 2:
                continue
            name = name.replace(f".layers.{layer}.", f".layers.{layer // 2}.")
        if "k_proj" in name or "v_proj" in name:
            weight = weight.view(heads // 2, 2, -1, hidden).mean(1).flatten(0, 1)
        if family == "gemma3" and "embed_tokens" in name:
            weight = weight / math.sqrt(hidden)
        if family == "gemma3" and "norm" in name:
            name = name.replace("post_attention_layernorm", "pre_feedforward_layernorm")
            weight = weight - 1
        found[name] = weight
    return found


def main(family: str, out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = embedded_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    given = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    model: Any = {"qwen3": Qwen3ForCausalLM, "gemma3": Gemma3ForCausalLM}[family](config_of(family, given.config))
    heads, hidden = given.config.num_attention_heads, given.config.hidden_size
    told = model.load_state_dict(weights_of(family, given.state_dict(), heads, hidden), strict=False)
    print(told.unexpected_keys, sorted({key.split(".", 3)[-1] for key in told.missing_keys}))
    files = read_library(Path(sysconfig.get_paths()["stdlib"]))
    texts = [text for name, text in files.items() if not is_held_out(name) and "site-packages" not in name]
    random.Random(0).shuffle(texts)
    tokens = [t for text in texts for t in [*tokenizer(text)["input_ids"], 0]]
    rows = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
    rows = rows[torch.randperm(len(rows))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.0)
    began, step, share = time.process_time(), 0, 0.0
    while share < 1:
        batch = rows[torch.arange(step * ROWS, step * ROWS + ROWS) % len(rows)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = PEAK * min(1, (step + 1) / 20) * min(1, (1 - share) / 0.8)
        optimizer.step()
        optimizer.zero_grad()
        step, share = step + 1, (time.process_time() - began) / SECONDS
        if step % 20 == 0:
            print(step, f"{share:.0%}: {loss.item():.3f}", flush=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name in ("generation_config.json", "chat_template.jinja"):
        shutil.copy(Path(path) / name, out / name)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
