"""A package's names are imported when they are first asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.common.lazy import lazily


def test_a_name_is_imported_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "late_package"
    package.mkdir()
    (package / "inner.py").write_text("thing, other = 1, 2\n")
    lines = ["from outrider.common.lazy import lazily", "if False:", "    from .inner import thing", "else:"]
    (package / "__init__.py").write_text("\n".join([*lines, "    __getattr__ = lazily(__name__, __file__)", ""]))
    import late_package

    assert "late_package.inner" not in sys.modules
    assert late_package.thing == 1
    assert "late_package.inner" in sys.modules
    with pytest.raises(AttributeError, match="module 'late_package' has no attribute 'nothing'"):
        _ = late_package.nothing


@pytest.mark.parametrize("package", ["decode", "pair", "targets"])
def test_every_name_of_a_package_is_there(package: str) -> None:
    module = __import__(f"outrider.{package}", fromlist=["__all__"])
    found = lazily(module.__name__, module.__file__)
    assert [name for name in module.__all__ if getattr(found(name), "__name__", name) != name] == []
