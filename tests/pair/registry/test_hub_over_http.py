"""A registry over HTTP: the `outrider` command and the real client of the Hub, against a Hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard

from outrider.common import BadInputError
from outrider.decode import Plan
from outrider.eval.measure import Contestant, measure
from outrider.eval.reports.render import write_report
from outrider.eval.suites import make_suite
from outrider.pair import Manifest, Pair, new_pair, registry_card
from outrider.pair.registry import HubStore, Registry
from outrider.recipes import Recipe

from ...hub_server import TOKEN, FakeHub, running_hub
from .conftest import MakeVersion, retold

OUTRIDER = "import sys; from outrider.scripts.cli import main; sys.argv[0] = 'outrider'; main()"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def outrider(hub: FakeHub, tmp_path: Path) -> Callable[..., str]:
    """`outrider(*words)`: what the command prints, with this Hub and no other."""

    def run(*words: str | Path, **variables: str) -> str:
        environment = os.environ | hub.environment(str(tmp_path / "home")) | variables
        done = subprocess.run([sys.executable, "-c", OUTRIDER, *words], capture_output=True, text=True, env=environment)
        said = done.stdout + done.stderr
        assert TOKEN not in said
        return said if done.returncode == 0 else f"{done.returncode}: {said}"

    return run


@pytest.fixture
def measured(make_target, make_drafter, recipe: Recipe, prompts, tmp_path, monkeypatch) -> Pair:
    """A pair of an EAGLE-3 head for a target of the Hub, with a report that `outrider eval` made."""
    target = make_target(source={"path": "org/base"})
    drafter = make_drafter("eagle3", target)
    monkeypatch.setattr(sys, "argv", ["/opt/bin/outrider", "eval", "/home/me/my recipes/tiny.yaml", "eval.repeats=1"])
    contestant, suite = Contestant("eagle3", drafter, Plan(3)), make_suite("a", prompts[:2])
    report = measure(target, [contestant], [suite], recipe.eval, generate_baseline=False)
    written = write_report(report, tmp_path / "report")
    return new_pair(tmp_path / "pair", target, drafter, recipe, written, calibration=prompts[:1])


def test_a_pair_goes_to_the_hub_with_its_card_and_comes_back_byte_for_byte(hub, outrider, measured, tmp_path):
    place = "hf://org/pairs"
    assert "tiny@1 (revision 1) is in hf://org/pairs" in outrider("pair", "push", measured.folder, "--registry", place)
    assert (hub.private, len(hub.commits["org/pairs"])) == ({"org/pairs": True}, 2)
    assert any(path.startswith("PUT /lfs/") for path in hub.asked), "weights by LFS, all else in the commit"
    outrider("pair", "pull", "tiny", tmp_path / "pulled", "--registry", place)
    pushed, pulled = (
        {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        for folder in (measured.folder, tmp_path / "pulled")
    )
    assert pulled == pushed
    card = hub.files("org/pairs")["README.md"].decode()
    data = ModelCard(card).data
    assert (data.base_model, data.library_name, data.license) == ("org/base", "outrider", None)
    assert data.tags == ["speculative-decoding", "eagle3"]
    [headline] = measured.manifest.measurements.headline
    assert {r.metric_type: r.metric_value for r in data.eval_results or []} == {
        "tau": round(headline.tau.value or 0, 4),
        "speedup": round(headline.speedup.value or 0, 4),
    }
    assert f"τ {headline.tau.text('')}, speedup {headline.speedup.text('')}" in card
    assert "up to 16 new tokens each" in card
    assert "outrider eval tiny.yaml eval.repeats=1" in card, "without the folders of this machine"
    assert not any(part in card for part in ("/home", "my recipes", str(tmp_path)))
    for said in (
        "`outrider train pair/recipe.yaml`",
        "outrider pair pull tiny@1 pair --registry hf://org/pairs",
        "outrider export pair --to vllm --depth 3 --out exported-vllm\nvllm serve org/base --dtype float32",
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path exported-sglang",
        "llama-server --model TARGET.gguf --model-draft exported-gguf/",
        "**transformers**: no (",
    ):
        assert said in card


def test_a_wrong_token_is_refused_in_a_sentence_that_does_not_repeat_it(hub, outrider, measured):
    said = outrider("pair", "push", measured.folder, "--registry", "hf://org/pairs", HF_TOKEN="hf_wrong")
    assert said.startswith("2: ")
    assert "Check the name, the network and your access" in " ".join(said.split())
    assert "hf_wrong" not in said
    assert hub.commits == {}


def manifests(*pairs: Pair) -> list[Manifest]:
    return [pair.manifest for pair in pairs]


def test_a_card_says_that_nothing_was_measured(make_version: MakeVersion) -> None:
    card = registry_card("org/pairs", manifests(make_version(1)))
    assert "**Not measured**" in card
    assert ModelCard(card).data.eval_results is None
    assert "a target that is not on the Hub" in card
    assert "**vLLM**: no (" in card, "n-grams have no weights"


def test_a_card_lists_the_newest_version_of_each_pair(hub, make_version: MakeVersion, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    registry = Registry(HubStore("org/pairs", HfApi(endpoint=hub.url, token=TOKEN)))
    versions = [make_version(2), make_version(1), make_version(1, name="other")]
    for pair in versions:
        registry.push(pair)
    registry.push(retold(versions[0]))
    num_commits = len(hub.commits["org/pairs"])
    registry.push(versions[1])
    assert len(hub.commits["org/pairs"]) == num_commits, "a second time changes nothing"
    card = hub.files("org/pairs")["README.md"].decode()
    assert [line for line in card.splitlines() if line.startswith("## ")] == ["## other version 1", "## tiny version 2"]


def test_what_people_add_to_a_card_is_kept(make_version: MakeVersion) -> None:
    """A licence in its metadata, and their own text, also that of a card that was there before."""
    before = "---\nlicense: mit\ntags:\n- mine\n---\n# Ours\n\nBy us.\n"
    first = registry_card("org/pairs", manifests(make_version(1)), before)
    second = registry_card("org/pairs", manifests(make_version(2)), first.replace("By us.", "By us all."))
    data = ModelCard(second).data
    assert (data.license, data.tags) == ("mit", ["mine", "speculative-decoding", "ngram"])
    assert second.endswith("# Ours\n\nBy us all.\n")
    assert second.count("## tiny version") == 1
    assert registry_card("org/pairs", manifests(make_version(2)), second).count("Ours") == 1


@pytest.mark.parametrize("bad", ["---\n- a list\n---\n", "---\ntags: [\n---\n"])
def test_a_card_that_cannot_be_read_is_refused_by_its_name(make_version: MakeVersion, bad: str) -> None:
    with pytest.raises(BadInputError, match=r"README\.md there: .* Mend it or remove it"):
        registry_card("org/pairs", manifests(make_version(1)), bad)
