"""`outrider init`: a commented starter recipe for a model, made from its config.json alone.

The method and its settings follow from the target's size, depth and vocabulary, as the packaged recipes of published
models have them (docs/guides/choosing-a-method.md). No weights are read, and torch is not imported.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.places import require_file
from ..common.safe_load import parse_yaml, read_json
from ..recipes import Recipe, embedded_file
from .output import print_lines

SMALL = 5e8  # parameters, below which a run is minutes of one machine
_TOKENS, _FEW = 32_000, 4  # tokens above which a vocabulary is pruned; layers below which there are no three taps
_GPUS = ("/dev/nvidia0", "/dev/kfd")

# Families whose configs leave out that input and output embeddings are one.
_TIED = ("bloom", "cohere", "falcon", "gemma", "gpt2", "gpt_bigcode", "lfm2", "mpt", "opt", "smollm3", "starcoder2")
_RECURRENT = ("linear_attention", "mamba", "conv", "recurrent")  # kinds of layers


@dataclass(frozen=True)
class ModelFacts:
    """What a model's config.json says of it; 0 for what it does not say."""

    hidden: int
    layers: int
    attention: int  # parameters of one layer's
    width: int  # of a dense layer's MLP, or of one expert where there is nothing else
    experts: int
    expert_width: int
    vocabulary: int
    is_tied: bool  # one matrix is both embeddings
    context: int
    dtype: str
    draws: dict[str, Any]  # how it advises to be sampled
    has_template: bool  # for chats
    has_mtp: bool
    is_recurrent: bool

    @classmethod
    def of(cls, folder: Path) -> ModelFacts:
        """Return the facts about the model in `folder`. BadInputError: it holds no config of a language model."""
        from ..targets.model_folder import GENERATION_CONFIG, MODEL_CONFIG, check_files

        check_files(folder, trust_remote_code=True)  # nothing of it is run
        whole = read_json(folder / MODEL_CONFIG)
        values = whole | (whole["text_config"] if isinstance(whole.get("text_config"), dict) else {})

        def number(*names: str) -> int:
            said = next((values[name] for name in names if values.get(name)), 0)
            if isinstance(said, list):  # some have one for each layer
                said = max((one for one in said if isinstance(one, int)), default=0)
            return said if isinstance(said, int) else 0

        asked, tokenizer = (_values(folder / name) for name in (GENERATION_CONFIG, "tokenizer_config.json"))
        draws = {name: asked[name] for name in ("temperature", "top_p", "top_k") if asked.get(name)}
        dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32")
        hidden, heads = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", "n_head") or 1
        head_dim = number("head_dim") or hidden // heads
        tied = values.get("tie_word_embeddings", whole.get("tie_word_embeddings"))
        facts = cls(
            hidden=hidden,
            attention=2 * hidden * head_dim * (heads + (number("num_key_value_heads") or heads)),
            is_tied=str(values.get("model_type")).startswith(_TIED) if tied is None else bool(tied),
            layers=number("num_hidden_layers", "n_layer", "n_layers"),
            width=number("intermediate_size", "n_inner"),
            experts=number("num_experts", "num_local_experts", "n_routed_experts"),
            expert_width=number("moe_intermediate_size", "intermediate_size"),
            vocabulary=number("vocab_size"),
            context=number("max_position_embeddings", "n_positions"),
            dtype=dtype if dtype in ("bfloat16", "float16", "float32") else "auto",
            draws=draws if asked.get("do_sample") else {},
            has_template=(folder / "chat_template.jinja").exists() or "chat_template" in tokenizer,
            has_mtp=bool(number("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")),
            is_recurrent=any(f'"{kind}"' in json.dumps(values.get("layer_types")) for kind in _RECURRENT),
        )
        if not (facts.hidden and facts.layers and facts.vocabulary):
            raise BadInputError(
                f"{folder / MODEL_CONFIG}: names no hidden size, layers and vocabulary of a language model."
            )
        return facts

    @property
    def parameters(self) -> float:
        """About as many as it has."""
        dense = 3 * self.hidden * (self.width or 4 * self.hidden)
        mlp = 3 * self.hidden * self.expert_width * self.experts if self.experts else dense
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        return float(self.layers * (self.attention + mlp) + embeddings)


# Lines whose place is filled with nothing are left out.
_RECIPE = """\
# A first recipe for a target of about {about} parameters; written on a machine {here}.
# What each key means: outrider recipe --explain data.limit. What it will need: outrider plan FILE.
{mtp}
{recurrent}
name: {name}-{kind}
target:
  path: {path}
  dtype: {dtype}
drafter:
  type: {kind} # reads the target's hidden states: the most τ for its cost (docs/guides/choosing-a-method.md)
  steps: {depth} # unrolled in training; behind them acceptance falls, so as many as eval.depth
  {norms}
  {draft_vocab_size}
  {intermediate_size}
data:
  prompts: {prompts}
  limit: {limit} # more is better: τ grows with them
  max_prompt_tokens: {asked}
  max_new_tokens: {answered} # at most {room:,} together, the target's context
  sampling: {sampling}
training: # any field of transformers.TrainingArguments
  {training}
  warmup_steps: 0.05 # of the run
  lr_scheduler_type: cosine
  report_to: none # or wandb, tensorboard, trackio; `outrider doctor` says which are installed
eval:
  suites: [{suites}] # {whose}
  depth: {depth} # `outrider tune` finds the best one
  max_new_tokens: {measured}
"""
_SCALES = {  # of what a head's first layer reads
    "eagle1": "embedding_scale: 0 # by the target's own, so that a fresh layer hears both\n  feature_scale: 0",
    "eagle3": "norm_taps: true # a fresh layer hears them at once, whatever their scale\n  norm_output: true # with it",
}
_SHORT = """num_train_epochs: 1
  per_device_train_batch_size: 4 # small: so short a run needs many steps
  optim: muon # Muon for the matrices, AdamW for the rest
  learning_rate: 1.0e-2 # high for a language model, right for one fresh layer"""
