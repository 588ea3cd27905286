"""Run by the environment of the `speculators` package: what its own P-EAGLE computes from an exported folder.

python peagle_by_speculators.py FOLDER INPUTS OUT STEPS

All depths of all places, without dropping any: the logits, and the place and depth of each.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.peagle import PEagleSpeculatorConfig, core


@torch.no_grad()
def main(folder: str, inputs: str, out: str, steps: str) -> None:
    config = PEagleSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    head = core.PEagleDraftModel.from_pretrained(folder, config=config)
    given, found = load_file(inputs), {}
    draw = core.generate_cod_sample_indices

    def kept(**settings):
        found["places"], found["depths"] = draw(**settings)
        return found["places"], found["depths"]

    core.generate_cod_sample_indices = kept
    head.lm_head.register_forward_hook(lambda module, inputs, output: found.update(logits=output[0].float()))
    head.eval()(
        given["hidden"],
        given["tokens"],
        torch.zeros_like(given["tokens"]),
        verifier_last_hidden_states=given["last"],
        loss_config=resolve_loss_config("kl_div", "eager"),
        num_depths=int(steps),
        down_sample_ratio=1.0,
        down_sample_ratio_min=1.0,
    )
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)


main(*sys.argv[1:])
