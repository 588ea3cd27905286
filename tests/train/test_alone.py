"""One training per output folder: a second one is refused before it spends anything, whatever it would have done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from outrider.common import BadInputError
from outrider.common.locks import locked
from outrider.distill import distill
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import train
from outrider.train.compare import compare

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def held(recipe: MakeRecipe) -> Iterator[Recipe]:
    """A recipe in whose output somebody else is at work."""
    made, begun, end = recipe(), threading.Event(), threading.Event()

    def hold() -> None:
        with locked(made.output_folder):
            begun.set()
            end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(60)
    yield made
    end.set()
    thread.join()


def test_a_second_writer_is_refused(held: Recipe, target: Target) -> None:
    own = held.model_copy(update={"data": held.data.model_copy(update={"responses": None})})
    for work in (
        lambda: train(held, target),
        lambda: train(held, target, resume=False),
        lambda: distill(own, target),
        lambda: compare([held], 1.0, held.output_folder, target),
    ):
        with pytest.raises(BadInputError, match=r"is being written by process \d+ .* Wait until it ends"):
            work()
    assert not (held.output_folder / "recipe.yaml").exists()
