"""Compare block drafters with the classes of the `speculators` package, on random weights: logits of the same blocks.

    python -m outrider.scripts.bench.peers_blocks --out blocks-parity.json     # in an environment with speculators 0.9

`speculators` wants an older `transformers` than Outrider and runs with the present one all the same (`pip install
--no-deps speculators==0.9.0 hs-connectors`); it is not among Outrider's dependencies, and no test needs it.

Shapes: T tokens, n anchors, S slots, V' draft vocabulary.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from outrider.common.atomic import write_atomically
from outrider.heads import DFlash, DFlashConfig, DSpark, DSparkConfig
from outrider.heads.block.block_losses import Anchors
from outrider.targets import Target

CASES: dict[str, tuple[type[DFlash], dict[str, Any]]] = {
    "dflash": (DFlash, {}),
    "dflash, window": (DFlash, {"sliding_window": 9, "window_from": "anchor", "causal": True}),
    "dflash, pruned vocabulary": (DFlash, {"draft_vocab_size": 40}),
    "dflash, from the anchor": (DFlash, {"from_anchor": True}),
    "dspark, vanilla": (DSpark, {}),
    "dspark, gated": (DSpark, {"markov_head": "gated"}),
    "dspark, rnn, pruned vocabulary": (DSpark, {"markov_head": "rnn", "draft_vocab_size": 40}),
    "dspark, infill": (DSpark, {"from_anchor": False}),
}
LENGTH, SIZE, VOCAB = 60, 64, 128


def random_target() -> Target:
    """Return a small random target."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=2 * SIZE,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return Target(LlamaForCausalLM(config).eval().requires_grad_(False))


def random_drafter(kind: type[DFlash], target: Target, changes: dict[str, Any]) -> DFlash:
    """Return a drafter of ours whose norms and heads are random, too."""
    torch.manual_seed(1)
    values: dict[str, Any] = {"num_layers": 2, "block_size": 6, "mask_token_id": VOCAB - 1, **changes}
    config = (DSparkConfig if kind is DSpark else DFlashConfig)(
        **values | ({"markov_rank": 8} if kind is DSpark else {})
    )
    drafter = kind.build(config, target, torch.randint(0, 1000, (VOCAB,)))
    for name, weight in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif "head" in name:
            torch.nn.init.normal_(weight, std=0.5)
    return drafter.eval().requires_grad_(False)


def their_config(drafter: DFlash, target: Target) -> Any:
    """Return the config that `speculators` has for this drafter."""
    config, theirs = drafter.config, target.config
    layer = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        use_sliding_window=bool(config.sliding_window),
        sliding_window=config.sliding_window or None,
        layer_types=["sliding_attention" if config.sliding_window else "full_attention"] * config.num_layers,
    )
    layer._attn_implementation = "eager"
    method = GreedyTokenProposalConfig(speculative_tokens=config.drafts)
    kind = "dspark" if isinstance(drafter, DSpark) else "dflash"
    verifier = VerifierConfig(name_or_path=None, architectures=list(theirs.architectures or ["LlamaForCausalLM"]))
    values: dict[str, Any] = {
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": not config.causal,
        "speculators_config": SpeculatorsConfig(
            algorithm=kind, proposal_methods=[method], default_proposal_method="greedy", verifier=verifier
        ),
    }
    if not isinstance(drafter, DSpark):
        return DFlashSpeculatorConfig(**values)
    return DSparkSpeculatorConfig(
        **values,
        markov_rank=drafter.config.markov_rank,
        markov_head_type=drafter.config.markov_head,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )


def their_model(drafter: DFlash, target: Target) -> Any:
    """Return their model with this drafter's weights, and the target's embeddings."""
    model = (DSparkDraftModel if isinstance(drafter, DSpark) else DFlashDraftModel)(their_config(drafter, target))
    weights = {name: w for name, w in drafter.state_dict().items() if name != "token_ids"}
    head = target.model.get_output_embeddings().weight
    kept = head if drafter.output_ids is None else head[drafter.output_ids]
    weights |= {"embed_tokens.weight": target.model.get_input_embeddings().weight, "lm_head.weight": kept}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    left = [name for name in missing if not name.startswith(("verifier_", "t2d", "d2t"))]
    if left or unexpected:
        raise ValueError(f"their model lacks {left} and does not know {unexpected}")
    torch.nn.init.zeros_(model.verifier_lm_head.weight)
    torch.nn.init.ones_(model.verifier_norm.weight)
    return model.eval()


@torch.no_grad()
def difference(drafter: DFlash, target: Target) -> float:
    """Return the largest difference of logits at all anchors of a random text."""
    tokens = torch.randint(0, VOCAB - 1, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    seen = target.forward(tokens, taps=drafter.taps)
    assert seen.hidden is not None
    learned = torch.zeros(1, LENGTH)
    learned[:, 8:] = 1
    model = their_model(drafter, target)
    count = LENGTH - 8 - drafter.config.block_size
    hidden, logits, _, _, places = model._backbone_forward(
        seen.hidden.flatten(2),
        tokens,
        learned,
        seen.last,
        torch.zeros(1, LENGTH, dtype=torch.long),
        max_anchors=count,
    )
    slots, anchors = drafter.config.block_size, places[:: drafter.config.block_size]
    if isinstance(drafter, DSpark):
        before = places if drafter.config.from_anchor else (places - 1).clamp(min=0)
        bias = model.markov_head.block_bias(
            prev_token_ids=tokens[0, before].view(-1, slots), hidden_states=hidden.view(-1, slots, SIZE)
        )
        logits = logits + bias.view_as(logits)
    ours = our_logits(drafter, target, tokens, seen.hidden, anchors)
    theirs = logits.view(-1, slots, logits.shape[-1])[:, slots - drafter.config.drafts :]
    return float((ours - theirs).abs().max())


def our_logits(drafter: DFlash, target: Target, tokens: Tensor, hidden: Tensor, anchors: Tensor) -> Tensor:
    """Return logits of the drafts after `anchors` `[n]`, `[n, k, V']`."""
    spans = tuple((a, a) for a in anchors.tolist())
    states = drafter.states(
        target, tokens, hidden, Anchors(anchors[None], torch.ones_like(anchors[None]).bool(), spans)
    )
    logits = target.lm_head(states[0], drafter.output_ids)
    if isinstance(drafter, DSpark) and drafter.markov_head is not None:
        before = tokens[0, anchors[:, None] + torch.arange(drafter.config.drafts)]
        logits = logits + drafter.markov_head.bias(drafter.markov_head.along(drafter.code(before), states[0]))
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target, found = random_target(), {}
    for name, (kind, changes) in CASES.items():
        found[name] = difference(random_drafter(kind, target, changes), target)
        print(f"{name}: {found[name]:.1e}")
    write_atomically(arguments.out, json.dumps({"largest difference of logits, fp32": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
