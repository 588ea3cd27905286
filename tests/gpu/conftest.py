"""A process that can name CUDA devices, and targets that nothing is tried of."""

from __future__ import annotations

import pytest

from outrider.targets import target as target_module

from .fake_cuda import make_guard


@pytest.fixture(scope="session", autouse=True)
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    make_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is tried of a target once: it looks at values, of which fake tensors have none."""
    monkeypatch.setattr(target_module, "require_readable", lambda *given: None)
