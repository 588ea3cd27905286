"""The rooms write files in one way: through `common`, which never leaves half of one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import outrider.common

HOUSE = Path(outrider.common.__file__).resolve().parents[1]
ROOMS = ("targets", "heads", "decode", "recipes", "costs", "distill", "eval", "train", "formats", "pair", "serving")
ROOMS += ("scripts", "lab", "benchmarks")

# Libraries that write a whole folder, each called where the folder is being built, or where its user named it.
FOLDERS = {"save_pretrained", "save_to_disk"}
# What writes one file, or moves it.
FORBIDDEN = {"write_text", "write_bytes", "touch", "rename", "symlink_to", "hardlink_to", "savefig", "to_parquet"}
FORBIDDEN |= {"save", "dump"}  # of torch, numpy, json, yaml, pickle
FILES = {"save_file"}  # of safetensors: inside `replacing`
MODULES = {"torch", "numpy", "np", "json", "yaml", "pickle"}

ALLOWED = {
    "pair/signature.py",  # a list of signers and a passphrase's helper, in a temporary folder
    "pair/registry/folder.py",  # publishes by links, with names of `common`, which its sweep knows
    "train/optimizer_state.py",  # into a checkpoint, which counts only when its list is sealed
    "distill/engine_connector.py",  # runs in an engine, without `common`: a part beside its place, then a rename
    "lab/traffic.py",  # lines that are only added, each in one call of the system
    "common/server_process.py",  # the log of an engine that it starts
}


def files() -> list[Path]:
    return [file for room in ROOMS for file in sorted((HOUSE / room).rglob("*.py"))]


def writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every call in `tree` that writes without `common`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := forbidden(node)):
            yield node.lineno, name


def forbidden(call: ast.Call) -> str | None:
    called = call.func
    if isinstance(called, ast.Name):
        return "open" if called.id == "open" and for_writing(call, 1) else None
    if not isinstance(called, ast.Attribute):
        return None
    if called.attr in ("save", "dump"):
        return called.attr if isinstance(called.value, ast.Name) and called.value.id in MODULES else None
    if called.attr == "open":
        return "open" if for_writing(call, 0) else None
    if called.attr == "replace" and len(call.args) == 1 and not call.keywords:
        return "replace"  # of a path: text and data classes take two arguments, or names
    return called.attr if called.attr in FORBIDDEN else None


def for_writing(call: ast.Call, place: int) -> bool:
    modes = [*call.args[place : place + 1], *(k.value for k in call.keywords if k.arg == "mode")]
    return any(isinstance(m, ast.Constant) and isinstance(m.value, str) and set(m.value) & set("wax+") for m in modes)


def test_the_rooms_write_no_file_any_other_way() -> None:
    found = [
        f"{file.relative_to(HOUSE)}:{line}: {name}"
        for file in files()
        if file.relative_to(HOUSE).as_posix() not in ALLOWED
        for line, name in writes(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == [], "use common.atomic or common.digests"


def test_tensors_are_written_where_a_file_is_being_replaced() -> None:
    for file in files():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        covered = {
            id(call)
            for block in ast.walk(tree)
            if isinstance(block, ast.With) and "replacing(" in "".join(ast.unparse(i) for i in block.items)
            for call in ast.walk(block)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in FILES:
                assert id(call) in covered, f"{file.relative_to(HOUSE)}:{call.lineno}"


def test_these_tests_find_what_they_look_for() -> None:
    bad = "Path('x').write_text('')\nopen('x', 'w')\np.open('ab')\ntorch.save(a, b)\na.replace(b)\nos.rename(a, b)"
    assert [line for line, _ in writes(ast.parse(bad))] == [1, 2, 3, 4, 5, 6]
    good = "open('x')\np.open()\nfile.open('rb')\nwrite_atomically(a, b)\ntext.replace('a', 'b')\ndrafter.save(folder)"
    assert list(writes(ast.parse(good))) == []


def test_whole_folders_are_written_by_few() -> None:
    """Whoever adds one says here that the folder is being built beside its place, or that a user named it."""
    found = {
        file.relative_to(HOUSE).as_posix()
        for file in files()
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in FOLDERS
    }
    assert found - ALLOWED == {
        "distill/data_set.py",
        "formats/early_exit.py",
        "formats/mtp_layout.py",
        "formats/draft_models.py",
        "heads/draft_model.py",
        "pair/new.py",
        "targets/gguf_models.py",
        "lab/grow_verb.py",
        "lab/tli.py",
        "lab/transplant_verb.py",
        "scripts/quickstart.py",
    }
