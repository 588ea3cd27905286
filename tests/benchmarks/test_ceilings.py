"""What memory can feed at best: bytes are counted once, and a floor is bytes over bandwidth."""

from __future__ import annotations

import pytest

from benchmarks.ceilings import Bandwidth, Floor, bandwidth
from outrider.common import BadInputError
from outrider.costs import timing


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch):
    monkeypatch.setattr(timing, "timed", lambda work, device: 0.5)
    assert bandwidth("cpu", 2**20).copy == 2 * 2**20 / 0.5
    assert bandwidth("cpu", 2**20).read == 2**20 / 0.5
    assert bandwidth("cpu", 2**20) == Bandwidth(copy=2**22, read=2**21, num_bytes=2**20)
    with pytest.raises(BadInputError, match="at least 4096 bytes"):
        bandwidth("cpu", 8)


def test_real_bandwidths_are_plausible():
    found = bandwidth("cpu", 2**22)
    assert 1e8 < found.copy < 1e13
    assert 1e8 < found.read < 1e13


def test_a_floor_is_bytes_over_bandwidth():
    floor = Floor(weights=1000, cache=500, bandwidth=Bandwidth(copy=100.0, read=50.0, num_bytes=1))
    assert (floor.at_copy, floor.at_read, floor.with_cache) == (10.0, 20.0, 30.0)
    assert floor.to_dict()["weight_bytes"] == 1000
