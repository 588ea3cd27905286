"""The benches of packing and of stores run, and their figures hang together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.scripts.bench import packing, stores


def test_packing_learns_all_tokens_either_way(tmp_path: Path) -> None:
    options = ["--texts", "24", "--median", "12", "--longest", "40", "--rows", "4", "--repeats", "1"]
    assert packing.main([*options, "--out", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    padded, packed = found["ways"]["padded"], found["ways"]["packed"]
    assert padded["tokens_of_all_places"] < packed["tokens_of_all_places"] <= 1
    for way in (padded, packed):
        assert way["tokens_per_second"] == pytest.approx(found["conditions"]["tokens"] / way["seconds"])


@pytest.mark.slow
def test_stores_take_what_their_precision_says(tmp_path: Path) -> None:
    options = ["--texts", "12", "--length", "24", "--repeats", "1", "--out", str(tmp_path / "found.json")]
    assert stores.main(options) == 0
    sizes = json.loads((tmp_path / "found.json").read_text())["bytes_per_token_by_dtype"]
    assert sizes["bfloat16"] == sizes["float16"] < 0.6 * sizes["float32"]
    assert sizes["float8_e4m3fn"] < 0.6 * sizes["bfloat16"]
