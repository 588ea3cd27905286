"""EAGLE-3: a one-layer drafter on three of the target's hidden states (arXiv 2503.01840).

The head runs over pairs (f_t, x_{t+1}): the target's features at a token and the token that followed it. Behind the last
true feature it feeds on its own output. Training unrolls exactly that ("training-time test"): at step i the hidden input is
the head's output of step i−1, the token is the ground truth shifted by i, and attention sees the true entries up to t
plus one own entry per later step.

Shapes: B rows, T positions, Q new entries, K taps, H hidden size, V' draft vocabulary, S unrolled steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, repeat_kv, rotate_half

from ..target import BadInputError, Counts, IncompatibleError, LayerShape, Nodes, RaggedCache, Store, Target
from .base import Branches, Drafter, DrafterConfig, DrafterLoss, Sum, TargetBatch, joined, most_frequent, versions
from .losses import LossName, acceptance_metrics, ahead, chunked_compare, divergence


@dataclass
class Eagle3Config(DrafterConfig):
    """Settings of an EAGLE-3 head; zeros mean "as the target".

    Attributes:
        taps: HF `hidden_states` indices; () for EAGLE-3's (2, N//2, N−3).
        draft_vocab_size: the most frequent training tokens kept as outputs; 0 for all.
        steps: unrolled steps S of the training-time test.
        decay: weight of step i is `decay ** i`.
        norm_taps, norm_output: EAGLE-3.1 (arXiv 2605.09992): a norm on each tap; the normed output is what the next step reads.
        init_from_target: start the output embedding from the target's.
    """

    taps: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    steps: int = 4
    decay: float = 0.8
    loss: LossName = "soft_ce"
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
    runner: _Runner
    tokens: Tensor | None = None  # [B, Q] processed by the target, not yet by the head
    hidden: Tensor | None = None  # [B, Q, K, H]
    counts: Counts | None = None
    outputs: Tensor | None = None  # [B, 1 + n, H], what steps behind the root and behind each drafted node read
    branches: Branches | None = None


Entry = tuple[Tensor, Tensor]  # keys and values
Rotary = tuple[Tensor, Tensor]  # cosines and sines, [B, Q, D] each


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = rotary
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


class _Attention(nn.Module):
    """Attention over cat[embedding, hidden] (2H), as training runs it; decoding has `_Runner`."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def query(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Queries `[B, heads, Q, D]` of attention inputs `[B, Q, 2H]`."""
        return _rotated(self._split(self.q_proj(x)), rotary)

    def entry(self, x: Tensor, rotary: Rotary) -> Entry:
        """Keys and values of attention inputs `[B, Q, 2H]`, one per query head: `[B, heads, Q, D]` each."""
        groups = self.heads // self.kv_heads
        return repeat_kv(_rotated(self._split(self.k_proj(x)), rotary), groups), repeat_kv(self._split(self.v_proj(x)), groups)

    def attend(self, q: Tensor, first: Entry, visible: Tensor, own: Sequence[Entry]) -> Tensor:
        """One step of the training-time test for queries `[B, heads, T', D]`.

        Args:
            first: the entries of step 0, `[B, heads, T, D]`; a query sees those that `visible` `[B, 1, T', T]` says,
            own: the entries of each later step, `[B, heads, T', D]`; a query sees the one at its own index.
        """
        keys, values = first
        if not own:
            return self.output(nn.functional.scaled_dot_product_attention(q, keys, values, visible))
        scale = self.size**-0.5
        scores = (q @ keys.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
        diagonal = torch.stack([(q * key).sum(-1) * scale for key, _ in own], -1)  # [B, heads, T', i]
        weights = torch.cat([scores, diagonal], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        mixed = weights[..., : keys.shape[2]] @ values
        for i, (_, value) in enumerate(own):
            mixed = mixed + weights[..., keys.shape[2] + i, None] * value
        return self.output(mixed)

    def _split(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], -1, self.size).transpose(1, 2)

    def output(self, mixed: Tensor) -> Tensor:
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


def _at(x: Tensor, index: Tensor) -> Tensor:
    """`x` `[B, T, H]` at indices `[B or 1, T']`, the nearest one where they leave it: `[B, T', H]`."""
    index = index.clamp(0, x.shape[1] - 1)
    return x.gather(1, index[:, :, None].expand(len(x), -1, x.shape[2]))


class _Runner:
    """The head as decoding runs it: weights that are used together in one matrix, norms in one operation, rotary angles looked up.

    A draft step is a few small products; on a CPU, and at batch size 1 on a GPU, the number of operations is what it costs.
    """

    def __init__(self, head: Eagle3, max_length: int, device: torch.device):
        config, attention = head.config, head.layer.self_attn
        self.head, self.layer, self.eps, self.max_length = head, head.layer, config.rms_norm_eps, max_length
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.weights = self.weights_of(head)
        self.qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        self.fc = head.fc.weight
        if head.tap_norms is not None:
            self.fc = self.fc * torch.cat(list(head.tap_norms.parameters()))
        cos, sin = head.rotary(self.qkv, torch.arange(max_length, device=device)[None])
        half = self.size // 2
        # x cos + rotate_half(x) sin, with rotate_half's sign moved into the sine: its halves swapped are a roll.
        self.cos, self.sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)

    @staticmethod
    def weights_of(head: Eagle3) -> list[tuple[int, int]]:
        """Tells whether the weights that were put together have changed since."""
        attention = head.layer.self_attn
        norms = [] if head.tap_norms is None else list(head.tap_norms.parameters())
        return versions([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, head.fc.weight, *norms])

    def fuse(self, hidden: Tensor) -> Tensor:
        """As `Eagle3.fuse`."""
        hidden = hidden.to(self.fc.dtype)
        if self.head.tap_norms is not None:
            hidden = nn.functional.rms_norm(hidden, hidden.shape[-1:], None, self.eps)
        return nn.functional.linear(hidden.flatten(2), self.fc)

    def step(self, embedded: Tensor, hidden: Tensor, cache: RaggedCache, positions: Tensor, in_tree: bool) -> Tensor:
        """The layer's output `[B, Q, H]` at entries placed at `positions` `[B, Q]` of the cache; one token of a chain sees all of it."""
        layer, rows, width = self.layer, *hidden.shape[:2]
        x = torch.cat([self.norm(embedded, layer.input_layernorm), self.norm(hidden, layer.hidden_norm)], -1)
        heads = nn.functional.linear(x, self.qkv).view(rows, width, -1, self.size).transpose(1, 2)
        turned = heads[:, : self.heads + self.kv_heads]
        turned = turned * self.cos[positions][:, None] + turned.roll(self.size // 2, -1) * self.sin[positions][:, None]
        k, v = cache.update(turned[:, self.heads :], heads[:, self.heads + self.kv_heads :], 0)
        mask = None if rows == width == 1 and not in_tree and cache.window is None else cache.visible()[:, None]
        mixed = nn.functional.scaled_dot_product_attention(turned[:, : self.heads], k, v, mask, enable_gqa=self.heads != self.kv_heads)
        hidden = hidden + layer.self_attn.output(mixed)
        return hidden + layer.mlp(self.norm(hidden, layer.post_attention_layernorm))

    def answer(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """What the next step reads, and the logits, from the layer's output `[B, Q, H]`."""
        normed = self.norm(output, self.head.norm)
        return normed if self.head.config.norm_output else output, self.head.lm_head(normed)

    def norm(self, x: Tensor, norm: LlamaRMSNorm) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], norm.weight, self.eps)


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
        self._kept: _Runner | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def output_ids(self) -> Tensor | None:
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
            head.token_ids.copy_(most_frequent(token_counts, config.draft_vocab_size, cls.name))
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
        wanted = batch.supervised.clone()
        wanted[:, :2] = False
        # Later steps run where something is learned: from S + 1 before a row's first such token, which is index 0 from here on.
        begin = (wanted.int().argmax(1) - 1 - self.config.steps).clamp(min=0)
        outputs = self.unroll(batch.target, batch.tokens, batch.hidden, begin)
        length = outputs[0].shape[1]
        at = begin[:, None] + torch.arange(length, device=begin.device)
        wanted = nn.functional.pad(wanted, (0, length)).gather(1, at)
        # Index t of step i has read the tokens up to x_{t+1+i} and predicts x_{t+2+i}; here everything stands at the token predicted.
        outputs = [nn.functional.pad(o, (0, 0, 2 + i, 0))[:, :length] for i, o in enumerate(outputs)]
        exists = [torch.arange(length, device=wanted.device) >= 2 + i for i in range(len(outputs))]
        before, tokens = _at(batch.last, at - 1), nn.functional.pad(batch.tokens, (0, length)).gather(1, at)
        here = torch.stack([e.expand_as(wanted)[wanted] for e in exists])  # [S, P]
        decay = self.config.decay ** torch.arange(len(outputs), device=wanted.device)
        result = chunked_compare(
            before[wanted], torch.stack([o[wanted] for o in outputs]),
            batch.target.lm_head, self.logits, divergence(self.config.loss), self.output_ids,
            weights=decay[:, None] * here, parameters=[*self.norm.parameters(), *self.lm_head.parameters()], following=tokens[wanted],
        )  # fmt: skip
        metrics: dict[str, Sum] = {}
        alphas, measured = [], []
        for i, known in enumerate(exists):
            metrics |= {f"{name}_d{i + 1}": (values[i][here[i]].sum(), here[i].sum()) for name, values in (("loss", result.loss), ("top1", result.top1))}
            alphas.append(ahead(torch.zeros(wanted.shape, device=wanted.device).masked_scatter(wanted, result.alpha[i]), i))
            measured.append(ahead(wanted & known, i))
        return DrafterLoss(result.total, wanted.sum(), metrics | acceptance_metrics(alphas, measured))

    def unroll(self, target: Target, tokens: Tensor, hidden: Tensor, begin: Tensor | None = None) -> list[Tensor]:
        """The training-time test: the layer's output at each of the S steps, `[B, T', H]` each.

        Index j of row b and step i stands for t = begin[b] + j and the pair whose token is x_{t+1+i}; where a row has no
        such token, it means nothing. `begin` `[B]` is 0 if None; before it, rows are only attended to.
        """
        length, attention = tokens.shape[1], self.layer.self_attn
        every = torch.arange(length, device=tokens.device)
        at = every[None] if begin is None else begin[:, None] + every[: length - int(begin.min())]
        embedded, state = target.embed(tokens), self.fuse(hidden)
        x = self.layer.attention_input(embedded.roll(-1, 1).to(state.dtype), state)
        first = attention.entry(x, self.rotary(state, every[None]))
        visible = (every <= at[:, :, None])[:, None]
        x, state = _at(x, at), _at(state, at)
        own: list[Entry] = []
        outputs = []
        for i in range(self.config.steps):
            rotary = self.rotary(state, at + i)
            if i:
                x = self.layer.attention_input(_at(embedded, at + 1 + i).to(state.dtype), state)
                own.append(attention.entry(x, rotary))
            output = self.layer.finish(state, attention.attend(attention.query(x, rotary), first, visible, own))
            outputs.append(output)
            state = self.feedback(output)
        return outputs

    # ------------------------------------------------------------ decoding

    def open(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> _State:
        cache = RaggedCache(1, batch_size, max_length + spare, target.device, [self._entry(target.device)])
        return _State(cache, target, self._runner(max_length, target.device))

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        attention, entry = self.layer.self_attn, self._entry(target.device)
        cache = entry.num_bytes(batch_size, max_length + spare)
        if self._has_runner(max_length, target.device):
            return cache
        copied = [attention.q_proj, attention.k_proj, attention.v_proj, *([self.fc] if self.tap_norms is not None else [])]
        angles = 2 * max_length * attention.size
        return cache + (sum(part.weight.numel() for part in copied) + angles) * entry.keys.dtype.itemsize

    def _entry(self, device: torch.device) -> LayerShape:
        attention = self.layer.self_attn
        store = Store(attention.kv_heads, attention.size, attention.k_proj.weight.dtype, device)
        return LayerShape(store, store)

    def absorb(self, state: _State, tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None) -> None:
        # The pair of the last of these tokens needs the token behind it: `begin` knows that one.
        if state.tokens is not None and state.hidden is not None and state.counts is not None and hidden is not None:
            tokens, hidden = joined(state.tokens, state.counts, tokens), joined(state.hidden, state.counts, hidden)
            counts = state.counts.plus(counts)
        state.tokens, state.hidden, state.counts = tokens, hidden, counts

    def begin(self, state: _State, root: Tensor) -> Tensor:
        assert state.tokens is not None
        assert state.hidden is not None
        assert state.counts is not None
        if state.cache.window is None:  # the host may ask how many there are
            longest = max(state.counts.values)
            state.tokens, state.hidden = state.tokens[:, :longest], state.hidden[:, :longest]
        last = (state.counts.tensor - 1)[:, None]
        following = state.tokens.roll(-1, 1).scatter(1, last, root[:, None])
        output = self._step(state, following, state.runner.fuse(state.hidden), 0)
        state.cache.advance(state.counts)
        state.tokens, state.branches = None, None
        state.outputs, logits = state.runner.answer(output.gather(1, last[:, :, None].expand(-1, -1, output.shape[-1])))
        return logits[:, 0]

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        assert state.outputs is not None
        read, nodes = state.outputs.shape[1] - 1, None
        if parents is None:
            before = state.outputs[:, -1:]
        else:
            state.branches = state.branches or Branches(len(tokens), 0, tokens.device)
            nodes = state.branches.grow(parents)
            before = _at(state.outputs, parents + 1)
        after, logits = state.runner.answer(self._step(state, tokens, before, read, nodes))
        state.outputs = torch.cat([state.outputs, after], 1)
        return logits

    def _step(self, state: _State, tokens: Tensor, hidden: Tensor, offset: int, nodes: Nodes | None = None) -> Tensor:
        """One pass over `tokens` `[B, Q]`, written behind the committed entries plus `offset`; output `[B, Q, H]`."""
        positions = state.cache.place(tokens.shape[1], offset, nodes)
        return state.runner.step(state.target.embed(tokens).to(hidden.dtype), hidden, state.cache, positions, nodes is not None)

    def _runner(self, max_length: int, device: torch.device) -> _Runner:
        """Kept from request to request, until it is too short or the weights have changed."""
        if self._kept is None or not self._has_runner(max_length, device):
            self._kept = _Runner(self, max_length, device)
        return self._kept

    def _has_runner(self, max_length: int, device: torch.device) -> bool:
        kept = self._kept
        return kept is not None and kept.max_length >= max_length and kept.cos.device == device and kept.weights == _Runner.weights_of(self)

    def caches(self, state: _State) -> list[RaggedCache]:
        return [state.cache]

    def carried(self, state: _State) -> list[Tensor]:
        assert state.tokens is not None
        assert state.hidden is not None
        assert state.counts is not None
        return [state.tokens, state.hidden, state.counts.tensor]

    def carry(self, state: _State, tensors: list[Tensor]) -> None:
        state.tokens, state.hidden, state.counts = tensors[0], tensors[1], Counts(tensors[2])

    def reset(self, state: _State) -> None:
        super().reset(state)
        state.tokens = state.hidden = state.counts = state.outputs = state.branches = None

    def select(self, state: _State, rows: list[int]) -> None:
        state.cache.select(rows)
        if state.tokens is not None and state.hidden is not None and state.counts is not None:
            state.tokens, state.hidden, state.counts = state.tokens[rows], state.hidden[rows], state.counts.select(rows)
