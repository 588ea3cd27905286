"""EAGLE-3: a one-layer drafter on three of the target's hidden states (arXiv 2503.01840).

The head runs over pairs (f_t, x_{t+1}): the target's features at a token and the token that followed it. Behind the last
true feature it feeds on its own output. Training unrolls exactly that ("training-time test"): at step i the hidden input is
the head's output of step i−1, the token is the ground truth shifted by i, and attention sees the true entries up to t
plus one own entry per later step.

Shapes: B rows, T positions, Q new entries, K taps, H hidden size, V' draft vocabulary, S unrolled steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv

from ..target import BadInputError, Counts, IncompatibleError, RaggedCache, Target
from .base import Choose, Drafter, DrafterConfig, DrafterLoss, Proposal, Sum, TargetBatch
from .losses import acceptance_metrics, ahead, chunked_compare, divergence


@dataclass
class Eagle3Config(DrafterConfig):
    """Settings of an EAGLE-3 head; zeros mean "as the target".

    Attributes:
        taps: HF `hidden_states` indices; () for EAGLE-3's (2, N//2, N−3).
        draft_vocab_size: the most frequent training tokens kept as outputs; 0 for all.
        steps: unrolled steps S of the training-time test.
        decay: weight of step i is `decay ** i`.
        norm_taps, norm_output: EAGLE-3.1 (arXiv 2605.09992): a norm on each tap; the normed output is what the next step reads.
        init_from_target: start the output embedding and final norm from the target's.
    """

    taps: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    steps: int = 4
    decay: float = 0.8
    loss: str = "soft_ce"
    norm_taps: bool = False
    norm_output: bool = False
    init_from_target: bool = True
    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        self.taps = tuple(self.taps)
        divergence(self.loss)
        if self.steps < 1:
            raise BadInputError(f"eagle3: steps must be at least 1, got {self.steps}.")

    def completed(self, target: Target) -> Eagle3Config:
        """This config with every open size taken from `target`."""
        theirs, layers = target.config, target.num_layers
        if layers < 4 and not self.taps:
            raise BadInputError(f"eagle3: a target with {layers} layers has no default taps (2, N//2, N−3); name them: drafter.taps=[…].")
        heads = self.num_attention_heads or theirs.num_attention_heads
        sizes = {
            "taps": self.taps or (2, layers // 2, layers - 3),
            "hidden_size": self.hidden_size or target.hidden_size,
            "intermediate_size": self.intermediate_size or getattr(theirs, "intermediate_size", None) or 4 * target.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": self.num_key_value_heads or getattr(theirs, "num_key_value_heads", None) or heads,
            "head_dim": self.head_dim or getattr(theirs, "head_dim", None) or target.hidden_size // heads,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": self.draft_vocab_size or target.vocab_size,
            "rope_parameters": self.rope_parameters or _plain_rope(theirs),
            "max_position_embeddings": self.max_position_embeddings or target.max_context or 4096,
        }
        return Eagle3Config(**(self.to_dict() | sizes))


def _plain_rope(config: Any) -> dict[str, Any]:
    """The target's rotary parameters if they are of the plain form, else the default ones."""
    found = getattr(config, "rope_parameters", None) or {}
    return dict(found) if "rope_type" in found else {"rope_type": "default", "rope_theta": found.get("rope_theta", 10000.0)}


@dataclass
class _State:
    cache: RaggedCache
    target: Target
    tokens: Tensor | None = None  # [B, Q] processed by the target, not yet by the head
    hidden: Tensor | None = None  # [B, Q, K, H]
    counts: Counts | None = None


