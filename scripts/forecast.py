"""What a measured τ would give at the costs of a large target.

It is an estimate, from the bytes of weights that a pass reads.

At batch 1 a GPU waits for its memory, so a pass takes the time of reading its weights, whether it checks one token or
five. A draft step reads the head and the output embedding that it borrows. Acceptance is taken as measured on the small
target; a head for a large one accepts other drafts, so this is no promise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from ..eval.bandwidth import weight_bytes
from ..eval.reports.figures import Figures
from ..heads import Drafter
from ..targets import Target
from ..train.planning import BANDWIDTH, GPUS

SHOWN = ("L40S", "A100-80G", "H100", "B200")


@dataclass(frozen=True)
class Forecast:
    """The estimate for a large target.

    Attributes:
        ratio: what a draft step costs, in passes of the target.
        depth, tau: of the chain that is best at that ratio, by the measured rounds.
        tokens_per_second: by GPU, without the drafter and with it.
    """

    ratio: float
    depth: int
    tau: float
    tokens_per_second: dict[str, tuple[float, float]]

    @property
    def speedup(self) -> float:
        """Over the plain target: τ tokens in the time of one pass and `depth` draft steps."""
        return self.tau / (1 + self.depth * self.ratio)

    def line(self, here: float) -> str:
        """Return it in words; `here` is what a draft step costs on this machine, in passes of its small target."""
        speeds = ", ".join(f"{gpu} {alone:.0f} → {ours:.0f}" for gpu, (alone, ours) in self.tokens_per_second.items())
        return (
            f"estimate, not measured: a draft step costs {_part(here)} of a pass here and {_part(self.ratio)} of an 8B "
            f"target's (bytes read, bfloat16, batch 1); there τ {self.tau:.2f} at depth {self.depth} would give "
            f"{self.speedup:.1f}×: {speeds} tokens/s"
        )


def forecast(head: Drafter, figures: Figures) -> Forecast:
    """Return what the rounds of `figures` would give at an 8B target's costs, with a head of the kind of `head`."""
    target = large_target()
    with torch.device("meta"):
        values = {k: v for k, v in head.config.to_dict().items() if k in ("norm_inputs",)}
        large = type(head).build(type(head).config_class.from_dict(values), target)
    pass_bytes = weight_bytes(target)
    borrowed = target.model.get_output_embeddings().weight.numel() * 2
    ratio = (2 * sum(p.numel() for p in large.parameters()) + borrowed) / pass_bytes
    depth, tau = max(chains(figures), key=lambda chain: chain[1] / (1 + chain[0] * ratio))
    speedup = tau / (1 + depth * ratio)
    alone = {gpu.name: gpu.bandwidth * 1e9 * BANDWIDTH / pass_bytes for gpu in GPUS if gpu.name in SHOWN}
    return Forecast(ratio, depth, tau, {name: (speed, speedup * speed) for name, speed in alone.items()})


def chains(figures: Figures) -> list[tuple[int, float]]:
    """Return the τ of a chain of each depth up to the measured one: 1 + Σ over depths of the share that got so far."""
    shares = {a.accepted: a.share.value for a in figures.accepted}
    reached = [
        sum(share for count, share in shares.items() if count >= depth) for depth in range(1, max(1, *shares) + 1)
    ]
    return [(depth, 1 + sum(reached[:depth])) for depth in range(1, len(reached) + 1)]


def large_target() -> Target:
    """Return a model of Llama-3.1-8B's shape in bfloat16, without contents."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    return Target(model.eval().requires_grad_(False))


def _part(share: float) -> str:
    """Return what part of a pass something costs, in words such as `1/10`."""
    if share < 0.001:  # less than a clock tells, in a run of a few prompts
        return "less than 1/1000"
    return f"1/{round(1 / share)}" if share < 0.75 else f"{share:.1f}"
