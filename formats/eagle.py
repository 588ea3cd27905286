"""EAGLE heads (the first EAGLE) as engines read them: a Llama config, `fc`, and layers of which the first has no norm.

Engines differ in one tensor. The method's own repository has `fc.bias` if its config says `bias`; SGLang always adds a
bias, and invents one that is missing; vLLM has none and refuses the tensor.

Shapes: H hidden size.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal

from torch import Tensor

from ..heads import Drafter, DrafterConfig, Eagle1, Eagle1Config
from ..targets import Target
from .drafter_files import DrafterFiles
from .layout import ExportLayout, Unsupported
from .llama import EMBEDDINGS, check_embeddings, layer_sizes, llama_config, shapes_of
from .load_weights import fill
from .reading import ProbeSequence, eagle1_logits, embedding_table


class EagleLayout(ExportLayout):
    """EAGLE heads.

    Args:
        engine: whose dialect is written; all are read.
    """

    name = "eagle"
    drafter = "eagle1"
    optional = (EMBEDDINGS, "fc.bias")

    def __init__(self, engine: Literal["vllm", "sglang", "eagle"]):
        self.engine = engine

    def lacks(self, config: DrafterConfig, num_layers: int) -> list[Unsupported]:
        assert isinstance(config, Eagle1Config)
        lacks = []
        for name, why in (
            ("norm_inputs", "it reads embedding and hidden state as they are"),
            ("norm_first", "its first layer has no norm before attention"),
        ):
            if getattr(config, name):
                lacks.append(Unsupported(f"{name}: true", why, f"{name}: false, or an eagle3 drafter"))
        if config.fc_bias and self.engine == "vllm":
            lacks.append(Unsupported("fc_bias: true", "its fc has no bias", "fc_bias: false"))
        return lacks

    def write(self, drafter: Drafter, target: Target, depth: int) -> DrafterFiles:
        assert isinstance(drafter, Eagle1)
        tensors = dict(drafter.state_dict())
        weight = drafter.fc.weight
        if self.engine == "sglang" and not drafter.config.fc_bias:
            tensors["fc.bias"] = weight.new_zeros(len(weight))
        if self.engine == "eagle":
            tensors[EMBEDDINGS] = embedding_table(target)
        return DrafterFiles(self._config(drafter), tensors)

    def _config(self, drafter: Eagle1) -> dict[str, Any]:
        # vLLM puts "Eagle" before the name of a Llama by itself.
        name = "LlamaForCausalLMEagle" if self.engine == "sglang" else "LlamaForCausalLM"
        dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
        return llama_config(drafter.config) | {
            "architectures": [name],
            "bias": drafter.config.fc_bias,
            "eagle_fc_bias": drafter.config.fc_bias,
            "dtype": dtype,
        }

    def logits(self, found: DrafterFiles, target: Target, passage: ProbeSequence) -> Tensor:
        return eagle1_logits(found.tensors, found.config, passage)

    def recognises(self, config: dict[str, Any], names: Set[str]) -> bool:
        architectures = config.get("architectures") or []
        eagle3 = "draft_vocab_size" in config or any("Eagle3" in name for name in architectures)
        named = any("Eagle" in name for name in architectures) or "bias" in config or "eagle_fc_bias" in config
        return named and not eagle3 and "speculators_model_type" not in config

    def shapes(self, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        bias = bool(config.get("bias") or config.get("eagle_fc_bias"))
        settings = Eagle1Config(**layer_sizes(config, "config.json"), fc_bias=bias)
        return shapes_of(Eagle1, settings)

    def read(self, found: DrafterFiles, target: Target) -> Eagle1:
        bias = found.tensors.get("fc.bias")
        # A bias of zeros, which SGLang wants to see, is none.
        has_bias = bias is not None and bool(bias.any())
        sizes = layer_sizes(found.config, str(found.config_file))
        drafter = Eagle1(Eagle1Config(**sizes, fc_bias=has_bias, target_layers=target.num_layers))
        weights = {name: tensor for name, tensor in found.tensors.items() if name != EMBEDDINGS}
        if not has_bias:
            weights.pop("fc.bias", None)
        fill(drafter, weights, [], str(found.folder))
        check_embeddings(found.tensors.get(EMBEDDINGS), target, found.folder)
        drafter.check(target)
        return drafter.eval()
