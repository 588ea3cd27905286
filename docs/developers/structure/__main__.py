"""Print figures about the structure of the code: sizes of classes, circles of files, what one must read.

    python docs/developers/structure                     # this checkout
    python docs/developers/structure OLD_CHECKOUT .      # two checkouts, one column each

Everything is read from the syntax trees of `outrider`'s packages, without their tests; nothing is imported.

- files, lines: Python files of the packages; no tests, documentation, benchmarks
- methods: functions in the class itself, properties included; nothing inherited
- attributes: names that the class declares with a type, and names that its methods set on `self`
- parameters: without `self` and `cls`, and without verbs of the command line, whose parameters are options
- `Any` in signatures: each `Any` in the type of a parameter or of a returned value
- imports in functions: those of files that import typer are the command line's
- circles of files: files that import each other, directly or through others; imports inside functions, for type
  checkers and by name count
- files that name a rule: files with a string that equals the name of a verification rule
- files to read for a step of EAGLE-3: the draft step from `open`, `update`, `prefill`, `decode` and `select` of
  `Eagle3`, the training step from its `loss`, followed through names and methods inside `heads/`
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from checkout import Checkout, Reading, circles, length

RULES = {"greedy", "rejection", "candidates", "without_replacement", "block", "traversal", "coupled", "typical"}
DRAFT_STEP = {"open", "update", "prefill", "decode", "select"}
TRAINING_STEP = {"loss"}
Node = TypeVar("Node", bound=ast.AST)


def nodes(checkout: Checkout, kind: type[Node]) -> Iterator[tuple[str, Node]]:
    return ((checkout.paths[m], n) for m, tree in checkout.trees.items() for n in ast.walk(tree) if isinstance(n, kind))


def largest(found: dict[str, int], count: int = 10) -> list[str]:
    return [f"{value} {name}" for name, value in Counter(found).most_common(count)]


def methods(checkout: Checkout) -> dict[str, int]:
    return {
        f"{path}:{c.name}": sum(isinstance(n, ast.FunctionDef) for n in c.body)
        for path, c in nodes(checkout, ast.ClassDef)
    }


def attributes(checkout: Checkout) -> dict[str, int]:
    return {f"{path}:{c.name}": len(_attributes(c)) for path, c in nodes(checkout, ast.ClassDef)}


def _attributes(cls: ast.ClassDef) -> set[str]:
    """Return the names that a class declares or that its methods set on `self`."""
    declared = {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    stored = (n for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return declared | {n.attr for n in stored if getattr(n.value, "id", "") == "self"}


def parameters(checkout: Checkout, constructors: bool) -> dict[str, int]:
    found = {}
    for path, function in nodes(checkout, ast.FunctionDef):
        if (function.name == "__init__") == constructors and not _is_verb(function):
            found[f"{path}:{function.lineno} {function.name}"] = len(_parameters(function))
    return found


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    a = function.args
    listed = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]
    return [x for x in listed if x.arg not in ("self", "cls")]


def _is_verb(function: ast.FunctionDef) -> bool:
    return any(getattr(getattr(d, "func", d), "attr", "") in ("command", "callback") for d in function.decorator_list)


def anys(checkout: Checkout) -> dict[str, int]:
    found: Counter[str] = Counter()
    for path, function in nodes(checkout, ast.FunctionDef):
        annotations = [x.annotation for x in _parameters(function)] + [function.returns]
        found[path] += sum(getattr(n, "id", "") == "Any" for a in annotations if a for n in ast.walk(a))
    return +found


def asserts_of_none(checkout: Checkout) -> dict[str, int]:
    return dict(
        Counter(p for p, n in nodes(checkout, ast.Assert) if any(isinstance(x, ast.IsNot) for x in ast.walk(n.test)))
    )


def lazy_imports(checkout: Checkout) -> dict[str, int]:
    """Return imports inside functions, by room; those of the files that import typer are the command line's."""
    found: Counter[str] = Counter()
    for module, tree in checkout.trees.items():
        functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
        inside = {id(n) for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)}
        found["the command line" if "\nimport typer" in checkout.texts[module] else module.split(".")[0]] += len(inside)
    return +found


def reading(checkout: Checkout, methods: set[str]) -> dict[str, int]:
    others = (DRAFT_STEP | TRAINING_STEP) - methods
    heads = (name for name in checkout.defined if name.startswith("heads."))
    module = next(name for name in heads if "Eagle3" in checkout.defined[name])
    return Reading(checkout, module, "Eagle3", methods, others).files()


def rule_names(checkout: Checkout) -> dict[str, int]:
    return dict(Counter(p for p, n in nodes(checkout, ast.Constant) if isinstance(n.value, str) and n.value in RULES))


def function_lengths(checkout: Checkout) -> dict[str, int]:
    return {f"{path}:{f.lineno} {f.name}": length(f) for path, f in nodes(checkout, ast.FunctionDef)}


def in_lines(checkout: Checkout, holds: Callable[[str], bool]) -> int:
    return sum(holds(line) for text in checkout.texts.values() for line in text.splitlines())


def summary(checkout: Checkout) -> dict[str, object]:
    """Return each figure that is one number or one line."""
    lengths = sorted(function_lengths(checkout).values())
    lazy = lazy_imports(checkout)
    return {
        "files": len(checkout.paths),
        "lines": in_lines(checkout, lambda _: True),
        "classes with more than 20 methods": sum(n > 20 for n in methods(checkout).values()),
        "constructors with more than 7 parameters": sum(n > 7 for n in parameters(checkout, True).values()),
        "functions with more than 8 parameters": sum(n > 8 for n in parameters(checkout, False).values()),
        "median length of a function": lengths[len(lengths) // 2],
        "functions of more than 60 lines": sum(n > 60 for n in lengths),
        "`Any` in signatures": sum(anys(checkout).values()),
        "`assert … is not None`": sum(asserts_of_none(checkout).values()),
        "imports in functions, the command line's": lazy.pop("the command line", 0),
        "imports in functions, others": sum(lazy.values()),
        "circles of files": len(circles(checkout.edges())),
        "files to read for EAGLE-3's draft step": len(reading(checkout, DRAFT_STEP)),
        "files to read for EAGLE-3's training step": len(reading(checkout, TRAINING_STEP)),
        "files that name a verification rule": len(rule_names(checkout)),
        "lines of more than 120 characters": in_lines(checkout, lambda line: len(line) > 120),
        "`fmt: skip`": in_lines(checkout, lambda line: "fmt: skip" in line),
    }


def details(checkout: Checkout) -> dict[str, list[str]]:
    """Return the lists that stand under the figures."""
    return {
        "The ten classes with the most methods": largest(methods(checkout)),
        "The ten classes with the most attributes": largest(attributes(checkout)),
        "The longest parameter lists of constructors": largest(parameters(checkout, True), 5),
        "The longest parameter lists of functions": largest(parameters(checkout, False), 5),
        "The longest functions": largest(function_lengths(checkout), 5),
        "`Any` in signatures": largest(anys(checkout)),
        "`assert … is not None`": largest(asserts_of_none(checkout)),
        "Imports in functions": largest(lazy_imports(checkout), 20),
        "Circles of files": [" ↔ ".join(circle) for circle in circles(checkout.edges())],
        "EAGLE-3's draft step: lines reached in each file": largest(reading(checkout, DRAFT_STEP), 20),
        "EAGLE-3's training step: lines reached in each file": largest(reading(checkout, TRAINING_STEP), 20),
        "Names of verification rules in each file": largest(rule_names(checkout), 30),
    }


def main(folders: list[str]) -> None:
    checkouts = {name: Checkout(Path(name)) for name in folders}
    columns = [summary(checkout) for checkout in checkouts.values()]
    print("| |" + "".join(f" {name} |" for name in checkouts))
    print("|---|" + "---|" * len(columns))
    for label in columns[0]:
        print(f"| {label} |" + "".join(f" {column[label]} |" for column in columns))
    for name, checkout in checkouts.items():
        for title, rows in details(checkout).items():
            print(f"\n{title} ({name}):\n")
            print("\n".join(f"- {row}" for row in rows) or "- none")


if __name__ == "__main__":
    main(sys.argv[1:] or [str(Path(__file__).parents[3])])
