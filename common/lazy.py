"""Packages whose names are imported when they are first asked for: a start that needs few of them is quick."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazily(package: str, file: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of the package in `file`: what it imports for type checkers is imported when asked for.

    if TYPE_CHECKING:
        from .engine import Decoder
    else:
        __getattr__ = lazily(__name__, __file__)
    """
    statements = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.ImportFrom)]
    homes = {one.name: node.module for node in statements if node.level == 1 for one in node.names}

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)  # it is asked for once
        return value

    return found
