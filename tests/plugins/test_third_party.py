"""A package that registers a drafter needs nothing else: the kernel trains, decodes, saves, pairs and measures it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.common import BadInputError
from outrider.common.plugins import registered
from outrider.decode import Decoder, Plan
from outrider.heads import HEADS, load_drafter
from outrider.scripts.options import named_pair
from outrider.targets import Target

from ..scripts.conftest import Command, failed, succeeded

SITE = Path(__file__).with_name("site")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is installed, as far as Python can tell."""
    monkeypatch.syspath_prepend(str(SITE))
    registered.cache_clear()
    yield
    monkeypatch.undo()
    sys.modules.pop("bigram_drafter", None)
    registered.cache_clear()


@pytest.mark.usefixtures("installed")
def test_a_drafter_of_another_package_lives_a_whole_life(
    outrider: Command, recipe_file: Path, target_folder: Path, tmp_path: Path
) -> None:
    changes = ("drafter={type: bigram}", "training.max_steps=30", "training.learning_rate=0.3", "eval.width=2")
    trained = json.loads(succeeded(outrider("train", recipe_file, *changes, "--json")).stdout)
    target, drafter = Target.load(target_folder), load_drafter(Path(trained["drafter"]))
    assert isinstance(drafter, HEADS["bigram"])
    tokenizer = target.require_tokenizer()
    prompts = [tokenizer(f"def function_{i}(first, second):\n")["input_ids"] for i in range(2)]
    plain = Decoder(target).generate(prompts, 8)
    for plan in (Plan(depth=3), Plan(depth=3, width=2, nodes=5)):
        drafted = Decoder(target, drafter).generate(prompts, 8, plan=plan)
        assert drafted.tokens == plain.tokens
        assert sum(r.accepted for rounds in drafted.rounds for r in rounds) > 0, "it learned something"
    report = json.loads(succeeded(outrider("eval", recipe_file, *changes, "--quick", "--json")).stdout)
    assert "bigram" in [contestant["name"] for contestant in report["contestants"]]
    succeeded(outrider("pair", "new", tmp_path / "pair", recipe_file, *changes))
    assert json.loads(succeeded(outrider("pair", "verify", tmp_path / "pair", "--json")).stdout)["intact"]


def test_a_drafter_whose_package_is_missing_is_refused_by_its_name(outrider: Command, recipe_file: Path) -> None:
    failed(outrider("train", recipe_file, "drafter={type: bigram}"), "unknown drafter type 'bigram'")


@pytest.mark.usefixtures("installed")
def test_one_name_belongs_to_one_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[outrider.drafters]\nbigram = json:JSONDecoder\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registered.cache_clear()
    with pytest.raises(BadInputError, match=r"two packages register 'bigram' in outrider\.drafters"):
        registered("drafters")


def test_a_package_may_bring_a_pair_by_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name goes first."""
    module = tmp_path / "site" / "brought.py"
    info = module.with_name("brought-1.0.dist-info")
    info.mkdir(parents=True)
    module.write_text(f"PAIR = {str(tmp_path / 'pair')!r}\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[outrider.pairs]\nknown-pair = brought:PAIR\n")
    monkeypatch.syspath_prepend(str(module.parent))
    monkeypatch.chdir(tmp_path)
    registered.cache_clear()
    try:
        assert named_pair(Path("known-pair")) == tmp_path / "pair"
        assert named_pair(Path("unknown-pair")) == Path("unknown-pair")
        Path("known-pair").mkdir()
        assert named_pair(Path("known-pair")) == Path("known-pair")
    finally:
        registered.cache_clear()