class _Attention(nn.Module):
    """Attention over cat[embedding, hidden] (2H); each call returns this step's keys and values too."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, heads, Q, D]`, keys and values `[B, kv_heads, Q, D]`, rotated."""
        shape = (*x.shape[:2], -1, self.size)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        return q, k, v

    def cached(self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: RaggedCache, mask: Tensor | None) -> Tensor:
        """One decoding pass over the cache; `mask` `[B, 1, Q, used]` bool, None if everything is visible."""
        q, k, v = self.project(x, rotary)
        k, v = cache.update(k, v, 0)
        return self._output(nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=self.heads != self.kv_heads))

    def unrolled(self, x: Tensor, rotary: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Step `len(past)` of the training-time test; appends its keys and values `[B, heads, T, D]` to `past`.

        A query at position t sees the step-0 keys up to t and, of each later step, the one key at t.
        """
        q, k, v = self.project(x, rotary)
        past.append((repeat_kv(k, self.heads // self.kv_heads), repeat_kv(v, self.heads // self.kv_heads)))
        keys, values = past[0]
        if len(past) == 1:
            return self._output(nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True))
        scale = self.size**-0.5
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = (q @ keys.transpose(-1, -2) * scale).masked_fill(~causal, float("-inf"))
        diagonal = torch.stack([(q * key).sum(-1) * scale for key, _ in past[1:]], -1)  # [B, heads, T, i]
        weights = torch.cat([scores, diagonal], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        mixed = weights[..., :length] @ values
        for i, (_, value) in enumerate(past[1:]):
            mixed = mixed + weights[..., length + i, None] * value
        return self._output(mixed)

    def _output(self, mixed: Tensor) -> Tensor:
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    """The decoder layer: attention input is cat[norm(embedding), norm(hidden)], the residual is the hidden state."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(_llama(config))

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def _llama(config: Eagle3Config) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim, rope_parameters=dict(config.rope_parameters), max_position_embeddings=config.max_position_embeddings,
    )  # fmt: skip


