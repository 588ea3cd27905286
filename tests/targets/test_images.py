"""Images: found, read within limits, and seen by targets that are loaded from a folder."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

from outrider.common import BadInputError, IncompatibleError
from outrider.targets import Target
from outrider.targets import images as module
from outrider.targets.images import ImageReader, ImageSource, PromptImage, images_in, insert_images

from ..closeness import assert_same, both_precisions
from ..conftest import make_llama

pytest.importorskip("PIL")
from .image_models import FAMILIES, data_url, png, prompt_of, save_target, target_for


@both_precisions
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_target_sees_what_one_in_memory_does(family: str, tmp_path: Path) -> None:
    own, loaded = target_for(family), Target.load(save_target(family, tmp_path), device="cpu")
    assert type(loaded.model) is type(own.model)
    tokens, images = prompt_of(loaded, [png(seed=1)])
    assert (tokens, images) == prompt_of(own, [png(seed=1)])
    states = [
        each.forward(torch.tensor([tokens]), images=each.image_inputs(tokens, images)).logits for each in (own, loaded)
    ]
    assert_same(*states)


@both_precisions
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_a_prompt_with_images_are_the_librarys(family: str) -> None:
    """At all taps, as a training reads them; and they depend on the image.

    Qwen3-VL adds features of the image to what its first layers wrote: what the next layer reads has them in it, as in
    vLLM (`Qwen3LLMModel.forward`), and the library's `hidden_states` have not.
    """
    target = target_for(family)
    tokens, images = prompt_of(target, [png(seed=1), png(seed=2, width=180)])
    inputs = target.image_inputs(tokens, images)
    out = target.forward(torch.tensor([tokens]), taps=range(5), images=inputs)
    given = target.image_arguments(torch.tensor([tokens]), inputs)
    expected = target.model(input_ids=torch.tensor([tokens]), **given, output_hidden_states=True)
    states = list(expected.hidden_states)
    if family == "qwen3_vl":
        seen = target.model.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
        places = torch.tensor(tokens) == target.image_token
        for tap, added in enumerate(seen.deepstack_features, 1):
            states[tap] = states[tap].clone()
            # By image; up to 5.17 the library has all images' rows in one tensor.
            states[tap][0, places] += torch.cat(list(added)).view(-1, target.hidden_size)
    assert_same(out.hidden, torch.stack(states, 2))
    assert_same(out.logits, expected.logits)
    _, others = prompt_of(target, [png(seed=3), png(seed=2, width=180)])
    other = target.forward(torch.tensor([tokens]), images=target.image_inputs(tokens, others)).logits
    assert not torch.allclose(out.logits[:, -1], other[:, -1], atol=1e-3)


def test_text_of_a_target_that_sees_images_needs_no_pillow(tmp_path: Path) -> None:
    """Neither loading it, nor decoding text, imports what images need."""
    folder = save_target("qwen3_vl", tmp_path)
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from outrider.decode import Decoder, Plan\nfrom outrider.targets import Target\n"
        f"target = Target.load({str(folder)!r}, device='cpu')\n"
        "print(Decoder(target).generate([[9, 10, 11]], 4, plan=Plan(0)).tokens[0])\n"
        "from outrider.targets.images import ImageSource\n"
        f"ImageSource.find({data_url(png())!r}, None, 'row 1')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("[")
    assert "row 1: images need Pillow: pip install 'outrider[images]'." in done.stderr


def test_an_image_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    beside, inline = (ImageSource.find(place, tmp_path, "here") for place in ("a.png", data_url(png())))
    assert beside.digest == inline.digest
    assert beside.read() == inline.read() == png()
    (tmp_path / "a.png").write_bytes(png(seed=5))
    with pytest.raises(BadInputError, match="the image was changed since its prompt was read"):
        beside.read()


def large_png(width: int, height: int) -> bytes:
    """Return a small file that says it holds so many pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0" * 99))]
    parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("https://example.org/a.png", "is on a network, and nothing is fetched from there. Save it beside"),
        ("missing.png", "there is no image"),
        ("../secret.png", "is not below the prompt file's folder"),
        ("outside.png", "is not below the prompt file's folder"),
        ("text.png", "not an image of the kinds PNG, JPEG, WEBP, GIF, BMP"),
        ("pixels.png", "images of more than 67,108,864 pixels; no more are decoded for one conversation"),
        ("more.png", "images of more than 67,108,864 pixels"),
        ("large.png", "larger than the 32 MB that such a file may have"),
        ("folder", "expected a regular file, found a folder"),
    ],
)
def test_an_image_that_is_none_of_ours_is_refused(tmp_path: Path, place: str, reason: str) -> None:
    folder = tmp_path / "prompts"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(png())
    (folder / "outside.png").symlink_to(tmp_path / "secret.png")
    (folder / "text.png").write_text("text")
    (folder / "pixels.png").write_bytes(large_png(60_000, 60_000))
    (folder / "more.png").write_bytes(large_png(8193, 8192))
    with (folder / "large.png").open("wb") as file:
        file.truncate(module.MOST_BYTES + 1)
    with pytest.raises(BadInputError, match=reason):
        ImageSource.find(place, folder, "row 1")


