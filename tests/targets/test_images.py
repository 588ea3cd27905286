"""Images: found, read within limits, and seen by targets that are loaded from a folder."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from outrider.common import BadInputError, IncompatibleError
from outrider.targets import Target
from outrider.targets import images as module
from outrider.targets.images import ImageSource, PromptImage, images_in, insert_images

pytest.importorskip("PIL")
from PIL import Image

from .image_models import FAMILIES, data_url, png, prompt_of, save_target, target_for


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_target_sees_what_one_in_memory_does(family: str, tmp_path: Path) -> None:
    own, loaded = target_for(family), Target.load(save_target(family, tmp_path), device="cpu")
    assert type(loaded.model) is type(own.model)
    tokens, images = prompt_of(loaded, [png(seed=1)])
    assert (tokens, images) == prompt_of(own, [png(seed=1)])
    states = [
        each.forward(torch.tensor([tokens]), images=each.image_inputs(tokens, images)).logits for each in (own, loaded)
    ]
    torch.testing.assert_close(*states)
