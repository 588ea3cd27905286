"""The logits that an engine computes from a checkpoint, by the names and flags that the engine reads.

This is written from the engines' own model files, in plain functions over tensors, and shares no code with our heads:
an export is read back by it, and compared with the drafter that it was made of.

Shapes: T tokens of a text, k draft tokens, N layers of the target, H hidden size, K taps, V target vocabulary, V' draft
vocabulary, A attention heads, D head size, R of whose dimensions turn.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..common import BadInputError, IncompatibleError
from ..heads import Drafter, NodeSession
from ..targets import RowLengths, Target


@dataclass(frozen=True)
class ProbeSequence:
    """A text, as a target has processed it, and drafts after it."""

    tokens: Tensor  # `[T + 1]`, the last of which the target has not processed (the root of a round)
    drafts: Tensor  # `[k − 1]`, the draft tokens that are read to give the next ones
    hidden: Tensor  # every hidden state of the target at the processed tokens, by HF index, `[N + 1, T, H]`
    embed: Callable[[Tensor], Tensor]  # gives embeddings `[..., H]`, as the target's first layer reads them
    table: Tensor  # the rows of the target's input embedding, `[V, H]`
    lm_head: Callable[[Tensor], Tensor]  # logits `[..., V]` of `[..., H]`, by the target but for its `logit_scale`

    @property
    def text(self) -> Tensor:
        """The tokens and the drafts, `[T + k]`."""
        return torch.cat([self.tokens, self.drafts])

    @property
    def read(self) -> Tensor:
        """The tokens that heads read beside hidden states: each one's follower, then the drafts, `[T + k − 1]`."""
        return self.text[1:]

    @property
    def before(self) -> Tensor:
        """The token before each draft, `[k]`: the root, then the drafts that are read."""
        return torch.cat([self.tokens[-1:], self.drafts])

    @classmethod
    @torch.no_grad()
    def of(cls, target: Target, tokens: list[int], drafts: list[int]) -> ProbeSequence:
        """Return the passage `tokens` and its `drafts`, as `target` processes it, in fp32.

        The states of a target without its layers are drawn: both sides read the same ones.
        """
        given = torch.tensor(tokens, device=target.device)
        every = tuple(range(target.num_layers + 1))
        if target.has_layers:
            hidden = target.forward(given[None, :-1], taps=every, logits=False).hidden
            assert hidden is not None
        else:
            drawn = torch.Generator().manual_seed(0)
            hidden = torch.randn(1, len(tokens) - 1, len(every), target.hidden_size, generator=drawn).to(target.device)
        return cls(
            given,
            torch.tensor(drafts, device=target.device, dtype=torch.long),
            hidden[0].transpose(0, 1).float(),
            lambda ids: target.embed(ids).float(),
            embedding_table(target).float(),
            lambda x: target.lm_head(x).float() / target.logit_scale,
        )


@dataclass(frozen=True)
class Flags:
    """The flags that an engine takes from config.json for an EAGLE-3 head; the defaults are vLLM's and SGLang's."""

    taps: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def embedding_table(target: Target) -> Tensor:
    """Return the target's input embeddings, `[V, H]`, as they are stored."""
    return cast(Tensor, target.model.get_input_embeddings().weight)


def output_table(target: Target) -> Tensor:
    """Return the target's output embedding, `[V, H]`, as it is stored."""
    return cast(Tensor, target.model.get_output_embeddings().weight)


def scale_field(target: Target) -> dict[str, float]:
    """Return the field of a drafter's config.json by which vLLM scales logits as the target does; {} if by 1."""
    return {} if target.logit_scale == 1 else {"logit_scale": target.logit_scale}


def require_unscaled(target: Target, name: str) -> None:
    """Refuse a drafter of type `name` whose engine would leave out the factor of the target's logits."""
    if target.logit_scale != 1:
        raise IncompatibleError(
            f"this target multiplies its logits by {target.logit_scale:.4g}, which the engine does not for such "
            f"a {name} drafter; train an eagle3 drafter, or serve an eagle1 or a dflash drafter by vLLM."
        )


