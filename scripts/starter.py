"""`outrider init`: a commented starter recipe for a model, made from its config.json alone.

The method and its settings follow from the target's size, depth and vocabulary, as the packaged recipes of published
models have them (docs/guides/choosing-a-method.md). No weights are read, and torch is not imported.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.places import require_file
from ..common.untrusted_files import parse_yaml, read_json
from ..recipes import Recipe, embedded_file
from .output import print_lines

if TYPE_CHECKING:
    from jinja2 import Template

SMALL = 5e8  # parameters, below which a run is minutes of one machine
_TOKENS = 32_000  # above which a vocabulary is pruned
_LAYERS_OF_TAPS = 4  # below which there are no three taps
_GPUS = ("/dev/nvidia0", "/dev/kfd")

# Families whose configs leave out that input and output embeddings are one.
_TIED = ("bloom", "cohere", "falcon", "gemma", "gpt2", "gpt_bigcode", "lfm2", "mpt", "opt", "smollm3", "starcoder2")
_RECURRENT = ("linear_attention", "mamba", "conv", "recurrent")  # kinds of layers


@dataclass(frozen=True)
class ModelFacts:
    """The facts in a model's config.json; 0 for those that it lacks."""

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


def starter(target: str, prompts: list[str] | None = None) -> str:
    """Return a recipe for `target`, a folder, a Hub id or "embedded", as YAML with comments; nothing is loaded."""
    is_ours = target == "embedded"
    facts = ModelFacts.of(_config_folder(target))
    small = facts.parameters < SMALL
    room = facts.context or 4096
    asked = min(256 if small else 1024, room // 2)
    # What is packaged speaks of Python: raw code, raw text (prose), and chats that ask for a function (docs).
    with_chats = ["docs", "prose"] if facts.has_template else ["code", "prose"]
    text = _template().render(
        facts=facts,
        is_ours=is_ours,
        small=small,
        size=f"{facts.parameters / 1e6:.3g}M" if small else f"{facts.parameters / 1e9:.2g}B",
        has_gpu=any(Path(device).exists() for device in _GPUS),
        name=re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(target).name).strip("-_.") or "my-target",
        kind="eagle3" if facts.layers >= _LAYERS_OF_TAPS else "eagle1",
        path=json.dumps(target, ensure_ascii=False),
        depth=3 if small else 5,
        outputs=_pruned(facts.vocabulary),
        prompts=json.dumps(prompts, ensure_ascii=False) if prompts else "",
        packaged=["code", "docs"] if is_ours else with_chats,
        draws=json.dumps(facts.draws) if facts.draws else "",
        room=room,
        asked=asked,
        answered=min(128 if small else 1024, room - asked),
        measured=min(128, room - asked),
    )
    Recipe.from_dict(parse_yaml(text, "the starter recipe"), "the starter recipe")
    return text


def _pruned(vocabulary: int) -> int:
    """Return the outputs of a head: half of the vocabulary, as in the packaged recipes; 0 for all of a small one."""
    return min(_TOKENS, vocabulary // 2048 * 1024) if vocabulary > _TOKENS else 0


def _config_folder(target: str) -> Path:
    """Return the folder of a target's config."""
    from ..targets.model_folder import NAMES, gguf_in, model_folder

    if target == "embedded":
        return embedded_file("target/config.json").parent
    if target in NAMES or gguf_in(target) is not None:
        from ..targets.loading import target_path  # seconds of imports, which other models do without

        target = target_path(target)
    return model_folder(target, weights=False)


def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    text = resources.files(__package__).joinpath("starter.yaml.jinja").read_text(encoding="utf-8")
    return Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined).from_string(text)


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
    """A commented starter recipe for a model, by its config alone.

    The config says method, sizes, lengths and dtype.
    """
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
