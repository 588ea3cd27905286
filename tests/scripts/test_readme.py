"""The commands, recipes, examples, links and figures of the README, of CONTRIBUTING and of docs/ are real."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from outrider.heads import HEADS, Ngram, drafter_config
from outrider.lab.grow import SHAPES
from outrider.pair import Pair, new_pair
from outrider.recipes import Recipe, load_recipe, packaged_recipes
from outrider.targets import Target
from outrider.train.arguments import check_training

from .conftest import Command, all_verbs, verb_of

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
PAGES = [README, CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
OTHERS = [ROOT / name for name in ("RELEASING.md", "SECURITY.md", "benchmarks/README.md", "tests/mutation/README.md")]
LANGUAGES = {"sh", "python", "yaml"} | {"json", "toml", "text"}  # checked by what follows; and no commands
# Finished in a moment, without a trained drafter.
QUICK = {"doctor"}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Return a page's shell commands as words, without comments and leading assignments."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    split = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    return [words[next(i for i, w in enumerate(words) if not re.match(r"[A-Z_]+=", w)) :] for words in split if words]


def all_commands() -> Iterator[list[str]]:
    return (words for page in [*PAGES, *OTHERS] for words in commands(page))


def openings(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language of each fenced block, after the line before it."""
    inside = False
    for before, line in pairwise(["", *text_of(page).splitlines()]):
        if line.startswith("```"):
            inside = not inside
            if inside:
                yield before, line.removeprefix("```")


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: shown(page))
def test_every_command_stands_in_a_checked_block_or_says_why_it_is_not_run(page: Path) -> None:
    unchecked = [(before, language) for before, language in openings(page) if language not in LANGUAGES]
    assert [each for each in unchecked if not re.fullmatch(r"<!-- not run: \S.+ -->", each[0])] == []


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_readme_shows_every_verb() -> None:
    assert {" ".join(verb_of(words)[1]) for words in commands(README) if words[0] == "outrider"} == all_verbs()


def test_every_outrider_command_is_one_that_the_command_line_takes() -> None:
    """Parsed as it would be before it runs: arguments, options and the types of their values."""
    for words in all_commands():
        if words[0] == "outrider":
            command, path, rest = verb_of(words)
            command.make_context(" ".join(path), list(rest))


def test_verbs_and_options_named_in_the_text_exist() -> None:
    verbs = all_verbs()
    groups = {verb.split()[0] for verb in verbs if " " in verb}
    for page in PAGES:
        for named in re.findall(r"`outrider\s+([^`]+)`", text_of(page)):
            words = shlex.split(named)
            if words[0].startswith("--") or (words[0] in groups and words[1:] in ([], ["…"])):
                continue
            verb = words[: 2 if words[0] in groups else 1]
            assert " ".join(verb) in verbs, f"{shown(page)}: outrider {named}"
            known = {name for parameter in verb_of(["outrider", *verb])[0].params for name in parameter.opts}
            assert [w for w in words if w.startswith("--") and w not in known] == [], shown(page)


def test_every_verb_stands_in_the_table_of_what_it_trusts() -> None:
    table = [line.split("|")[1] for line in text_of(ROOT / "docs" / "security.md").splitlines() if "| `" in line]
    assert [verb for verb in sorted(all_verbs()) if not any(f"`{verb}`" in row for row in table)] == []


def test_the_guide_names_every_recipe_that_comes_with_the_package() -> None:
    guide = text_of(ROOT / "docs" / "guides" / "your-own-target.md")
    assert [name for name in packaged_recipes() if f"`{name}`" not in guide] == []


def test_the_quick_commands_run(outrider: Command) -> None:
    for words in commands(README):
        if words[0] == "outrider":
            _, path, rest = verb_of(words)
            assert path[0] not in QUICK or outrider(*path, *rest).exit_code == 0
            assert outrider(*path, "--help").exit_code == 0


def is_script(words: list[str]) -> None:
    assert (ROOT / words[0]).stat().st_mode & 0o111, words[0]
    subprocess.run(["bash", "-n", ROOT / words[0]], check=True)


def is_python(words: list[str]) -> None:
    if words[1] != "-m":
        assert (ROOT / words[1]).exists(), words
    elif "--help" in words:
        main = importlib.import_module(words[2]).main
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", words[2:])
            with pytest.raises(SystemExit) as ended:
                main()
        assert ended.value.code == 0
    else:
        assert importlib.util.find_spec(words[2]), words