class Eagle3(Drafter):
    """The EAGLE-3 head. Embeddings come from the target; everything else is its own."""

    name = "eagle3"
    config_class = Eagle3Config
    config: Eagle3Config
    token_ids: Tensor  # [V']

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        size = config.hidden_size
        self.tap_norms = nn.ModuleList(LlamaRMSNorm(size, config.rms_norm_eps) for _ in config.taps) if config.norm_taps else None
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.layer = _Layer(config)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        # Target id of each draft token, ascending. The export formats' d2t and t2d are derived from it.
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size))
        self.rotary = LlamaRotaryEmbedding(_llama(config))

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def _kept(self) -> Tensor | None:
        """Target ids of the draft vocabulary; None where it is the whole one."""
        return None if self.config.draft_vocab_size == self.config.vocab_size else self.token_ids

    @classmethod
    def build(cls, config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> Eagle3:
        assert isinstance(config, Eagle3Config)
        config = config.completed(target)
        if config.hidden_size != target.hidden_size:
            raise BadInputError(f"eagle3: hidden_size {config.hidden_size} differs from the target's {target.hidden_size}; leave it out.")
        if config.draft_vocab_size > target.vocab_size:
            raise BadInputError(f"eagle3: draft_vocab_size {config.draft_vocab_size} exceeds the target's vocabulary of {target.vocab_size}.")
        head = cls(config)
        if config.draft_vocab_size < config.vocab_size:
            if token_counts is None:
                raise BadInputError("eagle3: a pruned draft vocabulary needs token counts of the training data.")
            most = token_counts.cpu().argsort(descending=True, stable=True)[: config.draft_vocab_size]
            head.token_ids.copy_(most.sort().values)
        if config.init_from_target:
            head._copy_output(target)
        return head

    @torch.no_grad()
    def _copy_output(self, target: Target) -> None:
        weight = target.model.get_output_embeddings().weight
        self.lm_head.weight.copy_(weight[self.token_ids.to(weight.device)])

    def check(self, target: Target) -> None:
        super().check(target)
        for name, own, theirs in (
            ("hidden size", self.config.hidden_size, target.hidden_size),
            ("vocabulary", self.config.vocab_size, target.vocab_size),
        ):
            if own != theirs:
                raise IncompatibleError(f"this eagle3 drafter was made for a {name} of {own}, the target's is {theirs}.")

    # ------------------------------------------------------------ the network

    def fuse(self, hidden: Tensor) -> Tensor:
        """Taps `[B, T, K, H]` to the layer's hidden input `[B, T, H]`."""
        hidden = hidden.to(self.fc.weight.dtype)
        if self.tap_norms is not None:
            hidden = torch.stack([norm(hidden[:, :, i]) for i, norm in enumerate(self.tap_norms)], 2)
        return self.fc(hidden.flatten(2))

    def logits(self, output: Tensor) -> Tensor:
        """Draft logits `[..., V']` from the layer's output `[..., H]`."""
        return self.lm_head(self.norm(output))

    def feedback(self, output: Tensor) -> Tensor:
        """What the next step reads as its hidden input."""
        return self.norm(output) if self.config.norm_output else output

    # ------------------------------------------------------------ training

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Σ_i decay^i · Σ_positions loss_i: soft cross-entropy against the target's softmax on the draft vocabulary."""
        assert batch.hidden is not None
        length = batch.tokens.shape[1]
        # Index t of step i has read the tokens up to x_{t+1+i} and predicts x_{t+2+i}; here everything stands at the token predicted.
        outputs = [nn.functional.pad(o, (0, 0, 2 + i, 0))[:, :length] for i, o in enumerate(self.unroll(batch.target, batch.tokens, batch.hidden))]
        wanted = batch.supervised.clone()
        wanted[:, :2] = False
        exists = [torch.arange(length, device=wanted.device) >= 2 + i for i in range(len(outputs))]
        before = nn.functional.pad(batch.last, (0, 0, 1, 0))[:, :length]
        result = chunked_compare(
            before[wanted], torch.stack([o[wanted] for o in outputs]),
            batch.target.lm_head, self.logits, divergence(self.config.loss), self._kept,
        )  # fmt: skip
        metrics: dict[str, Sum] = {}
        total = batch.tokens.new_zeros((), dtype=torch.float32)
        alphas, measured = [], []
        for i, known in enumerate(exists):
            there, here = wanted & known, known.expand_as(wanted)[wanted]
            total = total + self.config.decay**i * result.loss[i][here].sum()
            metrics |= {f"loss_d{i + 1}": (result.loss[i][here].detach().sum(), here.sum()), f"top1_d{i + 1}": (result.top1[i][here].sum(), here.sum())}
            alphas.append(ahead(torch.zeros(wanted.shape, device=wanted.device).masked_scatter(wanted, result.alpha[i]), i))
            measured.append(ahead(there, i))
        return DrafterLoss(total, wanted.sum(), metrics | acceptance_metrics(alphas, measured))

    def unroll(self, target: Target, tokens: Tensor, hidden: Tensor) -> list[Tensor]:
        """The training-time test: the layer's output at each of the S steps, `[B, T, H]` each.

        Index t of step i stands for the pair whose token is x_{t+1+i}; the last 1+i indices have no token and mean nothing.
        """
        embedded = target.embed(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        state = self.fuse(hidden)
        past: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for i in range(self.config.steps):
            rotary = self.rotary(state, positions + i)
            x = self.layer.attention_input(embedded.roll(-1 - i, 1).to(state.dtype), state)
            output = self.layer.finish(state, self.layer.self_attn.unrolled(x, rotary, past))
            outputs.append(output)
            state = self.feedback(output)
        return outputs

    # ------------------------------------------------------------ decoding

    def open(self, target: Target, batch_size: int, max_length: int) -> _State:
        return _State(RaggedCache(1, batch_size, max_length, target.device), target)

    def absorb(self, state: _State, tokens: Tensor, hidden: Tensor | None, counts: Counts) -> None:
        # The pair of the last of these tokens needs the token behind it: `propose` knows that one.
        state.tokens, state.hidden, state.counts = tokens, hidden, counts

    def propose(self, state: _State, root: Tensor, depth: int, choose: Choose) -> Proposal:
        assert state.tokens is not None
        assert state.hidden is not None
        assert state.counts is not None
        last = (state.counts.tensor - 1)[:, None]
        following = state.tokens.roll(-1, 1).scatter(1, last, root[:, None])
        output = self._step(state, following, self.fuse(state.hidden), 0)
        state.cache.advance(state.counts)
        state.tokens = None
        output = output.gather(1, last[:, :, None].expand(-1, -1, output.shape[-1]))
        drafted = [choose(self.logits(output[:, 0]), self._kept)]
        for i in range(depth - 1):
            output = self._step(state, drafted[-1][:, None], self.feedback(output), i)
            drafted.append(choose(self.logits(output[:, 0]), self._kept))
        return Proposal.chain(torch.stack(drafted, 1))

    def _step(self, state: _State, tokens: Tensor, hidden: Tensor, offset: int) -> Tensor:
        """One pass over `tokens` `[B, Q]`, written behind the committed entries plus `offset`; output `[B, Q, H]`."""
        cache = state.cache
        positions = cache.place(tokens.shape[1], offset)
        x = self.layer.attention_input(state.target.embed(tokens).to(hidden.dtype), hidden)
        mask = None if cache.batch_size == tokens.shape[1] == 1 else cache.visible()[:, None]
        attended = self.layer.self_attn.cached(x, self.rotary(hidden, positions), cache, mask)
        return self.layer.finish(hidden, attended)

    def select(self, state: _State, rows: list[int]) -> None:
        state.cache.select(rows)
        if state.tokens is not None and state.hidden is not None and state.counts is not None:
            state.tokens, state.hidden, state.counts = state.tokens[rows], state.hidden[rows], state.counts.select(rows)
