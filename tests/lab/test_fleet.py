"""`outrider lab fleet`: who keeps the pair's drafter, who leads a group, and that a second call does nothing again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from outrider.decode import Decoder, Sampling
from outrider.heads import Drafter, DraftModel, load_drafter
from outrider.lab.fleet import OWN, Fleet, FleetOptions
from outrider.pair import Pair, new_pair
from outrider.pair.calibration import choose_prompts
from outrider.pair.manifest import PromptMeasure
from outrider.pair.probing import tau_change
from outrider.recipes import load_recipe
from outrider.targets import Target
from outrider.targets.fingerprint import digest_files

from ..scripts.conftest import Command, answer, failed


@pytest.fixture
def pair(recipe_file: Path, tmp_path: Path, target_folder: Path) -> Pair:
    """A pair whose drafter is its target, so that every draft is accepted there."""
    target = Target.load(target_folder)
    changes = ["drafter={type: draft_model}", "eval.baselines=[]", "eval.depth=3", "eval.temperatures=[0]"]
    recipe = load_recipe(str(recipe_file), [*changes, "data.holdout=0.4", "training.learning_rate=0.01"])
    drafter = DraftModel(Target.load(target_folder).model)
    return new_pair(tmp_path / "pair", target, drafter, recipe, calibration=choose_prompts(recipe, target))


@pytest.fixture
def adapters(tmp_path: Path, target_folder: Path) -> Path:
    """Three adapters of the target: one that changes nothing, and two that change much."""
    for seed, (name, size) in enumerate({"idle": 0.0, "near": 0.3, "wild": 0.6}.items()):
        torch.manual_seed(seed)
        model = get_peft_model(Target.load(target_folder).model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
        for key, weight in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight, std=size) if size else None
        model.save_pretrained(tmp_path / "adapters" / name)
    return tmp_path / "adapters"


def test_a_fleet_from_probes_to_routes(outrider: Command, pair: Pair, adapters: Path, tmp_path: Path) -> None:
    words = ("lab", "fleet", pair.folder, "--adapters", adapters, "--out", tmp_path / "fleet", "--rank", 2, "--json")
    words += ("--most", 1, "training.max_steps=2")
    first = answer("fleet", outrider(*words))
    by_name = {route["adapter"]: route for route in first["routes"]}
    assert (by_name["idle"]["drafter"], by_name["idle"]["kept"]["value"]) == (OWN, 1.0)
    [group] = first["groups"]
    assert by_name[group["leader"]]["before"]["value"] == min(r["before"]["value"] for r in by_name.values())
    written = json.loads((tmp_path / "fleet" / "routes.json").read_text())
    assert written == {name: first[name] for name in written}

    # what a route says is what the probe of its adapter counts, with the drafter that it names
    for name, route in by_name.items():
        folder = pair.drafter_folder if route["drafter"] == OWN else Path(group["drafter"])
        target = Target.load(pair.manifest.target.source.path, adapter=str(adapters / name))
        assert route["now"]["value"] == pytest.approx(counted_tau(load_drafter(folder, target), pair, target))

    before = digest_files(Path(group["drafter"]))
    (tmp_path / "fleet" / "routes.json").unlink()
    assert answer("fleet", outrider(*words)) == first
    assert before == digest_files(Path(group["drafter"]))
    failed(outrider(*words[:-3], "--most", 2), "asked for in another way")


def counted_tau(drafter: Drafter, pair: Pair, target: Target) -> float:
    """Return τ of a drafter on a target, counted on a pair's calibration prompts."""
    prompts = [p.tokens for p in pair.calibration()]
    out = Decoder(target, drafter).generate(prompts, 8, Sampling(0.0), pair.plan)
    rounds = [r for rounds in out.rounds for r in rounds]
    return sum(r.emitted for r in rounds) / len(rounds)


def fleet_of(pair: Pair, tried: dict[tuple[str, str], list[int]], **options: int) -> Fleet:
    """Return a fleet in which a drafter's rounds on each prompt were counted so."""
    assert pair.manifest.measurements.baseline is not None
    names = dict.fromkeys(name for name, _ in tried)
    fleet = Fleet(pair, {name: Path(name) for name in names}, pair.folder.parent / "fleet", FleetOptions(**options))
    like = pair.manifest.measurements.baseline.prompts
    for key, rounds in tried.items():
        fleet.tried[key] = [
            PromptMeasure(**old.model_dump() | {"rounds": n, "accepted": 40})
            for old, n in zip(like, rounds, strict=True)
        ]
    return fleet


def test_the_pairs_own_drafter_stays_unless_another_is_certainly_better(pair: Pair) -> None:
    fleet = fleet_of(
        pair,
        {
            ("sure", OWN): [40, 50, 45] * 2,
            ("sure", "x"): [20, 25, 22] * 2,
            ("unsure", OWN): [40, 50, 45] * 2,
            ("unsure", "x"): [30, 70, 20] * 2,
            ("two", OWN): [40, 50, 45] * 2,
            ("two", "x"): [30, 38, 34] * 2,
            ("two", "y"): [20, 25, 22] * 2,
        },
    )
    fleet.leaders = {"x": pair.folder, "y": pair.folder}
    assert [fleet.best(name) for name in ("sure", "unsure", "two")] == ["x", OWN, "y"]
    own, other = fleet.tried["sure", OWN], fleet.tried["sure", "x"]
    assert tau_change(other, own[::-1], fleet.baseline) == tau_change(other, own, fleet.baseline), "matched by ids"


def test_who_loses_most_leads_the_next_group_until_there_are_enough(pair: Pair) -> None:
    fleet = fleet_of(
        pair, {("a", OWN): [40, 40, 40] * 2, ("b", OWN): [60, 60, 60] * 2, ("c", OWN): [50, 50, 50] * 2}, most=2
    )
    assert fleet._next_leader() == "b"
    fleet.leaders["b"] = pair.folder
    fleet.tried |= {(name, "b"): fleet_of(pair, {(name, "b"): [14] * 6}).tried[name, "b"] for name in "bc"}
    assert fleet._next_leader() == "a", "c is served by b's"
    fleet.leaders["a"] = pair.folder
    assert fleet._next_leader() is None


def test_what_no_fleet_can_be_of_is_refused(outrider: Command, pair: Pair, adapters: Path, tmp_path: Path) -> None:
    def refused(said: str, place: Path, out: Path = tmp_path / "out") -> None:
        failed(outrider("lab", "fleet", pair.folder, "--adapters", place, "--out", out), said)

    refused("found none", tmp_path / "nowhere")
    refused("lies inside the pair", adapters, pair.folder / "fleet")
    shutil.copytree(adapters / "idle", adapters / OWN)
    refused(f"one called {OWN}", adapters)
    shutil.rmtree(adapters / OWN)
    config = json.loads((adapters / "near" / "adapter_config.json").read_text())
    (adapters / "near" / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["elsewhere"]}))
    refused("near", adapters)
    assert not (tmp_path / "out" / "groups").exists()
