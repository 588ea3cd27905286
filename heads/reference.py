"""A training step of EAGLE-3 in its plainest form: one text, a loop over steps and tokens, every score written out.

Read this first. `Eagle3.loss` computes the same for many texts at once, packed in rows, with fused products and
attention, and in later steps only where something is learned. Its tests hold it to this, in loss and gradients
(tests/heads/test_reference.py).

A step reads, at each token t, a hidden state and the embedding of a token that followed: the target's own features f_t
and x_{t+1} in step 0, then the output of the step before and x_{t+1+i} in step i, as when drafting. It predicts
x_{t+2+i}.

Shapes: T tokens of the text, K taps, H hidden size, N heads, D head size, V target vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..targets import Target
from .decoder_layer import Layer
from .eagle import Eagle3

Entries = list[tuple[Tensor, Tensor]]  # a layer's keys and values `[T, N, D]`, of each step


def eagle3_loss(head: Eagle3, target: Target, tokens: Tensor, hidden: Tensor, last: Tensor, learned: Tensor) -> Tensor:
    """Return Σ_i decay^i · Σ_t −Σ_v p(v) log q_i(v), over all t and i where x_{t+2+i} is learned.

    Args:
        tokens: x, `[T]`.
        hidden: the target's hidden states at the head's taps, `[T, K, H]`.
        last: the target's last hidden states, `[T, H]`, from which p comes: the next token, on the draft vocabulary.
        learned: which tokens are learned, `[T]` bool.
    """
    config = head.config
    entries: list[Entries] = [[] for _ in head.layers]
    states = _fused(head, hidden)  # [T, H]
    total = states.new_zeros(())
    for step in range(config.steps):
        read = target.embed(tokens.roll(-1 - step))  # [T, H]; the last ones have no token to read, and predict none
        output = _run(head, read, states, step, entries)
        finished = _norm(output, head.norm)
        for t in range(len(tokens) - 2 - step):
            predicted = t + 2 + step
            if learned[predicted]:
                p = target.lm_head(last[predicted - 1])[head.token_ids].softmax(-1)  # [V']
                log_q = head.lm_head(finished[t]).log_softmax(-1)
                total = total - config.decay**step * (p * log_q).sum()
        states = finished if config.norm_output else output
    return total


def _fused(head: Eagle3, hidden: Tensor) -> Tensor:
    """Return the first step's hidden input `[T, H]` of taps `[T, K, H]`."""
    taps = list(hidden.unbind(1))
    if head.config.norm_taps and head.tap_norms is not None:
        taps = [_norm(tap, norm) for tap, norm in zip(taps, head.tap_norms, strict=True)]
    joined = torch.cat(taps, -1)
    if head.config.norm_before_fc and head.tap_norms is not None:
        joined = _norm(joined, head.tap_norms[0])
    return head.fc(joined)


def _run(head: Eagle3, read: Tensor, states: Tensor, step: int, entries: list[Entries]) -> Tensor:
    """Return the last layer's output `[T, H]`; `entries` of each layer gain those of this step."""
    first, *others = head.own_layers
    normed = _norm(states, first.hidden_norm)
    entered = torch.cat([_norm(read, first.input_layernorm), normed], -1)
    x = _layer(head, first, entered, normed if head.config.norm_before_residual else states, step, entries[0])
    for layer, kept in zip(others, entries[1:], strict=True):
        x = _layer(head, layer, _norm(x, layer.input_layernorm), x, step, kept)
    return x


def _layer(head: Eagle3, layer: Layer, entered: Tensor, residual: Tensor, step: int, entries: Entries) -> Tensor:
    """Return a layer's output `[T, H]`; its attention reads `entered`, and its result is added to `residual`."""
    attention, length = layer.self_attn, len(entered)
    q, k, v = (project(entered).view(length, -1, attention.size) for project in _projections(layer))
    positions = torch.arange(length, device=entered.device)[None] + step  # of the tokens that are read, but for one
    cos, sin = head.rotary(entered, positions)
    q, k = apply_rotary_pos_emb(q, k, cos[0], sin[0], unsqueeze_dim=1)
    shared = q.shape[1] // k.shape[1]  # queries of one key
    entries.append((k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
    mixed = torch.stack([_attend(q[t], t, entries) for t in range(length)])  # [T, N, D]
    x = residual + attention.o_proj(mixed.flatten(1))
    return x + layer.mlp(_norm(x, layer.post_attention_layernorm))


def _projections(layer: Layer) -> list[nn.Linear]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def _attend(query: Tensor, t: int, entries: Entries) -> Tensor:
    """Return attention `[N, D]` of a query: to the entries of step 0 up to t, and to one of each later step, at t."""
    (keys, values), *later = entries
    keys = torch.cat([keys[: t + 1], *[own[t : t + 1] for own, _ in later]])  # [E, N, D]
    values = torch.cat([values[: t + 1], *[own[t : t + 1] for _, own in later]])
    scores = torch.einsum("nd,end->ne", query, keys) / query.shape[-1] ** 0.5
    return torch.einsum("ne,end->nd", scores.softmax(-1), values)


def _norm(x: Tensor, norm: Any) -> Tensor:
    """Return `x` `[..., H]`, divided by its root mean square and times the norm's weight."""
    return x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight
