"""The syntax trees of a checkout's packages, who imports whom, and what one must read to follow a class's methods."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ALWAYS_RUN = {"__init__", "__call__", "forward"}
Place = tuple[str, str, str]  # a module, a class in it or "", a function or method


class Checkout:
    """The files of a checkout's packages, by dotted name below `outrider`."""

    def __init__(self, root: Path):
        rooms = sorted(f.parent for f in root.glob("*/__init__.py"))
        files = {_module_name(f, root): f for room in rooms for f in sorted(room.rglob("*.py"))}
        self.paths = {name: file.relative_to(root).as_posix() for name, file in files.items()}
        self.texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self.defined = {name: _definitions(tree) for name, tree in self.trees.items()}
        # What each file takes from the packages: local name to (module, name there, or None for the module itself).
        self.imports = {name: dict(self._imports(name)) for name in self.trees}

    def edges(self) -> dict[str, set[str]]:
        """Return the import graph; imports in functions, for type checkers and by name count, too."""
        return {
            module: ({source for source, _ in self.imports[module].values()} | self._by_name(module)) - {module}
            for module in self.trees
        }

    def _by_name(self, module: str) -> set[str]:
        """Return the modules that a file imports by `import_module("…")`."""
        calls = (n for n in ast.walk(self.trees[module]) if isinstance(n, ast.Call) and n.args)
        named = (n.args[0] for n in calls if _last_name(n.func) == "import_module")
        names = (n.value for n in named if isinstance(n, ast.Constant) and isinstance(n.value, str))
        return {source for name in names if (source := self._absolute(module, name)) in self.trees}

    def _absolute(self, module: str, name: str) -> str:
        """Return the dotted name below `outrider` of a module that `module` calls `name`, such as `.rules`."""
        level = len(name) - len(name.lstrip("."))
        if not level:
            return name.removeprefix("outrider.") if name.startswith("outrider.") else "another package"
        parts = module.split(".") + (["__init__"] if self.paths[module].endswith("/__init__.py") else [])
        return ".".join([*parts[:-level], *([name[level:]] if name[level:] else [])])

    def _imports(self, module: str) -> Iterator[tuple[str, tuple[str, str | None]]]:
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.ImportFrom):
                yield from self._taken(module, node)

    def _taken(self, module: str, node: ast.ImportFrom) -> Iterator[tuple[str, tuple[str, str | None]]]:
        source = self._absolute(module, "." * node.level + (node.module or ""))
        for alias in node.names:
            if f"{source}.{alias.name}".removeprefix(".") in self.trees:
                yield alias.asname or alias.name, (f"{source}.{alias.name}".removeprefix("."), None)
            elif source in self.trees:
                yield alias.asname or alias.name, (source, alias.name)

    def source_of(self, module: str, name: str) -> tuple[str, str] | None:
        """Return where a name that a file uses is defined, through re-exports; None if no package defines it."""
        while name not in self.defined[module]:
            source, found = self.imports[module].get(name, ("", None))
            if found is None:
                return None
            module, name = source, found
        return module, name

    def class_at(self, place: tuple[str, str]) -> ast.ClassDef:
        node = self.defined[place[0]][place[1]]
        if not isinstance(node, ast.ClassDef):
            raise TypeError(f"{place[1]} in {self.paths[place[0]]} is no class")
        return node


def _definitions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    return {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def _module_name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of two or more files that reach each other."""
    reached = {name: _reached(name, edges) for name in edges}
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in edges}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found


class Reading:
    """The functions of one room that some `methods` of a class reach without its `others` (see __main__)."""

    def __init__(self, checkout: Checkout, module: str, name: str, methods: set[str], others: set[str]):
        self.checkout, self.room = checkout, module.split(".")[0]
        self.called, self.others = methods | ALWAYS_RUN, others
        self.classes: set[tuple[str, str]] = set()
        self.found: set[Place] = set()
        self._reach(module, name)
        before = -1
        while before != len(self.found):
            before = len(self.found)
            for cls in sorted(self.classes):
                for method in sorted(self.called - self.others):
                    self._add(self._resolve(cls, method))

    def files(self) -> dict[str, int]:
        """Return how many lines of each file are reached."""
        lines: Counter[str] = Counter()
        for module, cls, name in self.found:
            node = self._node(module, cls, name)
            lines[self.checkout.paths[module]] += length(node)
        return dict(lines.most_common())

    def _reach(self, module: str, name: str) -> None:
        source = self.checkout.source_of(module, name)
        if source is None or source[0].split(".")[0] != self.room or source in self.classes:
            return
        node = self.checkout.defined[source[0]][source[1]]
        if isinstance(node, ast.ClassDef):
            self.classes.add(source)
            for value in (n.value for n in node.body if isinstance(n, ast.Assign | ast.AnnAssign) and n.value):
                self._walk(source[0], source[1], value)
        else:
            self._add((source[0], "", source[1]))

    def _add(self, place: Place | None) -> None:
        if place and place not in self.found:
            self.found.add(place)
            self._walk(place[0], place[1], self._node(*place))

    def _walk(self, module: str, cls: str, node: ast.AST) -> None:
        for n in _without_annotations(node):
            if isinstance(n, ast.Name):
                self._reach(module, n.id)
            elif isinstance(n, ast.Attribute):
                whole, name = self.checkout.imports[module].get(getattr(n.value, "id", ""), ("", None))
                if whole and name is None:
                    self._reach(whole, n.attr)
                elif cls and isinstance(n.value, ast.Call) and getattr(n.value.func, "id", "") == "super":
                    self._add(self._inherited((module, cls), n.attr))
                elif _last_name(n.value) != "config":  # a setting may be called like a method
                    self.called.add(n.attr)

    def _resolve(self, cls: tuple[str, str], method: str) -> Place | None:
        own = (n.name for n in self.checkout.class_at(cls).body if isinstance(n, ast.FunctionDef))
        return (*cls, method) if method in own else self._inherited(cls, method)

    def _inherited(self, cls: tuple[str, str], method: str) -> Place | None:
        names = [getattr(base, "id", "") for base in self.checkout.class_at(cls).bases]
        bases = [base for name in names if (base := self.checkout.source_of(cls[0], name))]
        return next((found for base in bases if (found := self._resolve(base, method))), None)

    def _node(self, module: str, cls: str, name: str) -> ast.FunctionDef | ast.ClassDef:
        if not cls:
            return self.checkout.defined[module][name]
        body = self.checkout.class_at((module, cls)).body
        return next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == name)


def length(node: ast.FunctionDef | ast.ClassDef) -> int:
    """Return how many lines a definition has."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _last_name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _without_annotations(child)