def test_a_damaged_image_is_refused_where_it_is_decoded() -> None:
    reader = target_for("llava").images
    for data, reason in ((png()[:-200], "the image is damaged"), (large_png(6000, 3), "the image is damaged")):
        with pytest.raises(BadInputError, match=reason):
            reader.show(ImageSource.find(data_url(data), None, "row 1"), "row 1")


def test_an_image_that_the_processor_does_not_take_is_refused() -> None:
    image = ImageSource.find(data_url(png(width=600, height=2)), None, "row 1")
    with pytest.raises(BadInputError, match="row 1: the target's image processor refuses it: absolute aspect ratio"):
        target_for("qwen3_vl").images.show(image, "row 1")


@pytest.mark.parametrize(("family", "size"), [("qwen2_5_vl", "longest_edge"), ("llava", "shortest_edge")])
def test_a_processor_that_makes_huge_images_is_refused(tmp_path: Path, family: str, size: str) -> None:
    folder = save_target(family, tmp_path)
    [file] = [f for f in folder.glob("*process*.json") if size in f.read_text()]
    values = json.loads(file.read_text())
    values.get("image_processor", values)["size"][size] = 10**9
    file.write_text(json.dumps(values))
    with pytest.raises(BadInputError, match=f"its image processor's size has {size} 1000000000; expected 1 to"):
        prompt_of(Target.load(folder, device="cpu"), [png()])


def test_text_and_images_must_agree() -> None:
    image = PromptImage("a" * 64, "a.png", 9, "<i>", "<i><i><i>", 3)
    text, moved = insert_images("x<i>y<i>z", [image, image])
    assert text == "x<i><i><i>y<i><i><i>z"
    assert [text[moved(place)] for place in (0, 4, 8)] == list("xyz")
    with pytest.raises(BadInputError, match="writes 1 markers '<i>' for 2 images"):
        insert_images("x<i>", [image, image])
    assert images_in(3, [image, image]) == [image]
    with pytest.raises(BadInputError, match="holds 4 image tokens, and its images have 6"):
        images_in(4, [image, image])


def test_a_target_that_sees_no_images_says_so() -> None:
    target = Target(make_llama())
    assert target.images is None
    assert target.why_no_images() == "LlamaForCausalLM sees no images."
    image = PromptImage("a" * 64, "a.png", 9, "<i>", "<i><i><i>", 3)
    with pytest.raises(IncompatibleError, match="sees no images"):
        target.image_inputs([1, 2], [image])
    assert target.image_inputs([1, 2], []) is None


def test_models_whose_images_were_never_compared_are_refused() -> None:
    """Some attend to images by layers of their own, or to a prompt in both directions: their text would be another."""
    target = target_for("qwen2_5_vl")
    target.model.config.model_type = "paligemma"
    assert target.images is None
    expected = "images are read of the model types gemma3, llava, qwen2_5_vl, qwen3_vl alone"
    assert (target.why_no_images() or "").startswith(expected)


def test_more_image_tokens_than_features_are_refused() -> None:
    target = target_for("gemma3")
    tokens, images = prompt_of(target, [png()])
    inputs = target.image_inputs(tokens, images)
    assert target.image_token is not None
    with pytest.raises(BadInputError, match="Gemma3ForConditionalGeneration does not take these images"):
        target.forward(torch.tensor([[*tokens, target.image_token]]), images=inputs)


def test_a_reader_loads_its_processor_when_an_image_comes() -> None:
    def load() -> None:
        raise BadInputError("there is none")

    reader = ImageReader(load)  # type: ignore[arg-type]
    assert reader.inputs([]) is None
    with pytest.raises(BadInputError, match="there is none"):
        reader.inputs([png()])


def test_many_images_are_refused_together() -> None:
    reader = target_for("llava").images
    with pytest.raises(BadInputError, match="row 1: images of more than 67,108,864 pixels"):
        reader.inputs([large_png(6000, 6000)] * 2, "row 1")
