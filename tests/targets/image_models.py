"""Tiny targets that see images: real configs with random weights, real processors, and images for them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from outrider.targets import Target
from outrider.targets.images import ImageSource, PromptImage, insert_images, without_videos

from ..conftest import byte_level_bpe

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava")
SPECIAL = [
    "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
]  # fmt: skip
TEXT = ["def add(first, second):\n    return first + second\n", "What is this? A red picture.\n\n\nAnd that?\n"] * 4

# Contents are lists of parts, as in the templates of llava-hf, or text.
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_NO_IDS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def tokenizer_for(family: str) -> PreTrainedTokenizerFast:
    shown = {
        "gemma3": "<|vision_start|>",
        "llava": "<|image_pad|>",
    }.get(family, "<|vision_start|><|image_pad|><|vision_end|>")
    own: dict[str, Any] = {}
    if family == "gemma3":
        own["extra_special_tokens"] = {
            "image_token": "<|image_pad|>",
            "boi_token": "<|vision_start|>",
            "eoi_token": "<|vision_end|>",
        }
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(SPECIAL, TEXT),
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE.replace("IMAGE", shown),
        **own,
    )


def processor_for(family: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    import transformers

    template = tokenizer.chat_template
    if family.startswith("qwen"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        kind = transformers.Qwen2_5_VLProcessor if family == "qwen2_5_vl" else transformers.Qwen3VLProcessor
        patch = 14 if family == "qwen2_5_vl" else 16
        images = Qwen2VLImageProcessorPil(
            patch_size=patch, merge_size=2, size={"shortest_edge": 4 * patch**2, "longest_edge": 64 * patch**2}
        )
        return without_videos(kind)(images, tokenizer, None, chat_template=template)
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<|image_pad|>",
        chat_template=template,
    )


def config_for(family: str, vocab: int, image_token: int) -> Any:
    text = {**_TEXT, "vocab_size": vocab, **_NO_IDS}
    if family == "qwen2_5_vl":
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
        ids = {"vision_start_token_id": 7, "vision_end_token_id": 8}
    elif family == "qwen3_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        text |= {"head_dim": 8, "rope_parameters": rope}
        vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, "patch_size": 16}
        ids = {"vision_start_token_id": 7, "vision_end_token_id": 8}
    elif family == "gemma3":
        text |= {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}
        text |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision |= {"image_size": 28, "patch_size": 7, "vision_use_head": False}
        ids = {"mm_tokens_per_image": 4, "boi_token_index": 7, "eoi_token_index": 8}
    else:
        text |= {"model_type": "llama"}
        vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "projection_dim": 32}
        vision |= {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
        ids = {"vision_feature_select_strategy": "default", "vision_feature_layer": -1}
    name = "image_token_id" if family.startswith("qwen") else "image_token_index"
    return AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=False, **ids, **{name: image_token}
    )


def model_for(family: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = config_for(family, len(tokenizer), SPECIAL.index("<|image_pad|>"))
    model = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        if "visual" in name or "vision" in name or "projector" in name or "projection" in name:
            # what an image shows must reach the text
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.eval().requires_grad_(False)


def target_for(family: str, seed: int = 0) -> Target:
    """Return a random target of a family in memory, with its processor."""
    tokenizer = tokenizer_for(family)
    return Target(model_for(family, tokenizer, seed), tokenizer, processor=processor_for(family, tokenizer))


def save_target(family: str, folder: Path) -> Path:
    """Save such a target as the library does, with its processor's settings and its chat template."""
    tokenizer = tokenizer_for(family)
    model_for(family, tokenizer).save_pretrained(folder)
    processor = processor_for(family, tokenizer)
    if family.startswith("qwen"):  # the older layout: preprocessor_config.json beside the tokenizer
        tokenizer.save_pretrained(folder)
        processor.image_processor.save_pretrained(folder)
    else:
        processor.save_pretrained(folder)
    return folder


def png(width: int = 120, height: int = 90, seed: int = 0) -> bytes:
    """Return the file of an image of random pixels."""
    from PIL import Image

    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(out, format="PNG")
    return out.getvalue()


def chat(images: list[bytes]) -> list[dict[str, Any]]:
    """Return a user's turn in which each image stands between texts."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "A red picture.\n\n"}]
    for number in range(len(images)):
        parts += [{"type": "image", "image": str(number)}, {"type": "text", "text": "\n\nWhat is this? A picture."}]
    return [{"role": "user", "content": parts}]


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def prompt_of(target: Target, images: list[bytes]) -> tuple[list[int], list[PromptImage]]:
    """Return the tokens of such a turn, and its images."""
    tokenizer = target.require_tokenizer()
    text = tokenizer.apply_chat_template(chat(images), tokenize=False, add_generation_prompt=True)
    shown = [target.images.show(ImageSource.find(data_url(image), None, "here"), "here") for image in images]
    return tokenizer(insert_images(text, shown)[0], add_special_tokens=False)["input_ids"], shown


def by_library(target: Target, images: list[bytes], new: int, **settings: Any) -> tuple[list[int], list[int]]:
    """Return the prompt's tokens and the text that the library's own processor and `generate` make of it."""
    from PIL import Image

    processor, tokenizer = target.images.processor, target.require_tokenizer()
    text = tokenizer.apply_chat_template(chat(images), tokenize=False, add_generation_prompt=True)
    decoded = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
    inputs = processor(images=decoded, text=[text], return_tensors="pt", text_kwargs={"add_special_tokens": False})
    out = target.model.generate(**inputs, max_new_tokens=new, do_sample=False, **settings)[0].tolist()
    return inputs["input_ids"][0].tolist(), out[inputs["input_ids"].shape[1] :]
