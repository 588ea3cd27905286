"""`outrider lab fleet`: who keeps the pair's drafter, who leads a group, and that a second call does nothing again."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from outrider.common import BadInputError
from outrider.decode import Decoder, Sampling
from outrider.heads import Drafter, DraftModel, Ngram, NgramConfig, load_drafter
from outrider.lab.adapter_batch import AdapterDecoder
from outrider.lab.fleet import OWN, Fleet, FleetOptions, adapters_in
from outrider.pair import Pair, new_pair
from outrider.pair.calibration import choose_prompts
from outrider.pair.manifest import PromptMeasure
from outrider.pair.probing import tau_change
from outrider.recipes import load_recipe
from outrider.scripts.cli import app
from outrider.targets import Target
from outrider.targets.fingerprint import digest_files

from ..forked import Forked
from ..scripts.conftest import Command, answer, failed
from .conftest import save_lora


@pytest.fixture
def own_target(tmp_path: Path, target_folder: Path) -> Path:
    """The target in a place where it may be altered."""
    return Path(shutil.copytree(target_folder, tmp_path / "target"))


@pytest.fixture
def pair(recipe_file: Path, tmp_path: Path, own_target: Path) -> Pair:
    """A pair whose drafter is its target, so that every draft is accepted there."""
    return pair_of(recipe_file, tmp_path / "pair", Target.load(own_target))


def pair_of(recipe_file: Path, folder: Path, target: Target, prompts: int = 32) -> Pair:
    changes = ["drafter={type: draft_model}", "eval.baselines=[]", "eval.depth=3", "eval.temperatures=[0]"]
    recipe = load_recipe(str(recipe_file), [*changes, "data.holdout=0.4", "training.learning_rate=0.01"])
    drafter = DraftModel(Target.load(str(target.source["path"])).model)
    return new_pair(folder, target, drafter, recipe, calibration=choose_prompts(recipe, target)[:prompts])


@pytest.fixture
def adapters(tmp_path: Path, target_folder: Path) -> Path:
    """Three adapters of the target: one that changes nothing, and two that change much."""
    for seed, (name, size) in enumerate({"idle": 0.0, "near": 0.3, "wild": 0.6}.items()):
        save_lora(tmp_path / "adapters" / name, target_folder, seed, size)
    return tmp_path / "adapters"


def test_a_fleet_from_probes_to_routes(outrider: Command, pair: Pair, adapters: Path, tmp_path: Path) -> None:
    words = ("lab", "fleet", pair.folder, "--adapters", adapters, "--out", tmp_path / "fleet", "--rank", 8, "--json")
    words += ("--most", 1, "training.max_steps=40")
    first = answer("fleet", outrider(*words))
    by_name = {route["adapter"]: route for route in first["routes"]}
    assert (by_name["idle"]["drafter"], by_name["idle"]["kept"]["value"]) == (OWN, 1.0)
    [group] = first["groups"]
    assert by_name[group["leader"]]["before"]["value"] == min(r["before"]["value"] for r in by_name.values())
    written = json.loads((tmp_path / "fleet" / "routes.json").read_text())
    assert written == {name: first[name] for name in written}

    # what a route says is what the probe of its adapter counts, with the drafter that it names
    for name, route in by_name.items():
        folder = pair.drafter_folder if route["drafter"] == OWN else tmp_path / "fleet" / group["drafter"]
        target = Target.load(pair.manifest.target.source.path, adapter=str(adapters / name))
        assert route["now"]["value"] == pytest.approx(counted_tau(load_drafter(folder, target), pair, target))

    gained = {name: route["now"]["value"] - route["before"]["value"] for name, route in by_name.items()}
    assert group["gained"] == pytest.approx(sum(g for n, g in gained.items() if by_name[n]["drafter"] != OWN))
    assert group["gained"] > 0.1

    before = digest_files(tmp_path / "fleet" / group["drafter"])
    (tmp_path / "fleet" / "routes.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.lab.fleet.calibrate", None)  # nothing is counted again
        assert answer("fleet", outrider(*words)) == first
    assert before == digest_files(tmp_path / "fleet" / group["drafter"])
    failed(outrider(*words[:-3], "--most", 2), "asked for in another way")

    # one batch of all of them, as they are routed
    decoder = AdapterDecoder.of_fleet(pair, tmp_path / "fleet", adapters_in(adapters))
    assert decoder.drafters.keys() == {name for name, route in by_name.items() if route["drafter"] != OWN}
    prompts = [prompt.tokens for prompt in pair.calibration()[:3]]
    together = decoder.generate(prompts, list(by_name), 8, plan=pair.plan)
    for name, prompt, text in zip(by_name, prompts, together.tokens, strict=True):
        alone = Target.load(pair.manifest.target.source.path, adapter=str(adapters / name))
        assert Decoder(alone).generate([prompt], 8).tokens[0] == text
    altered(tmp_path / "fleet" / "routes.json", groups=[group | {"drafter": "../other"}])
    with pytest.raises(BadInputError, match=r"the drafter '\.\./other' is not in this folder"):
        AdapterDecoder.of_fleet(pair, tmp_path / "fleet", adapters_in(adapters))
    altered(tmp_path / "fleet" / "routes.json", groups=[])
    with pytest.raises(BadInputError, match=f"there is no group of {group['leader']}"):
        AdapterDecoder.of_fleet(pair, tmp_path / "fleet", adapters_in(adapters))
    (tmp_path / "fleet" / "routes.json").write_text('{"routes": [], "groups": 3}')
    with pytest.raises(BadInputError, match=r"routes\.json: no routes of a fleet \(.*\)"):
        AdapterDecoder.of_fleet(pair, tmp_path / "fleet", adapters_in(adapters))


@pytest.mark.parametrize("most", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_a_fleet_that_is_killed_goes_on(pair: Pair, adapters: Path, tmp_path: Path, most: int) -> None:
    """Kills at random moments: routes and drafters are those of an undisturbed run, and no probe is made twice."""
    chance = random.Random(1)
    settings = ["training.max_steps=6", "training.save_steps=2"]
    words = ["lab", "fleet", str(pair.folder), "--adapters", str(adapters), "--rank", "2", *settings, "--out"]
    began = time.monotonic()
    calm = Forked(partial(app, [*words, str(tmp_path / "calm")]), tmp_path)
    calm.communicate()
    seconds = time.monotonic() - began
    assert calm.returncode == 0
    kills = 0
    number = 0
    while kills < most:
        folder = tmp_path / f"killed-{number}"
        number += 1
        forked = None
        known: dict[Path, int] = {}
        while forked is None or forked.poll() != 0:
            forked = Forked(partial(app, [*words, str(folder)]), tmp_path)
            forked.process.join(chance.uniform(0.02, 0.9) * seconds if kills < most else 600)
            kills += forked.poll() is None
            forked.send_signal(9)
            forked.process.join()
            assert forked.returncode in (-9, 0), forked.said.read_text()
            assert all(file.stat().st_mtime_ns == when for file, when in known.items())
            known = {file: file.stat().st_mtime_ns for file in folder.glob("tried/*/[!.]*.json")}
        assert (folder / "routes.json").read_bytes() == (tmp_path / "calm" / "routes.json").read_bytes()
        for file in (tmp_path / "calm").glob("groups/*/drafter/*.safetensors"):
            assert (folder / file.relative_to(tmp_path / "calm")).read_bytes() == file.read_bytes()


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


def altered(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def of_wider_target(adapters: Path) -> None:
    weights = load_file(adapters / "near" / "adapter_model.safetensors")
    save_file({name: w.repeat(1, 2) for name, w in weights.items()}, adapters / "near" / "adapter_model.safetensors")


def cut_short(adapters: Path) -> None:
    file = adapters / "near" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])


# What is wrong: with the words, or with the adapters.
WRONG_WORDS = {
    "a setting that is none": (["training.learning_rat=1"], "learning_rat"),
    "a setting of another kind": (["training.max_steps=many"], "many"),
    "another target": (["target.path=elsewhere"], "--target and --adapter say that"),
    "a rank above all": (["--rank", 4096], "larger than rank 4096; lower it"),
    "endless seconds": (["--seconds", "inf"], "the seconds of a group's training are inf"),
    "a schedule that no clock drives": (["--seconds", 9, "training.lr_scheduler_type=inverse_sqrt"], "cannot follow a"),
}
WRONG_ADAPTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda place: shutil.rmtree(place), "found none"),
    "one with the pair's name": (lambda place: (place / "near").rename(place / OWN), f"one called {OWN}"),
    "of another target": (of_wider_target, "does not fit this target"),
    "cut short": (cut_short, "adapter_model.safetensors"),
    "a pickle": (
        lambda place: (place / "near" / "adapter_model.safetensors").rename(place / "near" / "adapter_model.bin"),
        "safetensors only",
    ),
    "of layers that are not there": (
        lambda place: altered(place / "near" / "adapter_config.json", target_modules=["elsewhere"]),
        "near",
    ),
    "that repeats layers": (
        lambda place: altered(place / "near" / "adapter_config.json", layer_replication=[[0, 1], [0, 1]]),
        "layer_replication",
    ),
}


@pytest.mark.parametrize(("words", "said"), WRONG_WORDS.values(), ids=WRONG_WORDS)
def test_words_that_no_fleet_can_follow_are_refused_before_a_probe(
    outrider: Command, pair: Pair, adapters: Path, tmp_path: Path, words: list[object], said: str
) -> None:
    out = tmp_path / "out"
    failed(outrider("lab", "fleet", pair.folder, "--adapters", adapters, "--out", out, *words), said)
    assert not out.exists()


@pytest.mark.parametrize(("spoil", "said"), WRONG_ADAPTERS.values(), ids=WRONG_ADAPTERS)
def test_adapters_that_no_fleet_can_have_are_refused_before_a_probe(
    outrider: Command, pair: Pair, adapters: Path, tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(adapters)
    result = outrider("lab", "fleet", pair.folder, "--adapters", adapters, "--out", tmp_path / "out")
    assert result.exit_code == (3 if "fit" in said else 2)
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_pairs_and_places_that_no_fleet_can_have_are_refused_before_a_probe(
    outrider: Command, pair: Pair, adapters: Path, recipe_file: Path, own_target: Path, tmp_path: Path
) -> None:
    def refused(said: str, folder: Path = pair.folder, out: Path = tmp_path / "out", code: int = 2) -> None:
        before = sorted(out.rglob("*"))
        result = outrider("lab", "fleet", folder, "--adapters", adapters, "--out", out)
        assert result.exit_code == code
        assert said in " ".join(result.stderr.split())
        assert sorted(out.rglob("*")) == before

    refused("lies inside the pair", out=pair.folder / "fleet")
    refused("exists and is not empty", out=pair.folder)
    refused("exists and is not empty", out=adapters)
    own = Target.load(own_target)
    refused("no calibration prompts", pair_of(recipe_file, tmp_path / "uncalibrated", own, prompts=0).folder)
    adapted = Target.load(own_target, adapter=str(adapters / "near"))
    refused("is itself an adapter's", pair_of(recipe_file, tmp_path / "adapted", adapted).folder)
    plain = load_recipe(str(recipe_file), ["eval.temperatures=[0]"])
    refused("has no weights", new_pair(tmp_path / "ngram", own, Ngram(NgramConfig()), plain).folder)
    own.model.model.layers[0].mlp.down_proj.weight.data *= 1.5
    own.model.save_pretrained(own_target)
    refused("this target is not the one", code=1)
    own_target.rename(tmp_path / "moved")
    refused("cannot be loaded; name one that can")
