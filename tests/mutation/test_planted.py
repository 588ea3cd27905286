"""The faults that are planted by hand stand where they can be planted."""

from __future__ import annotations

import pytest
import yaml

from .mutate import HERE, MODULES, ROOT

PLANTED = yaml.safe_load((HERE / "planted.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_replaces_a_text_of_its_module(name: str) -> None:
    text = (ROOT / MODULES[name].source).read_text(encoding="utf-8")
    assert [fault["was"] for fault in PLANTED[name] if fault["was"] not in text] == []
