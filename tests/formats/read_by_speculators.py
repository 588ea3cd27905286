"""Run by the environment of the `speculators` package: the logits of its own model for an exported folder.

python read_by_speculators.py KIND FOLDER INPUTS OUT STEPS

Of an EAGLE-3 head (eagle3) the logits of each step, or what its training gives (eagle3-gradient): the gradient of each
parameter. Of a P-EAGLE head (peagle) the logits of all depths of all places, without dropping any, with the place and
depth of each. Of a DFlash2 drafter (dflash2) the candidates of all slots of blocks at all places, and their scores
after the tokens of the text.
"""

import sys

import torch
from safetensors.torch import load_file, save_file


def eagle3(folder: str, given: dict, steps: int) -> dict:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    head, logits = load(Eagle3DraftModel, Eagle3SpeculatorConfig, folder), []
    head.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0].float()))
    head(given["hidden"], given["tokens"], torch.zeros_like(given["tokens"]), ttt_steps=steps)
    return {str(step): one for step, one in enumerate(logits)}


def eagle3_gradient(folder: str, given: dict, steps: int) -> dict:
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    head = load(Eagle3DraftModel, Eagle3SpeculatorConfig, folder).train()
    head.verifier_norm = torch.nn.Identity()  # the states that are given are normed
    head.verifier_lm_head.weight.data = given["output"]
    with torch.enable_grad():
        loss = head(
            given["hidden"],
            given["tokens"],
            torch.zeros_like(given["tokens"]),
            loss_mask=given["learned"].bool(),
            verifier_last_hidden_states=given["last"],
            loss_config=resolve_loss_config("kl_div", "eager"),
            ttt_steps=steps,
            ttt_step_loss_decay=float(given["decay"]),
        )[1]
        loss.backward()
    return {name: value.grad for name, value in head.named_parameters() if value.grad is not None}


def peagle(folder: str, given: dict, steps: int) -> dict:
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import PEagleSpeculatorConfig, core

    head, found = load(core.PEagleDraftModel, PEagleSpeculatorConfig, folder), {}
    draw = core.generate_cod_sample_indices

    def kept(**settings):
        found["places"], found["depths"] = draw(**settings)
        return found["places"], found["depths"]

    core.generate_cod_sample_indices = kept
    head.lm_head.register_forward_hook(lambda module, inputs, output: found.update(logits=output[0].float()))
    head(
        given["hidden"],
        given["tokens"],
        torch.zeros_like(given["tokens"]),
        verifier_last_hidden_states=given["last"],
        loss_config=resolve_loss_config("kl_div", "eager"),
        num_depths=steps,
        down_sample_ratio=1.0,
        down_sample_ratio_min=1.0,
    )
    return found


def dflash2(folder: str, given: dict, steps: int) -> dict:
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

    head, tokens = load(DFlash2DraftModel, DFlash2SpeculatorConfig, folder), given["tokens"]
    every, texts = torch.ones_like(tokens), torch.zeros_like(tokens)
    every[:, 0] = 0
    blocks = tokens.shape[1] - 1 - head.block_size
    hidden, logits, *_, places = head._backbone_forward(
        given["hidden"], tokens, every, given["last"], texts, max_anchors=blocks
    )
    before = head._predecessor_ids(tokens, places).reshape(1, -1)
    candidates, scores = head.candidate_selector.select(logits, hidden, before)
    return {"candidates": candidates[0], "scores": scores[0], "anchors": places[:: head.block_size]}


def load(model: type, config_class: type, folder: str):
    config = config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return model.from_pretrained(folder, config=config).eval()


@torch.no_grad()
def main(kind: str, folder: str, inputs: str, out: str, steps: str) -> None:
    kinds = {"eagle3": eagle3, "eagle3-gradient": eagle3_gradient, "peagle": peagle, "dflash2": dflash2}
    found = kinds[kind](folder, load_file(inputs), int(steps))
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)


main(*sys.argv[1:])