class Weights:
    """Tensors by name, in fp32; KeyError for a missing one."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]):
        self.tensors, self.config = tensors, config

    def __call__(self, name: str) -> Tensor:
        return self.tensors[name].float()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Return `x` times the matrix `name`, plus its bias if it has one."""
        bias = f"{name}.bias"
        return functional.linear(x, self(f"{name}.weight"), self(bias) if bias in self else None)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return the RMS norm of `x` with the weight `name`."""
        weight = self(f"{name}.weight")
        return functional.rms_norm(x, weight.shape, weight, float(self.config.get("rms_norm_eps", 1e-6)))

    def over_target(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Return logits of the draft vocabulary, `[P, V']`, over the target's; see `over_target`."""
        d2t = self.tensors.get("d2t")
        ids = None if d2t is None else torch.arange(logits.shape[-1], device=d2t.device) + d2t
        return over_target(logits, ids, vocab_size)


def over_target(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits `[P, V']` of the target ids `[V']` over all of its tokens, `[P, V]`: −inf for others."""
    if ids is None:
        return logits
    wide = logits.new_full((len(logits), vocab_size), -torch.inf)
    return wide.index_copy(1, ids.to(logits.device), logits)


class Layers:
    """Llama's decoder layers over one sequence."""

    def __init__(self, weights: Weights, length: int, device: torch.device):
        self.weights = weights
        config = weights.config
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.size = int(config.get("head_dim") or config["hidden_size"] // self.heads)
        frequencies, scale = vllm_rope(config, self.size)
        self.neighbours = config.get("is_neox_style") is False  # turn in pairs; else halves of a head do
        if "rope_freqs.weight" in weights:  # llama.cpp's
            frequencies = frequencies / weights("rope_freqs.weight")
        every = torch.arange(length, device=device)[None]
        turns = every.T * frequencies.to(device)  # [T, R / 2]
        self.cos, self.sin = scale * turns.cos(), scale * turns.sin()
        window = config["sliding_window"] if "sliding_attention" in (config.get("layer_types") or []) else length
        self.seen = (every <= every.T) & (every > every.T - window)  # [T, T]

    def __call__(self, at: str, entered: Tensor, residual: Tensor) -> Tensor:
        """Return the output `[T, H]` of the layer whose names begin with `at`.

        Args:
            entered: the attention's input, `[T, ·]`.
            residual: the attention's output is added to it, `[T, H]`.
        """
        count, grouped = len(entered), self.heads > self.kv_heads
        q, k, v = (self.project(at, name, entered) for name in "qkv")
        q, k = self.turned(q), self.turned(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, self.seen[:count, :count], enable_gqa=grouped)
        return self.finish(at, mixed, residual)

    def project(self, at: str, name: str, x: Tensor) -> Tensor:
        """Return the queries, keys or values of `x` `[T, ·]`, `[1, A, T, D]`."""
        return self.weights.linear(x, f"{at}self_attn.{name}_proj").view(1, len(x), -1, self.size).transpose(1, 2)

    def turned(self, x: Tensor, first: int = 0) -> Tensor:
        """Return queries or keys `[1, A, T, D]` that stand at the places from `first` on, their first R dimensions
        turned: two of a pair are R / 2 apart, or neighbours."""
        cos, sin = (table[first : first + x.shape[-2]] for table in (self.cos, self.sin))
        half = cos.shape[-1]
        axis, pairs = (-1, (half, 2)) if self.neighbours else (-2, (2, half))
        one, other = x[..., : 2 * half].unflatten(-1, pairs).unbind(axis)
        turned = torch.stack([one * cos - other * sin, other * cos + one * sin], axis).flatten(-2)
        return torch.cat([turned, x[..., 2 * half :]], -1)

    def finish(self, at: str, mixed: Tensor, residual: Tensor) -> Tensor:
        """Return the layer's output `[T, H]` of its attention's, `[1, A, T, D]`, and the residual `[T, H]`."""
        weights = self.weights
        hidden = residual + self.attended(at, mixed)
        return hidden + self.feed(at, weights.norm(hidden, f"{at}post_attention_layernorm"))

    def attended(self, at: str, mixed: Tensor) -> Tensor:
        """Return the output `[T, H]` of attention's result, `[1, A, T, D]`."""
        return self.weights.linear(mixed[0].transpose(0, 1).flatten(1), f"{at}self_attn.o_proj")

    def feed(self, at: str, x: Tensor) -> Tensor:
        """Return the MLP's output for a normed input `[T, H]`, in its shape."""
        gate, up = (self.weights.linear(x, f"{at}mlp.{name}_proj") for name in ("gate", "up"))
        return self.weights.linear(functional.silu(gate) * up, f"{at}mlp.down_proj")


def vllm_rope(layer: Mapping[str, Any], size: int) -> tuple[Tensor, float]:
    """Return how vLLM turns heads of `size`: frequencies `[R / 2]` of its first R dimensions, and a scale of the turns.

    Written from its `get_rope`, and from what it first fills in from other fields of a config.json.

    Raises:
        BadInputError: vLLM stops at these parameters, or reads none of them.
        IncompatibleError: they depend on more than the position, such as how the engine was started.
    """
    rope = {name: layer[name] for name in ("rope_theta", "partial_rotary_factor") if layer.get(name) is not None}
    rope |= layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if any(isinstance(part, dict) for part in rope.values()):
        raise BadInputError("rope_parameters differ by kinds of layers, which vLLM's heads do not read: base 10,000.")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not 0 < (share := rope.get("partial_rotary_factor", 1.0)) <= 1:
        raise BadInputError(f"partial_rotary_factor is {share}: vLLM stops there (it reads 0 to 1).")
    dims = rope.get("rope_dim") or int(size * share)
    base = float(rope.get("rope_theta") or 10000.0)
    plain = base ** -(torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    if kind == "dynamic" and rope.keys().isdisjoint(("alpha", "max_trained_positions")):
        kind = "default"  # whose base it has up to its last place
    if kind in ("default", "mrope"):  # whose sections turn texts alike
        return plain, 1.0
    if kind not in ("linear", "llama3", "yarn"):
        raise IncompatibleError(f"rotary positions of the type {kind!r} depend on more than the position.")
    if (factor := rope["factor"]) is None or (kind == "linear" and not isinstance(factor, float)):
        raise BadInputError(f"the factor of {kind} positions is {factor!r}: vLLM stops there (it reads 2.0, not 2).")
    if kind == "linear":
        return plain / factor, 1.0
    name = "original_max_position_embeddings"
    context = layer.get(name) or rope.get(name) or layer["max_position_embeddings"]
    if kind == "yarn":
        return plain * _yarn_shares(rope, dims, base, context), _yarn_scale(rope)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((context * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / factor), 1.0


def _yarn_shares(rope: Mapping[str, Any], dims: int, base: float, context: int) -> Tensor:
    """Return by what YaRN multiplies frequencies, `[R / 2]`: from 1 for the fastest to 1 / factor for the slowest."""
    betas = (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
    first, last = (dims * math.log(context / (2 * math.pi * beta)) / (2 * math.log(base)) for beta in betas)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    slowed = ((torch.arange(dims // 2) - first) / ((last - first) or 0.001)).clamp(0, 1)
    return 1 - slowed + slowed / rope["factor"]


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """Return by what YaRN multiplies sines and cosines."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0

    own, every = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(own) / scale(every) if own and every else scale(1)


@torch.no_grad()
def eagle3_logits(
    tensors: Mapping[str, Tensor], layer: Mapping[str, Any], flags: Flags, passage: ProbeSequence
) -> Tensor:
    """Return the draft logits of an EAGLE-3 head at each depth, `[k, V]`; −inf outside its draft vocabulary.

    Args:
        tensors: by the names that vLLM uses (`layers.0.…`).
        layer: the config of its layers.
    """
    weights = Weights(tensors, layer)
    read = passage.read
    own = "embed_tokens.weight"
    embedded = functional.embedding(read, weights(own) if own in weights else passage.table)
    layers = Layers(weights, len(read), read.device)
    states = _fused(weights, flags, [passage.hidden[tap] for tap in flags.taps])
    logits: list[Tensor] = []
    while len(logits) <= len(passage.drafts):
        output = _eagle3_layers(weights, layers, flags, embedded[: len(states)], states)
        normed = weights.norm(output[-1:], "norm")
        logits.append(weights.over_target(weights.linear(normed, "lm_head"), len(passage.table)))
        states = torch.cat([states, normed if flags.norm_output else output[-1:]])
    return torch.cat(logits)


def _fused(weights: Weights, flags: Flags, taps: list[Tensor]) -> Tensor:
    """Return the hidden states of the first step, `[T, H]`, from taps of `[T, H]` each."""
    if flags.norm_before_fc:
        taps = [weights.norm(torch.cat(taps, -1), "input_norm")]
    if flags.fc_norm:
        taps = [weights.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)]
    return weights.linear(torch.cat(taps, -1), "fc")


def _eagle3_layers(weights: Weights, layers: Layers, flags: Flags, embedded: Tensor, states: Tensor) -> Tensor:
    normed = weights.norm(states, "layers.0.hidden_norm")
    entered = torch.cat([weights.norm(embedded, "layers.0.input_layernorm"), normed], -1)
    x = layers("layers.0.", entered, normed if flags.norm_before_residual else states)
    for i in range(1, int(weights.config["num_hidden_layers"])):
        x = layers(f"layers.{i}.", weights.norm(x, f"layers.{i}.input_layernorm"), x)
    return x


@torch.no_grad()
def peagle_logits(
    tensors: Mapping[str, Tensor], layer: Mapping[str, Any], flags: Flags, mask: int, passage: ProbeSequence
) -> Tensor:
    """Return the draft logits of a P-EAGLE head at each depth, `[k, V]`: those of one pass over text and masks.

    `mask`: the token that stands in place of drafts.
    """
    weights, count = Weights(tensors, layer), len(passage.drafts)
    read = torch.cat([passage.tokens[1:], torch.full_like(passage.drafts, mask)])
    masked = _fused(weights, flags, list(weights("mask_hidden")[0].chunk(len(flags.taps), -1)))
    seen = _fused(weights, flags, [passage.hidden[tap] for tap in flags.taps])
    states = torch.cat([seen, masked.expand(count, -1)])
    own = "embed_tokens.weight"
    embedded = functional.embedding(read, weights(own) if own in weights else passage.table)
    output = _eagle3_layers(weights, Layers(weights, len(read), read.device), flags, embedded, states)
    normed = weights.norm(output[-1 - count :], "norm")
    return weights.over_target(weights.linear(normed, "lm_head"), len(passage.table))


@torch.no_grad()
def eagle1_logits(tensors: Mapping[str, Tensor], config: Mapping[str, Any], passage: ProbeSequence) -> Tensor:
    """Return the draft logits of an EAGLE head at each depth, `[k, V]`.

    Its first layer has no norm before attention, its output goes to the target's own output embedding.
    """
    weights = Weights(tensors, config)
    read = passage.read
    embedded, layers = functional.embedding(read, passage.table), Layers(weights, len(read), read.device)
    states, logits = passage.hidden[-1], list[Tensor]()
    while len(logits) <= len(passage.drafts):
        x = weights.linear(torch.cat([embedded[: len(states)], states], -1), "fc")
        for i in range(int(config["num_hidden_layers"])):
            x = layers(f"layers.{i}.", weights.norm(x, f"layers.{i}.input_layernorm") if i else x, x)
        states = torch.cat([states, x[-1:]])
        logits.append(float(config.get("logit_scale", 1.0)) * passage.lm_head(x[-1:]))
    return torch.cat(logits)


@torch.no_grad()
def medusa_logits(tensors: Mapping[str, Tensor], config: Mapping[str, Any], passage: ProbeSequence) -> Tensor:
    """Return the logits of Medusa's heads at their depths, `[k, V]`, as vLLM names and computes them."""
    weights = Weights(tensors, {})
    heads, blocks = int(config["num_heads"]), int(config["num_hidden_layers"])
    scale = float(config.get("logit_scale", 1.0))
    every = []
    for i in range(heads):
        x = passage.hidden[-1][-1:]
        for j in range(blocks):
            x = x + functional.silu(weights.linear(x, f"blocks.{i}.layers.{j}"))
        logits = scale * weights.linear(x, "lm_heads.0" if config.get("original_lm_head") else f"lm_heads.{i}")
        # vLLM reads token_map only where config.json says that there are fewer rows than tokens.
        is_whole = logits.shape[-1] == len(passage.table)
        every.append(over_target(logits, None if is_whole else tensors.get("token_map"), len(passage.table)))
    return torch.cat(every)


@torch.no_grad()
def model_logits(model: Any, passage: ProbeSequence) -> Tensor:
    """Return a language model's own logits at each depth, `[k, V]`."""
    text = passage.text[None]
    logits: Tensor = model.to(text.device)(text, use_cache=False).logits[0, -1 - len(passage.drafts) :]
    return logits.float()


# A text long enough that positions, masks and rotary angles matter, and drafts deep enough that feedback does.
_LENGTH, _DEPTH = 24, 4
# Two orders of the same sums differ by less, in units of the logits' own spread.
TOLERANCE = 2e-3
_HALF = (torch.float16, torch.bfloat16)


def passage_of(target: Target, max_depth: int | None = None) -> ProbeSequence:
    """Return a passage of random tokens, the same for the same target, to compare both sides on.

    `max_depth`: the deepest that the drafter drafts, if it has a limit; all of it is compared.
    """
    depth = max_depth or _DEPTH
    length = min(_LENGTH, (target.max_context or _LENGTH) - depth - 1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(target.vocab_size, (length + depth,), generator=generator).tolist()
    return ProbeSequence.of(target, drawn[: length + 1], drawn[length + 1 :])


@contextmanager
def outputs_in_float32(target: Target) -> Iterator[None]:
    """Let the target's output embedding compute in float32: both sides of a comparison, which else round otherwise."""
    head = cast(nn.Module, target.model.get_output_embeddings())
    half = [p for p in head.parameters(recurse=False) if type(p) is nn.Parameter and p.dtype in _HALF]
    stored = [parameter.data for parameter in half]
    for parameter in half:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, data in zip(half, stored, strict=True):
            parameter.data = data


@torch.no_grad()
def session_logits(drafter: Drafter, target: Target, passage: ProbeSequence) -> Tensor:
    """Return the logits of a decoding session of `drafter`, in fp32, at each depth of the passage, `[k, V]`."""
    drafter = copy.deepcopy(drafter).to(target.device).cast(torch.float32).eval()
    count = len(passage.tokens) - 1
    session = drafter.open(target, 1, count + len(passage.drafts) + 2)
    assert isinstance(session, NodeSession)
    hidden = passage.hidden[list(drafter.taps)].transpose(0, 1)[None] if drafter.taps else None
    session.update(passage.tokens[None, :-1], hidden, RowLengths.of([count], target.device))
    logits = [session.prefill(passage.tokens[-1:])]
    logits += [session.decode(draft[None, None])[:, 0] for draft in passage.drafts]
    return over_target(torch.cat(logits).float(), drafter.output_ids, len(passage.table))


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of logits `[k, V]`, in units of the spread of `ours`.

    A constant added to all logits of a depth is no difference; a token that only one side has is an infinite one.
    """
    if not torch.equal(ours.isinf(), theirs.isinf()):
        return float("inf")
    known = ~ours.isinf()
    ours, theirs = (torch.where(known, x, torch.nan) for x in (ours, theirs))
    apart = (ours - theirs) - (ours - theirs).nanmean(-1, keepdim=True)
    return float(apart[known].abs().max() / ours[known].std().clamp(min=1e-6))


def require_same(ours: Tensor, theirs: Tensor, what: str) -> float:
    """Return the `difference` of logits.

    Raises IncompatibleError if rounding does not explain it: the export would not be served as it was measured.
    """
    apart = difference(ours, theirs)
    if not apart <= TOLERANCE:
        first = next(d for d in range(len(ours)) if not difference(ours[d : d + 1], theirs[d : d + 1]) <= TOLERANCE)
        raise IncompatibleError(
            f"{what}: read back as the engine reads it, its logits differ from the drafter's by {apart:.2g} of their "
            f"spread, from depth {first + 1} on (rounding explains {TOLERANCE:g}). Nothing was written. This is likely "
            "a setting of the target or the head that the layout cannot express; please report it."
        )
    return apart
