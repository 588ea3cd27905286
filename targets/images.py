"""Images in prompts: found and read within limits, and made by the target's own processor into its inputs.

A prompt file, its images and a model's folder may be a stranger's: an image is a regular file of limited size beside
the prompt file, or a `data:` URL. Its pixels are counted before they are decoded, and nothing is fetched.

In a prompt's text an image is one marker, as the chat template writes it. The processor replaces it by as many image
tokens as the model has features of the image.

Shapes: T tokens of a prompt.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..common.digests import digest_json
from ..common.errors import BadInputError, IncompatibleError, OutriderError, Refusal, first_line
from ..common.untrusted_files import MEGABYTE, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

# Model types whose prompts with images are decoded as the library's `generate` does; others may need more than this.
SEEING = ("gemma3", "llava", "qwen2_5_vl", "qwen3_vl")

MOST_BYTES = 32 * MEGABYTE  # of an image's file
MOST_PIXELS = 2**26  # of a conversation's images together: 200 MB in memory
_LONGEST_EDGE = 8192  # that a processor may make
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_TEXT_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")  # of a processor


@dataclass(frozen=True)
class ImageSource:
    """Where an image is: the path of its file, or a `data:` URL; and the SHA-256 of its file, by which it is known."""

    digest: str
    place: str
    pixels: int  # how many it has

    @classmethod
    def find(cls, place: str, folder: Path | None, where: str) -> ImageSource:
        """Return the source of an image that a prompt file in `folder` (None: on the Hub) names.

        Raises BadInputError if it is elsewhere than beside the prompt file, too large, missing, or no image.
        """
        if not place.startswith("data:"):
            if "://" in place:
                raise BadInputError(
                    f"{where}: the image {place:.80} is on a network, and nothing is fetched from there. Save it "
                    "beside the prompt file and name it by its path, or write it as a data: URL."
                )
            place = str(_beside(place, folder, where))
        data = _content(place, where)
        return cls(hashlib.sha256(data).hexdigest(), place, _pixels(opened(data, where)))

    def read(self) -> bytes:
        """Return the content of the image's file. BadInputError: it is not what it was when the prompt was read."""
        shown = "an image in a data: URL" if self.place.startswith("data:") else self.place
        data = _content(self.place, shown)
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise BadInputError(f"{shown}: the image was changed since its prompt was read. Run again.")
        return data


@dataclass(frozen=True)
class PromptImage(ImageSource):
    """An image of a prompt, as the target's processor shows it.

    Attributes:
        marker: its place in the text that the chat template makes.
        text: what the target reads there. num_tokens: image tokens in it.
    """

    marker: str
    text: str
    num_tokens: int


@dataclass(frozen=True)
class ImageInputs:
    """The images of one prompt as the target's forward takes them: `pixel_values`, `image_grid_thw`, …"""

    values: Mapping[str, Tensor]

    def to(self, device: torch.device) -> dict[str, Tensor]:
        """Return them on a device."""
        return {name: value.to(device) for name, value in self.values.items()}


def insert_images(text: str, images: Sequence[PromptImage]) -> tuple[str, Callable[[int], int]]:
    """Return a rendered chat in which its images' texts replace their markers, and a map of places in it.

    Raises BadInputError if there are more or fewer markers than images.
    """
    if not images:
        return text, lambda place: place
    marker = images[0].marker
    first, *rest = text.split(marker)
    if len(rest) != len(images):
        raise BadInputError(
            f"the chat template writes {len(rest)} markers {marker!r} for {len(images)} images; a chat's own text may "
            "hold none, and the template must write one for each."
        )
    growth: list[tuple[int, int]] = []  # the place of each marker, and by how much its image is longer
    place = len(first)
    for image, part in zip(images, rest, strict=True):
        growth.append((place, len(image.text) - len(marker)))
        place += len(marker) + len(part)
    whole = first + "".join(image.text + part for image, part in zip(images, rest, strict=True))
    return whole, lambda place: place + sum(more for begin, more in growth if begin < place)