_LONG = """num_train_epochs: 2
  per_device_train_batch_size: 1
  optim: adamw_torch
  learning_rate: 1.0e-4
  bf16: true"""


def starter(target: str, prompts: list[str] | None = None) -> str:
    """Return a recipe for `target`, a folder, a Hub id or "embedded", as YAML with comments; nothing is loaded."""
    from ..targets.model_folder import FETCHED, gguf_in, model_folder

    is_ours, place = target == "embedded", target
    if target in FETCHED or gguf_in(target) is not None:
        from ..targets.loading import target_path  # seconds of imports, which other models do without

        place = target_path(target)
    folder = embedded_file("target/config.json").parent if is_ours else model_folder(place, weights=False)
    facts, name = ModelFacts.of(folder), re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(target).name).strip("-_.")
    small, room = facts.parameters < SMALL, facts.context or 4096
    kind = "eagle3" if facts.layers >= _FEW else "eagle1"
    # What is packaged speaks of Python: raw code, raw text (prose), and chats that ask for a function (docs).
    packaged = ["code", "docs"] if is_ours else ["docs", "prose"] if facts.has_template else ["code", "prose"]
    asked = min(256 if small else 1024, room // 2)
    here = "with a GPU" if any(Path(device).exists() for device in _GPUS) else "without a GPU"
    sources = ", ".join(f"embedded:{name}" for name in packaged)
    own = f"[{sources}] # FILL IN your own: .jsonl, .parquet or .txt, a folder, org/data:split"
    pruned, scaled = facts.vocabulary > _TOKENS and kind == "eagle3", small or kind == "eagle1"
    outputs = min(_TOKENS, facts.vocabulary // 2048 * 1024)  # half of them, as in the packaged recipes
    filled = _RECIPE.format(
        about=f"{facts.parameters / 1e6:.3g}M" if small else f"{facts.parameters / 1e9:.2g}B",
        here=here if small or "out" not in here else f"{here}: take another one for the training",
        mtp="# Its config names MTP modules: {type: mtp, init: native} starts from them." if facts.has_mtp else "",
        recurrent="# It has recurrent layers, which draft chains: leave eval.width at 1." if facts.is_recurrent else "",
        name=name or "my-target",
        kind=kind,
        path=json.dumps(target, ensure_ascii=False),
        dtype="float32 # exact enough to compare runs" if small else facts.dtype,
        depth=3 if small else 5,
        norms=_SCALES[kind] if scaled else "",
        draft_vocab_size=f"draft_vocab_size: {outputs} # of {facts.vocabulary:,}; `outrider lab vocab` measures it"
        if pruned
        else "",
        intermediate_size=f"intermediate_size: {4 * facts.hidden} # its layer is dense, the target's experts smaller"
        if facts.experts and facts.width < 2 * facts.hidden
        else "",
        prompts=json.dumps(prompts, ensure_ascii=False) if prompts else own,
        limit=2000 if small else 20_000,
        asked=asked,
        answered=min(128 if small else 1024, room - asked),
        room=room,
        sampling=f"{json.dumps(facts.draws)} # its generation_config.json's"
        if facts.draws
        else "{temperature: 0.0} # sample as you will serve",
        training=_SHORT if small else _LONG,
        suites=", ".join(packaged),
        whose=f"{'or' if is_ours else 'FILL IN'} files of your own prompts, which training must not see",
        measured=min(128, room - asked),
    )
    text = "".join(line for line in filled.splitlines(keepends=True) if line.strip())
    Recipe.from_dict(parse_yaml(text, "the starter recipe"), "the starter recipe")
    return text


def _values(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def init(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A folder, a .gguf, a Hub id, 'embedded' or 'smollm2'.")
    ],
    out: Annotated[Path, typer.Option(help="The new file.")] = Path("recipe.yaml"),
    prompts: Annotated[
        list[str] | None, typer.Option(help="A source for data.prompts; may be repeated (default: a line to fill in).")
    ] = None,
) -> None:
    """A commented starter recipe for a model, by its config alone: method, sizes, lengths, dtype."""
    require_file(out, "the recipe")
    if prompts:
        from ..distill.sources import check_sources

        check_sources(prompts)
    text = starter(target, prompts)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text)
    places = ["data.prompts"] * (not prompts) + ["eval.suites"] * (target != "embedded")
    fill = f"fill in {' and '.join(places)}, then " if places else ""
    verbs = ", ".join(f"`outrider {verb.format(out)}`" for verb in ("plan {}", "train {}", "eval {} --quick"))
    print_lines([f"[green]✓[/green] {escape(f'{out}: {fill}{verbs}')}"])
