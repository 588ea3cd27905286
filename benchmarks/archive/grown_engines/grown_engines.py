"""Greedy texts of grown folders in transformers, vLLM and llama.cpp, beside the small target's, token for token.

    python -m benchmarks.grown_engines --vllm ~/vllm --llama llama-server --out grown-engines-cpu-fp32.json

Each folder is written by `outrider grow`, in float32. llama.cpp reads what `formats.draft_models.write_gguf` makes of it.
What a program refuses is written down as that. What is in the file already is not measured again.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from typer.testing import CliRunner

from outrider.common import OutriderError
from outrider.decode import Decoder
from outrider.eval.suites import load_suites
from outrider.formats.draft_models import write_gguf
from outrider.scripts.cli import app
from outrider.common.server_process import python_of
from outrider.serving.launching import VllmLaunch, running
from outrider.targets import Target

from .engines import LlamaServer
from .report import command, conditions, options, publish, table

# Each class at sizes of which all programs' copies fit into a machine of 24 GB in float32; the first is whole.
SHAPES: dict[str, tuple[str, ...]] = {
    "0.4b": (),
    "1b": ("num_hidden_layers=12", "vocab_size=32000"),
    "8b": ("hidden_size=2048", "num_hidden_layers=13", "intermediate_size=4096", "vocab_size=32000"),
    "qwen3-8b": ("hidden_size=2048", "num_hidden_layers=13", "intermediate_size=4096", "vocab_size=32000"),
    "qwen3-30b-a3b": ("hidden_size=1024", "num_hidden_layers=12", "num_experts=16", "vocab_size=32000"),
    "mixtral-8x7b": ("hidden_size=1024", "num_hidden_layers=12", "intermediate_size=2048"),
}


def generated(target: Target, prompt: list[int], count: int) -> list[int]:
    """Return what `transformers.generate` writes after a prompt."""
    tokens = torch.tensor([prompt])
    model: Any = target.model
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


def main() -> int:
    parser = options(__doc__, "suites", "threads", limit=2, max_new_tokens=48)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--llama", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    small = Target.load("embedded", dtype="float32", device="cpu")
    tokenizer = small.require_tokenizer()
    suites = load_suites(arguments.suites, tokenizer, arguments.limit)
    prompts = [list(prompt.tokens) for suite in suites for prompt in suite.prompts]
    count = arguments.max_new_tokens
    expected = Decoder(small).generate(prompts, count).tokens
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]
    known = json.loads(arguments.out.read_text())["shapes"] if arguments.out and arguments.out.exists() else {}
    about = conditions(small, prompts=len(prompts), suites=arguments.suites, max_new_tokens=count)
    result: dict[str, Any] = {"conditions": about, "shapes": known}
    for like, changes in SHAPES.items():
        row = known.setdefault(like, {"changes": list(changes)})
        if all(isinstance(row.get(name), int) for name in ("transformers", "vllm", "llama.cpp")):
            continue
        with TemporaryDirectory() as place:
            folder, file = Path(place) / "grown", Path(place) / "grown.gguf"
            words = ["grow", "embedded", "--like", like, "--out", str(folder), "--dtype", "float32", *changes]
            done = CliRunner().invoke(app, words)
            if done.exit_code:
                raise OutriderError(done.output)
            large = Target.load(folder, dtype="float32", device="cpu")
            row["parameters"] = sum(weight.numel() for weight in large.model.parameters())
            if "transformers" not in row:
                own = [generated(large, prompt, count) for prompt in prompts]
                row["transformers"] = sum(a == b for a, b in zip(own, expected, strict=True))
            launches: dict[str, Any] = {}
            if arguments.vllm and not isinstance(row.get("vllm"), int):
                launches["vllm"] = VllmLaunch(python_of(arguments.vllm), str(folder), "float32")
            if arguments.llama and not isinstance(row.get("llama.cpp"), int):
                try:
                    write_gguf(large.model, tokenizer, file)
                    launches["llama.cpp"] = LlamaServer(arguments.llama, file, {})
                except OutriderError as error:
                    row["llama.cpp"] = str(error)
            del large
            gc.collect()
            for name, launch in launches.items():
                try:
                    with running(launch, Path(place) / f"{name}.log") as engine:
                        answers = [engine.complete(prompt, count).text for prompt in prompts]
                    row[name] = sum(a == b for a, b in zip(answers, texts, strict=True))
                except OutriderError as error:
                    row[name] = str(error)
        publish(result, arguments.out, tables(result))
    return 0


def tables(result: dict[str, Any]) -> list[str]:
    """Return how many texts are the small target's."""
    prompts = result["conditions"]["prompts"]
    rows = []
    for like, row in result["shapes"].items():
        told = [row.get(name, "–") for name in ("transformers", "vllm", "llama.cpp")]
        cells = [f"{n} of {prompts}" if isinstance(n, int) else str(n).split("\n")[0] for n in told]
        rows.append([like, ", ".join(row["changes"]) or "–", f"{row['parameters'] / 1e9:.2f}", *cells])
    return [table(["like", "with", "billion parameters", "transformers", "vLLM", "llama.cpp"], rows)]


if __name__ == "__main__":
    sys.exit(command(main))