def is_launch(words: list[str]) -> None:
    assert words[1] == "launch"
    asked = launch_command_parser().parse_args(words[2:])
    assert asked.module, words
    assert asked.training_script in ("outrider.train", "outrider.distill")
    assert asked.config_file is None or (ROOT / asked.config_file).is_file(), words
    recipe, *changes = asked.training_script_args
    assert all("=" in change for change in changes), words
    assert recipe == "my.yaml" or recipe in packaged_recipes()


def is_torchrun(words: list[str]) -> None:
    asked = get_args_parser().parse_args(words[1:])
    assert asked.module, words
    assert asked.training_script == "outrider.train"
    assert asked.training_script_args == ["my.yaml"]


def is_installation(words: list[str]) -> None:
    files = [after for word, after in pairwise(words) if word in ("-c", "-r")]
    assert [file for file in files if not (ROOT / file).is_file()] == []


def is_make(words: list[str]) -> None:
    assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), words


KINDS: dict[str, Callable[[list[str]], None]] = {
    "./scripts": is_script,
    "python": is_python,
    "accelerate": is_launch,
    "torchrun": is_torchrun,
    "pip": is_installation,
    "uv": is_installation,
    "make": is_make,
}


def test_every_other_command_is_one_that_would_start(capsys: pytest.CaptureFixture[str]) -> None:
    for words in all_commands():
        if words[0] != "outrider":
            kind = "./scripts" if words[0].startswith(("./scripts/", "./benchmarks/")) else words[0]
            kind = kind.removeprefix(".venv/bin/")
            assert kind in KINDS, f"nothing checks {' '.join(words)}"
            KINDS[kind](words)


def test_every_recipe_and_override_shown_is_valid() -> None:
    seen = 0
    for words in all_commands():
        for name in (w for w in words if w in packaged_recipes()):
            changes = [w for before, w in zip(["", *words], words, strict=False) if before != "--over"]
            recipe = load_recipe(name, [w for w in changes if re.match(r"[a-z_.]+=", w)])
            check_training(recipe.training)
            seen += 1
    assert seen >= 12


def test_every_recipe_shown_in_full_is_valid() -> None:
    """The settings of `lab learn` are read by its own tests."""
    shown_in_full = [block for page in PAGES for block in blocks(page, "yaml") if not block.startswith("pair:")]
    assert shown_in_full
    for block in shown_in_full:
        recipe = Recipe.from_dict(yaml.safe_load(block))
        drafter_config(recipe.drafter)
        check_training(recipe.training)


def test_the_recipe_shown_names_every_drafter_that_is_trained() -> None:
    [recipe] = blocks(README, "yaml")
    assert {name for name, head in HEADS.items() if head.trainable} <= set(re.findall(r"\w+", recipe))


def test_recipes_named_in_the_text_exist() -> None:
    beginnings = "|".join({name.split("-")[0] for name in packaged_recipes()})
    for page in PAGES:
        named = set(re.findall(rf"`((?:{beginnings})-[\w.-]+)`", text_of(page)))
        assert named <= {*packaged_recipes(), *SHAPES}, shown(page)


