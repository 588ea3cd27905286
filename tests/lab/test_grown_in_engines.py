"""Grown folders are ordinary models: `OUTRIDER_VLLM_PYTHON=… OUTRIDER_LLAMA_SERVER=… ./scripts/test -m served`."""

from __future__ import annotations

import gc
import json
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.common.server_process import python_of
from outrider.decode import Decoder
from outrider.eval.suites import load_suites
from outrider.formats.draft_models import write_gguf
from outrider.scripts.cli import app
from outrider.serving.launching import LlamaLaunch, VllmLaunch, running
from outrider.targets import Target

from ..conftest import place_of

pytestmark = pytest.mark.served
TOKENS, PROMPTS = 48, 2  # of each suite
# Each class at sizes of which four engines' copies fit into 24 GB in float32; the first is whole.
GROWN = {
    "0.4b": (),
    "1b": ("num_hidden_layers=12", "vocab_size=32000"),
    "8b": ("hidden_size=2048", "num_hidden_layers=13", "intermediate_size=4096", "vocab_size=32000"),
    "qwen3-8b": ("hidden_size=2048", "num_hidden_layers=13", "intermediate_size=4096", "vocab_size=32000"),
    "qwen3-30b-a3b": ("hidden_size=1024", "num_hidden_layers=12", "num_experts=16", "vocab_size=32000"),
    "mixtral-8x7b": ("hidden_size=1024", "num_hidden_layers=12", "intermediate_size=2048"),
}


def generated(target: Target, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    model: Any = target.model
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=TOKENS, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("like", GROWN)
def test_transformers_vllm_and_llama_cpp_write_the_small_models_text(like, tmp_path):
    """Greedily and in float32, from the folder that `outrider lab grow` writes, token for token."""
    python, program = place_of("OUTRIDER_VLLM_PYTHON", "a vLLM"), place_of("OUTRIDER_LLAMA_SERVER", "a llama-server")
    folder, file = tmp_path / "grown", tmp_path / "grown.gguf"
    words = ["lab", "grow", "embedded", "--like", like, "--out", str(folder), "--dtype", "float32", *GROWN[like]]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    small = Target.load("embedded", dtype="float32", device="cpu")
    suites = load_suites(["code", "docs", "prose"], small.require_tokenizer(), PROMPTS)
    prompts = [list(prompt.tokens) for suite in suites for prompt in suite.prompts]
    expected = Decoder(small).generate(prompts, TOKENS).tokens
    large = Target.load(folder, dtype="float32", device="cpu")
    assert [generated(large, prompt) for prompt in prompts] == expected
    write_gguf(large.model, large.require_tokenizer(), file)
    del large
    gc.collect()
    for launch in (VllmLaunch(python_of(python), str(folder), "float32"), LlamaLaunch(program, file, {})):
        with ExitStack() as stack:
            engine = stack.enter_context(running(launch, tmp_path / "log"))
            answers = [engine.complete(prompt, TOKENS) for prompt in prompts]
        texts = [small.require_tokenizer().decode(tokens, skip_special_tokens=True) for tokens in expected]
        assert [answer.text for answer in answers] == texts, json.dumps(launch.command(0))
