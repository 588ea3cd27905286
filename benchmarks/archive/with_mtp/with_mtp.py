"""Write the embedded target in an architecture that has a place for an MTP module: that of GLM-4-MoE.

    python -m outrider.scripts.bench.with_mtp OUT

The texts stay the same. A layer of GLM-4-MoE without experts, bias and norms of queries is Llama's, if positions turn
whole heads. An engine asks for one layer with experts at least: the last one has Llama's own products as its shared
expert, and experts beside it that answer with zeros. The module's weights are random, for a training to replace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaForCausalLM

from outrider.common.atomic import replacing, replacing_folder, write_atomically
from outrider.targets import Target, embedded_path

from .conditions import command

EXPERTS, CHOSEN = 4, 2


def glm_config(llama: LlamaForCausalLM, num_layers: int) -> Glm4MoeConfig:
    """Return the config of a GLM-4-MoE of `num_layers` layers of this Llama's sizes, the last ones with experts."""
    own = llama.config
    same: tuple[str, ...] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    same += ("max_position_embeddings", "rms_norm_eps", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id")
    made = Glm4MoeConfig(
        **{name: getattr(own, name) for name in same},
        num_hidden_layers=num_layers,
        first_k_dense_replace=own.num_hidden_layers - 1,
        moe_intermediate_size=own.intermediate_size,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=CHOSEN,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
        attention_bias=False,
        tie_word_embeddings=False,
        rope_parameters={**(own.rope_parameters or {}), "partial_rotary_factor": 1.0},
    )
    made.num_nextn_predict_layers = 1  # of published checkpoints; the library's class does not name it
    return made


@torch.no_grad()
def as_glm(llama: LlamaForCausalLM) -> Glm4MoeForCausalLM:
    """Return a GLM-4-MoE with one random layer more than `llama`; without that both are the same function."""
    last = llama.config.num_hidden_layers - 1
    torch.manual_seed(0)
    made = Glm4MoeForCausalLM(glm_config(llama, last + 2))
    stems = {f"layers.{last}.mlp.": f"layers.{last}.mlp.shared_experts."}
    own = {_renamed(name, stems): tensor for name, tensor in llama.state_dict().items()}
    missing, unexpected = made.load_state_dict(own, strict=False)
    assert not unexpected, unexpected
    assert all(f"layers.{last}.mlp." in name or f"layers.{last + 1}." in name for name in missing), missing
    made.model.layers[last].mlp.experts.down_proj.zero_()
    return made


def _renamed(name: str, stems: dict[str, str]) -> str:
    for theirs, ours in stems.items():
        name = name.replace(theirs, ours)
    return name


def write_with_mtp(out: Path) -> None:
    """Write the embedded target with a module at random into the new folder `out`."""
    llama = LlamaForCausalLM.from_pretrained(embedded_path(), dtype=torch.float32, trust_remote_code=False)
    made, layers = as_glm(llama), llama.config.num_hidden_layers
    with replacing_folder(out) as folder:
        made.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        with replacing(folder / "model.safetensors") as file:
            save_file(weights | _around(made, layers), file, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
        config["num_nextn_predict_layers"] = 1
        write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
        Target.load("embedded").require_tokenizer().save_pretrained(str(folder))


def _around(made: Glm4MoeForCausalLM, layer: int) -> dict[str, Tensor]:
    """Return what a module has beside its layer, under the names of published checkpoints."""
    size = made.config.hidden_size
    norms = {f"model.layers.{layer}.{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    return norms | {f"model.layers.{layer}.eh_proj.weight": 0.02 * torch.randn(size, 2 * size)}


def main() -> int:
    write_with_mtp(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(command(main))
