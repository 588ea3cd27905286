"""A drafter whose target lives in an engine is measured there: here our own decoder after a server of vLLM's interface.

The last test takes a target that our decoder refuses through everything, in a real vLLM:
`OUTRIDER_VLLM_PYTHON=/path/to/its/environment ./scripts/test -m served tests/serving/test_engine_report.py`
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan, Round
from outrider.distill.prompt_table import Prompt
from outrider.distill.responses import target_in_engine
from outrider.eval import Report
from outrider.eval.measure import Contestant, measure
from outrider.eval.suites import make_suite
from outrider.heads import Eagle3, Eagle3Config
from outrider.pair import export_pair, new_pair
from outrider.recipes import EngineSpec, EvalSpec, Recipe
from outrider.scripts.eval_setup import EvalOptions, load_setup
from outrider.serving.engine import Engine
from outrider.serving.engine_metrics import DraftCounts
from outrider.serving.engine_report import EngineRacer, measure_in_engine, rounds_of
from outrider.targets import Target, embedded_path

from ..conftest import make_llama, place_of


def test_rounds_are_those_that_the_engine_counted_whatever_their_order() -> None:
    rounds = [Round(3, 2, 3), Round(3, 0, 1), Round(3, 3, 4), Round(3, 0, 1)]
    found = rounds_of(DraftCounts.of(rounds), 3)
    assert sorted(r.accepted for r in found) == [0, 0, 2, 3]
    assert DraftCounts.of(found) == DraftCounts.of(rounds)
    assert rounds_of(DraftCounts(), 0) == []
    with pytest.raises(BadInputError, match="beyond the depth of 2"):
        rounds_of(DraftCounts.of(rounds), 2)
    with pytest.raises(BadInputError, match="by position"):
        rounds_of(DraftCounts(rounds=4, drafted=12, accepted=5), 3)


@pytest.fixture
def entrant(tiny_target: Target) -> Contestant:
    torch.manual_seed(3)
    head = Eagle3.build(Eagle3Config(steps=2, taps=(2, 4, 5), draft_vocab_size=0), tiny_target).eval()
    return Contestant.of(head.name, head, Plan(depth=3))


def reports(tiny_target: Target, entrant: Contestant, engines: dict[str, Any]) -> tuple[Report, Report]:
    """The report of our decoder, and that of engines that decode as it does."""
    texts = [torch.randint(5, 300, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(6, 14)]
    suites = [make_suite("a", [Prompt(str(i), "a", tuple(t), "") for i, t in enumerate(texts)])]
    settings = EvalSpec(temperatures=[0.0], max_new_tokens=16, repeats=1)

    def racer(_: Target, contestant: Contestant, used: EvalSpec) -> EngineRacer:
        own = engines["drafting" if contestant.drafter is not None else "plain"]
        return EngineRacer(contestant.name, Engine(own.url), contestant.plan.depth, used.max_new_tokens)

    ours = measure(tiny_target, [entrant], suites, settings, False)
    return ours, measure(tiny_target, [entrant], suites, settings, False, racer=racer)


def test_the_report_of_an_engine_is_that_of_our_decoder_where_both_do_the_same(
    tiny_target: Target, entrant: Contestant, start_engine: Any
) -> None:
    drafter = entrant.drafter
    ours, theirs = reports(
        tiny_target,
        entrant,
        {"drafting": start_engine(tiny_target, drafter), "plain": start_engine(tiny_target, None, depth=0)},
    )
    one, other = ours.headline(), theirs.headline()
    assert (one.tau, one.identical, one.rule) == (other.tau, other.identical, other.rule)
    assert [(d.reached, d.kept) for d in one.alpha] == [(d.reached, d.kept) for d in other.alpha]
    assert other.identical == other.num_prompts == 8
    assert Report.model_validate_json(theirs.model_dump_json()) is not None


def test_an_engine_whose_drafts_change_its_text_is_seen(
    tiny_target: Target, entrant: Contestant, start_engine: Any
) -> None:
    other = Target(make_llama(vocab=tiny_target.vocab_size, seed=5), tiny_target.tokenizer)
    engines = {"drafting": start_engine(other, None, depth=0), "plain": start_engine(tiny_target, None, depth=0)}
    assert reports(tiny_target, entrant, engines)[1].headline().identical == 0


def test_what_only_our_decoder_measures_is_refused_before_an_engine_starts(
    tiny_target: Target, entrant: Contestant
) -> None:
    assert entrant.drafter is not None
    for spec, settings, said in (
        (EngineSpec(url="http://127.0.0.1:1", folder="x"), EvalSpec(), "target.engine.python"),
        (EngineSpec(python="x"), EvalSpec(batch_sizes=[2]), "eval.batch_sizes"),
    ):
        with pytest.raises(BadInputError, match=said):
            measure_in_engine(tiny_target, entrant.drafter, [], settings, spec)


def test_a_pair_whose_target_lives_in_an_engine_is_bound_and_exported_without_its_layers(
    tiny_target: Target, tmp_path: Path
) -> None:
    """The export is that of the loaded target, byte for byte."""
    tiny_target.model.save_pretrained(tmp_path / "target")
    tiny_target.require_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "s.jsonl").write_text('{"text": "def read(path):"}')
    recipe = Recipe.from_dict(
        {
            "name": "t",
            "output": str(tmp_path / "run"),
            "target": {
                "path": str(tmp_path / "target"),
                "dtype": "float32",
                "engine": {"python": "/usr", "arguments": ["--trust-remote-code"]},
            },
            "drafter": {"type": "eagle3"},
            "data": {"prompts": ["embedded:code"], "features": "cached"},
            "eval": {"suites": [str(tmp_path / "s.jsonl")]},
        }
    )
    target = target_in_engine(recipe.target)
    torch.manual_seed(3)
    head = Eagle3.build(Eagle3Config(steps=2, taps=(2, 4, 5), draft_vocab_size=0), target).eval()
    pair = new_pair(tmp_path / "pair", target, head, recipe)
    assert pair.manifest.measurements.baseline is None
    assert not pair.load_target(layers=False).has_layers
    assert pair.load_target().has_layers
    with pytest.raises(BadInputError, match="own recipe names is not run"):  # a stranger's would be run, too
        load_setup(str(pair.folder), EvalOptions())
    engine = load_setup(str(pair.folder), EvalOptions(["target.engine.python=/mine"])).engine
    assert (engine.python, engine.arguments) == ("/mine", [])
    whole = pair.load_target(str(tmp_path / "target"))
    assert whole.has_layers
    made = [export_pair(pair, "vllm", tmp_path / name, 3, given) for name, given in (("a", None), ("b", whole))]
    one, other = ({f.name: f.read_bytes() for f in m.folder.glob("*.safetensors")} for m in made)
    assert one == other != {}
    with pytest.raises(IncompatibleError, match="without its layers"):
        Decoder(pair.load_target(layers=False)).generate([[5, 6]], 2)


def hybrid(folder: Path) -> Path:
    """Return a tiny Nemotron-H, whose Mamba layers limit their steps, as the library's own config says."""
    own = json.loads((embedded_path() / "config.json").read_text())
    kinds = ["linear_attention", "mlp", "full_attention"]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
    ids = {name: own.get(name) for name in ("bos_token_id", "eos_token_id")}
    config = AutoConfig.for_model(
        "nemotron_h",
        vocab_size=own["vocab_size"],
        layers_block_type=kinds * 2,
        chunk_size=32,
        max_position_embeddings=1024,
        pad_token_id=0,
        **sizes,
        **ids,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # it says the same few tokens in turn, which a drafter learns in seconds
        table = model.get_input_embeddings().weight.mul_(10)
        output, said = model.get_output_embeddings().weight.zero_(), torch.arange(5, 12)
        output[said.roll(-1)] = torch.nn.functional.normalize(table[said], dim=-1)
    model.save_pretrained(folder)
    for file in embedded_path().iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    return folder


@pytest.mark.served
def test_a_target_that_our_decoder_refuses_is_trained_for_measured_and_gated(tmp_path: Path) -> None:
    """Its states, answers and measures are a vLLM's, whose CPU build is mended: drafts would change its text."""
    target = hybrid(tmp_path / "target")
    with pytest.raises(IncompatibleError, match="keeps the steps of its recurrent layers"):
        Decoder(Target.load(target, device="cpu")).generate([[5, 6, 7]], 4)
    python = str(place_of("OUTRIDER_VLLM_PYTHON", "the environment of a vLLM"))
    values = {
        "name": "hybrid",
        "output": str(tmp_path / "run"),
        "target": {"path": str(target), "dtype": "float32", "engine": {"python": python}},
        "drafter": {"type": "eagle3", "steps": 3},
        "data": {"prompts": ["embedded:code"], "limit": 16, "max_prompt_tokens": 64, "max_new_tokens": 32}
        | {"features": "cached", "holdout": 0},
        "training": {"max_steps": 40, "per_device_train_batch_size": 4, "learning_rate": 0.003, "use_cpu": True},
        "eval": {"suites": ["code"], "limit": 8, "max_new_tokens": 32, "temperatures": [0.0], "depth": 3},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))

    def outrider(*words: str) -> subprocess.CompletedProcess[str]:
        environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parent / "cured")}
        command = [sys.executable, "-m", "outrider.scripts.cli", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    for words in (
        ["train", str(recipe)],
        ["eval", str(recipe), "--out", "report"],
        ["pair", "new", "pair", str(recipe), "--report", "report"],
        ["export", "pair", "--to", "vllm", "--out", "export"],
        ["gate", "pair", "--against", "pair"],
    ):
        done = outrider(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr[-3000:])
    figures = Report.load(tmp_path / "report").headline()
    assert figures.identical == figures.num_prompts == 8
    assert figures.tau is not None
    assert figures.tau.value > 1.2