def images_in(count: int, images: Sequence[PromptImage]) -> list[PromptImage]:
    """Return the first of a prompt's images, which have `count` image tokens together: those that a text shows.

    Raises BadInputError if no number of them has so many.
    """
    shown: list[PromptImage] = []
    for image in images:
        if sum(one.num_tokens for one in shown) >= count:
            break
        shown.append(image)
    if (found := sum(one.num_tokens for one in shown)) != count:
        raise BadInputError(f"a text holds {count} image tokens, and its images have {found}.")
    return shown


class ImageReader:
    """The processor of a target, which is loaded when its first image comes.

    `load` makes the processor; it raises an OutriderError where that cannot be done.
    """

    def __init__(self, load: Callable[[], ProcessorMixin]):
        self._load = load

    @cached_property
    def processor(self) -> Any:
        return self._load()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the processor's settings: with others a target sees other pixels."""
        return digest_json(self.processor.image_processor.to_dict())

    def show(self, image: ImageSource, where: str) -> PromptImage:
        """Return an image as the target will see it. BadInputError: the processor does not take it."""
        marker = self.processor.image_token
        with_offsets = self._process([image.read()], where, return_text_replacement_offsets=True)
        [[shown]] = with_offsets["text_replacement_offsets"]
        ids = set(self.processor.image_token_ids)
        count = sum(int(token) in ids for token in with_offsets["input_ids"][0])
        return PromptImage(image.digest, image.place, image.pixels, marker, shown["replacement"], count)

    def inputs(self, images: Sequence[bytes], where: str = "the images") -> ImageInputs | None:
        """Return the images of one prompt, the contents of their files, as inputs; None for none."""
        if not images:
            return None
        made = self._process(images, where)
        return ImageInputs({name: value for name, value in made.items() if name not in _TEXT_INPUTS})

    def _process(self, images: Sequence[bytes], where: str, **more: Any) -> dict[str, Any]:
        check_pixels(sum(_pixels(opened(data, where)) for data in images), where)
        decoded = [decode_image(data, where) for data in images]
        text = self.processor.image_token * len(images)
        try:
            return dict(self.processor(images=decoded, text=[text], return_tensors="pt", **more))
        except Exception as error:  # processors raise anything at sizes that they do not take
            raise BadInputError(f"{where}: the target's image processor refuses it: {first_line(error)}") from error


class StoredImages:
    """The images of a data set's rows: files named by their digests, in a folder of their own.

    Args:
        rows: the digests of each row's images, in order.
        reader: makes inputs of them.
    """

    def __init__(self, folder: Path, rows: Sequence[Sequence[str]], reader: ImageReader):
        self.folder = folder
        self.rows = rows
        self.reader = reader

    def of(self, row: int) -> ImageInputs | None:
        """Return the images of a row as inputs; None for none. BadInputError: one is missing or was altered."""
        return self.reader.inputs([self._read(digest) for digest in self.rows[row]], str(self.folder))

    @property
    def identity(self) -> str:
        """SHA-256 of the images of all rows, and of how the target sees them."""
        return digest_json([self.reader.digest, list(map(list, self.rows))])

    def _read(self, digest: str) -> bytes:
        return ImageSource(digest, str(self.folder / digest), 0).read()


def decode_image(data: bytes, where: str) -> Image:
    """Return the pixels of an image's file in RGB, turned by its EXIF data. BadInputError: it is damaged."""
    from PIL import ImageOps

    image = opened(data, where)
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, …
        raise BadInputError(f"{where}: the image is damaged ({first_line(error)}).") from error


