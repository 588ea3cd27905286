"""Run by the environment of the `speculators` package: what its own model computes from an exported folder.

python read_by_speculators.py FOLDER INPUTS OUT STEPS
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig


@torch.no_grad()
def main(folder: str, inputs: str, out: str, steps: str) -> None:
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    head = Eagle3DraftModel.from_pretrained(folder, config=config)
    found: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda module, given, output: found.append(output[0].float()))
    given = load_file(inputs)
    head.eval()(given["hidden"], given["tokens"], torch.zeros_like(given["tokens"]), ttt_steps=int(steps))
    save_file({str(step): logits.contiguous() for step, logits in enumerate(found)}, out)


main(*sys.argv[1:])
