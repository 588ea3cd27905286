"""Models as quantising tools leave them: compressed-tensors, bitsandbytes, torchao, and FP8 blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

from .conftest import edit

GROUP = 16
# Of compressed-tensors: its preset, and changes to the weights' arguments.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "W8A8": ("W8A8", {}),
    "W8A16": ("W8A16", {"group_size": GROUP}),
    "W4A16": ("W4A16", {"group_size": GROUP}),
    "W4A16 with zero points": ("W4A16_ASYM", {"group_size": GROUP}),
    "FP8 W8A8": ("FP8", {}),
    "FP8 W8A8 by blocks": ("FP8_BLOCK", {"block_structure": [GROUP, GROUP]}),
}
OTHERS = ("FP8 W8A16 (fp8)", "NF4 (bitsandbytes)", "NF4, scales of scales", "Int8WeightOnly (torchao)")


def write_quantised(form: str, source: Path, folder: Path) -> Path:
    """Write a form of the model in `source` into `folder`, and return it."""
    model: Any
    if form in PRESETS:
        model = _by_compressed_tensors(*PRESETS[form], source)
    elif form == OTHERS[0]:
        return _in_fp8_blocks(source, folder)
    else:
        from torchao.quantization import Int8WeightOnlyConfig

        double = form == OTHERS[2]
        config: Any = TorchAoConfig(Int8WeightOnlyConfig())
        if form != OTHERS[3]:
            options: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
            config = BitsAndBytesConfig(**options, bnb_4bit_use_double_quant=double)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(folder)
    if form in PRESETS:
        model.written_by.update_config(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def _by_compressed_tensors(preset: str, changes: dict[str, Any], source: Path) -> Any:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    for name, value in changes.items():
        setattr(scheme.weights, name, value)
    if scheme.input_activations is not None and scheme.input_activations.group_size:
        scheme.input_activations.group_size = GROUP
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        shape, scales = module.weight.shape, module.weight_scale.shape
        rows, columns = shape[0] // scales[0], shape[1] // scales[-1] if len(scales) == 2 else shape[1]
        groups = module.weight.reshape(shape[0] // rows, rows, shape[1] // columns, columns)
        scale, zero = calculate_qparams(groups.amin((1, 3)), groups.amax((1, 3)), module.quantization_scheme.weights)
        module.weight_scale.data.copy_(scale.reshape(scales))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(8 / 448)
        module.quantization_status = QuantizationStatus.FROZEN
    model.written_by = ModelCompressor.from_pretrained_model(model)
    model.written_by.compress_model(model)
    return model


def _in_fp8_blocks(source: Path, folder: Path) -> Path:
    """Write it as DeepSeek's models are: FP8 numbers, and a scale for each block of rows and columns."""
    from safetensors.torch import load_file, save_file

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(folder)
    weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
    for name, weight in list(weights.items()):
        if "_proj" in name:
            blocks = weight.reshape(weight.shape[0] // GROUP, GROUP, weight.shape[1] // GROUP, GROUP)
            scale = blocks.abs().amax((1, 3)) / 448
            weights[name] = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scale
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
    edit(folder / "config.json", quantization_config=config)
    return folder