def opened(data: bytes, where: str) -> Image:
    """Return an image of which only the header was read. BadInputError: it is no image, or has too many pixels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInputError(f"{where}: images need Pillow: pip install 'outrider[images]'.") from error
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError:  # Pillow's own limit, which is higher
        check_pixels(MOST_PIXELS + 1, where)
        raise
    except Exception as error:
        raise BadInputError(f"{where}: not an image of the kinds {', '.join(_FORMATS)}.") from error
    check_pixels(_pixels(image), where)
    return image


def check_pixels(count: int, where: str) -> None:
    """Raise BadInputError for more pixels than the images of a conversation may have."""
    if count > MOST_PIXELS:
        raise BadInputError(
            f"{where}: images of more than {MOST_PIXELS:,} pixels; no more are decoded for one conversation. Make them "
            "smaller."
        )


def _pixels(image: Image) -> int:
    return image.width * image.height


def _beside(place: str, folder: Path | None, where: str) -> Path:
    """Return the file that a path names, which must be below the prompt file's folder, links followed."""
    if folder is None:
        raise BadInputError(f"{where}: the image {place:.80} is no data: URL; a data set of the Hub has no files here.")
    root = folder.resolve()
    file = (root / place.removeprefix("file:")).resolve()
    if not file.is_relative_to(root):
        raise BadInputError(
            f"{where}: the image {place:.80} is not below the prompt file's folder {str(root)!r}. Put it there, and "
            "name it by its path from there."
        )
    return file


def _content(place: str, where: str) -> bytes:
    """Return the content of a file, or of a data: URL. BadInputError: there is none, or it is too large."""
    if not place.startswith("data:"):
        try:
            return read_bytes(Path(place), MOST_BYTES)
        except FileNotFoundError as error:
            raise BadInputError(f"{where}: there is no image {place}.") from error
    head, comma, data = place.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadInputError(f"{where}: a data: URL of an image must be in base64 (data:image/png;base64,…).")
    if len(data) > MOST_BYTES * 4 // 3 + 4:
        raise BadInputError(f"{where}: an image larger than the {MOST_BYTES // MEGABYTE} MB that one may have.")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadInputError(f"{where}: the data: URL of an image is no base64 ({error}).") from error


def processor_in(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the library's own processor for a model, with its settings in a folder, which was checked.

    Its images are always made by Pillow: what a target sees must not depend on whether torchvision is installed.
    """
    # `transformers` itself asks for torchvision before it names this class, up to 5.17.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    from .model_folder import without_questions

    opened(_PIXEL, "the target's processor")  # raises if Pillow is missing
    if type(config) not in PROCESSOR_MAPPING:
        raise IncompatibleError(f"the library has no processor of images for {type(config).__name__}.")
    try:
        with without_questions():
            images = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
            kind = without_videos(cast("type[ProcessorMixin]", PROCESSOR_MAPPING[type(config)]))
            settings, _ = kind.get_processor_dict(folder)
            parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": None}
            made = kind.from_args_and_dict([parts[name] for name in kind.get_attributes()], settings)
    except OutriderError:
        raise
    except Exception as error:
        raise BadInputError(f"{folder}: its image processor cannot be loaded: {first_line(error)}") from error
    _check_sizes(images, folder)
    return made


def _check_sizes(images: Any, folder: Path) -> None:
    """Raise Refusal for a processor that makes larger images than there are: a small one would fill the memory."""
    in_pixels = hasattr(images, "merge_size")  # Qwen's edges are numbers of pixels
    for name in ("size", "crop_size"):
        for edge, value in dict(getattr(images, name, None) or {}).items():
            most = MOST_PIXELS if in_pixels and edge.endswith("_edge") else _LONGEST_EDGE
            if value is not None and not 0 < value <= most:
                raise Refusal.of(
                    folder, f"its image processor's {name} has {edge} {value}", f"1 to {most}", "Take a good copy."
                )


def without_videos(kind: type[ProcessorMixin]) -> type[Any]:
    """Return a class of processors that need no processor of videos: the library's needs torchvision."""

    def check(self: ProcessorMixin, name: str, part: Any) -> Any:
        return None if name == "video_processor" else kind.check_argument_for_proper_class(self, name, part)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


_PIXEL = base64.b64decode("R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7")  # a GIF