@pytest.fixture
def tiny_world(tiny_target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny target in place of every target, and a pair of it where the pages have one."""
    values: dict[str, Any] = {"name": "tiny", "target": {"path": "tiny"}, "drafter": {"type": "ngram"}}
    values["data"] = {"prompts": ["p.jsonl"]}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Target, "load", lambda *_, **__: tiny_target)
    pair = new_pair(tmp_path / "runs/pair-v1", tiny_target, Ngram(), Recipe.from_dict(values), calibration=[])
    monkeypatch.setattr(Pair, "load_target", lambda *_, **__: tiny_target)
    assert pair.folder.is_dir()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=shown)
def test_the_python_examples_run(page: Path, tiny_world: None, capsys: pytest.CaptureFixture[str]) -> None:
    """From top to bottom, each with what those above it have defined."""
    defined: dict[str, Any] = {"__name__": "example"}
    for block in blocks(page, "python"):
        exec(compile(block, shown(page), "exec"), defined)
    if page == README:
        assert "alpha by depth" in capsys.readouterr().out


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, RESULTS], ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_every_page_is_reached_from_the_readme() -> None:
    found, waiting = {README}, [README]
    while waiting:
        page = waiting.pop()
        links = re.findall(r"\]\(([^)\s#]+\.md)", text_of(page))
        new = {(page.parent / link).resolve() for link in links if not link.startswith("http")} - found
        found |= new
        waiting += new
    assert [shown(page) for page in PAGES if page not in found] == []


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_files_that_are_named_exist(page: Path) -> None:
    rooms = "|".join(["benchmarks", "tests", "docs", *(p.parent.name for p in ROOT.glob("*/__init__.py"))])
    named = set(re.findall(rf"`((?:{rooms})/[\w/.-]+)`", text_of(page)))
    assert [n for n in named if not (ROOT / n).exists()] == []
    files = {file.name for room in rooms.split("|") for file in (ROOT / room).rglob("*.*")}
    bare = set(re.findall(r"(?<![\w/.-])([\w-]+\.(?:py|sh))\b", text_of(page)))
    assert bare - files == set()
    results = set(re.findall(r"`([\w.-]+-[\w.-]+\.json)`", text_of(page)))
    kept = {file.name for file in RESULTS.parent.glob("results/*.json")}
    assert results - kept == set()


def intervals(text: str) -> set[str]:
    """Return what a text cites with an interval, such as `1.59 [1.47, 1.72]`, without signs and units."""
    plain = text.replace("−", "-").replace("×", "").replace("%", "").replace("+", "")
    return {" ".join(f) for f in re.findall(r"(-?\d+\.\d+)\s(\[-?\d+\.\d+, -?\d+\.\d+\])", plain)}


def found_intervals(result: Any) -> Iterator[tuple[float, float, float]]:
    """Yield every value with its interval in what a result file holds."""
    if isinstance(result, dict):
        known = [result.get("value", result.get("share")), result.get("low"), result.get("high")]
        if all(isinstance(number, float | int) for number in known):
            yield known[0], known[1], known[2]
        for name, value in result.items():
            if f"{name}_interval" in result:
                yield value, *result[f"{name}_interval"]
            yield from found_intervals(value)
    elif isinstance(result, list):
        for value in result:
            yield from found_intervals(value)


@pytest.fixture(scope="module")
def measured() -> set[str]:
    """Every interval of the result files as a page may write it: with one to three digits, or in percent."""
    files = RESULTS.parent.glob("results/*.json")
    known = {found for file in files for found in found_intervals(json.loads(text_of(file)))}
    scaled = ([number * times for number in found] for found in known for times in (1, 100))
    return {f"{v:.{d}f} [{low:.{d}f}, {high:.{d}f}]" for v, low, high in scaled for d in (1, 2, 3)}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_figure_with_an_interval_stands_in_a_result_file(page: Path, measured: set[str]) -> None:
    """Printed lines that are shown as an example, indented, may hold others."""
    said = re.sub(r"^    .*", "", text_of(page), flags=re.MULTILINE)
    assert intervals(said) - intervals("\n".join(measured)) == set()


def test_every_folder_of_code_is_on_the_map() -> None:
    mapped = set(re.findall(r"^\| `(\w+)/` \|", text_of(ROOT / "docs/developers/house.md"), flags=re.MULTILINE))
    assert mapped == {p.parent.name for p in ROOT.glob("*/__init__.py")} | {"benchmarks", "tests", "docs"}


def test_every_module_that_the_map_names_in_a_room_is_there() -> None:
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", text_of(ROOT / "docs/developers/house.md"), flags=re.MULTILINE)
    for room, said in rows:
        there = {path.name for path in (ROOT / room).rglob("*")}
        named = set(re.findall(r"`([a-z_]+)(?:\.py|/)?`", said)) - {"outrider"}
        assert [name for name in named if not {name, f"{name}.py"} & there] == [], room


def test_every_exit_code_is_explained() -> None:
    codes = re.findall(r"^\| (\d+) \|", text_of(ROOT / "docs/guides/pairs-in-ci.md"), flags=re.MULTILINE)
    assert [int(code) for code in codes] == [0, 1, 2, 3, 70, 129, 130, 137, 141, 143]


def test_the_readme_is_short_enough_to_be_read_to_its_end() -> None:
    assert len(text_of(README).splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_lines_of_prose_fit_a_window(page: Path) -> None:
    """Tables and blocks of code may be wider."""
    lines = prose_of(page).splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "    "))] == []


def test_the_pages_are_few_words_enough_to_be_read() -> None:
    """Without those that are generated: the keys of a recipe and the map of files."""
    generated = {"recipe-keys.md", "map.md", "support.md"}
    words = sum(len(text_of(page).split()) for page in (ROOT / "docs").rglob("*.md") if page.name not in generated)
    assert words <= 32_000


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != README and page.name != "recipe-keys.md"], ids=shown
)
def test_a_page_begins_with_the_question_that_it_answers(page: Path) -> None:
    assert "?" in text_of(page).split("\n\n")[1]
