"""The schema of a recipe: one YAML file about one training, validated before any work starts.

`training` and `drafter` are open mappings here: their keys belong to `transformers.TrainingArguments` and to the
drafter's own config, which validate them. Everything else is typed below, and an unknown key is refused with the
nearest known one.

This module imports neither torch nor transformers, so that a command can check its recipe at once.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from ..common import BadInputError
from ..common.untrusted_files import yaml_text
from ..common.values import checked_temperature, in_words, is_server_address, printable_urls, tree_depths

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Positive = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, AfterValidator(checked_temperature)]
Form = TypeVar("Form", bound=BaseModel)


def _each_once(values: list[Any]) -> list[Any]:
    """Return a list whose entries differ; raises ValueError for one that is there twice."""
    if twice := [value for number, value in enumerate(values) if value in values[:number]]:
        named = getattr(twice[0], "url", None) or getattr(twice[0], "path", twice[0])
        raise ValueError(f"expected each entry once, found {printable_urls(str(named))} twice")
    return values


def finite(value: Any) -> Any:
    """Return plain values; raises ValueError for NaN and infinity among them, which no setting means."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected a finite number, found {value}")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        finite(inner)
    return value


EachOnce = AfterValidator(_each_once)
Open = Annotated[dict[str, Any], AfterValidator(finite)]  # a mapping whose keys another library checks


class Section(BaseModel):
    """A part of a recipe. Strict: a quoted number is text, and `true` is not 1."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class EngineSpec(Section):
    """An engine that holds the target, and makes its hidden states.

    Attributes:
        kind: of the engine.
        url: of one that runs with Outrider's connector, or a list of several that write into one folder; null to start
            one on this machine.
        python: the environment that vLLM is installed in (its folder, or its Python), to start one.
        arguments: more words of its command line, such as `--tensor-parallel-size=8`.
        folder: that it writes hidden states into, as this machine sees it; null for `<output>/engine`.
        disk_gb: bytes, in 10^9, that states may take there before they are read; then the engine waits.
        concurrency: rows that it works on at once. With 1 a row's states do not depend on its neighbours.
        timeout: seconds for a row.
        start_seconds: for the start of an engine, or until one that is away is back.
        check: `forward` compares all taps with a plain forward of the loaded target, `logits` only what the last state
            gives with the engine's own log-probabilities; `auto` is forward where the target fits this machine.
    """

    kind: Literal["vllm"] = "vllm"
    url: str | list[str] | None = None
    python: str | None = None
    arguments: list[str] = Field(default_factory=list)
    folder: str | None = None
    disk_gb: Annotated[float, Field(gt=0)] = 8.0
    concurrency: Positive = 1
    timeout: Annotated[float, Field(gt=0)] = 600.0
    start_seconds: Annotated[float, Field(gt=0)] = 1800.0
    check: Literal["auto", "forward", "logits"] = "auto"

    @model_validator(mode="after")
    def _is_consistent(self) -> EngineSpec:
        if bool(self.urls) == (self.python is not None):
            raise ValueError("give either url, of an engine that runs, or python, of the environment to start one")
        if not all(map(is_server_address, self.urls)) or len(set(self.urls)) < len(self.urls):
            raise ValueError("url: addresses are expected, each once, like http://gpu1:8000, without a user or a key")
        if self.urls and (self.arguments or self.folder is None):
            raise ValueError("an engine at a url has its own arguments, and needs folder: where it writes the states")
        return self

    @property
    def urls(self) -> list[str]:
        """The addresses of engines that run, without `/v1`."""
        given = [self.url] if isinstance(self.url, str) else self.url or []
        return [url.rstrip("/").removesuffix("/v1") for url in given]


class TargetSpec(Section):
    """The model being accelerated; the fields are those of `Target.load`, and its engine.

    Attributes:
        path: a folder, a .gguf, a Hub id, `embedded`, `smollm2` (fetched; `smollm2@hub` is the published one), or
            `embedded@1b`, grown to that size.
        revision: a branch, tag or commit on the Hub; null for its main branch.
        adapter: folder or Hub id of a PEFT adapter, which is merged as it would be served.
        dtype: of the weights; `auto` as the config says.
        trust_remote_code: whether code that comes with the model may run.
        sharding: `fsdp2` splits a target that is too large for one GPU over the processes of a training. (The drafter
            is not split.)
        quantize: `int8` (weights) or `int8-dynamic` (products, too), by torchao, after the adapter was merged.
        engine: holds the target in our place: its layers are not loaded, and `data.features: cached` are its states.
        allow_changed: whether responses, checkpoints and drafters that were made for other weights, another tokenizer
            or chat template are taken. What differs is written into the report, the pair and provenance.json.
    """

    path: str
    revision: str | None = None
    adapter: str | None = None
    dtype: Dtype = "auto"
    trust_remote_code: bool = False
    sharding: Literal["none", "fsdp2"] = "none"
    quantize: Literal["int8", "int8-dynamic"] | None = None
    engine: EngineSpec | None = None
    allow_changed: bool = False

    @model_validator(mode="after")
    def _is_whole_in_engine(self) -> TargetSpec:
        if self.engine is not None and (self.adapter or self.quantize or self.sharding != "none"):
            raise ValueError(
                "engine serves the files in path as they are; merge the adapter, or name the quantised model, and "
                "leave out adapter, quantize and sharding"
            )
        return self

    def to_load(self) -> dict[str, Any]:
        """Return the arguments of `Target.load`; BadInputError for a target that lives in an engine."""
        if self.engine is not None:
            raise BadInputError(
                "the target lives in an engine (target.engine), and this would load all of it: leave target.engine out "
                "where it fits this machine, or measure its pair by the engine (outrider served)."
            )
        return self.model_dump(exclude={"engine", "allow_changed"})


class SamplingSpec(Section):
    """How the target's responses are drawn; each field means what it means in `outrider.decode.Sampling`.

    Attributes:
        temperature: 0 (greedy), or from 0.0001 to 10000.
        top_k: only so many tokens, the most probable ones; null for all.
        top_p: only the most probable tokens, until they have so much probability together; null for all.
        min_p: only tokens with this share of the most probable one's probability; null for all.
        repetition_penalty: divides the logits of tokens that stand in the text already; 1 for none, up to 100.
        seed: of the draws.
    """

    temperature: Temperature = 0.0
    top_k: Positive | None = None
    top_p: Probability | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    seed: int = 0


class ServerSpec(Section):
    """A server that answers prompts.

    Attributes:
        url: such as `http://gpu1:8000/v1`.
        concurrency: requests that it works on at once; null for `data.requests.concurrency`.
    """

    url: str
    concurrency: Positive | None = None

    @field_validator("url")
    @classmethod
    def _is_an_address_alone(cls, url: str) -> str:
        """Refuse whatever may hold a secret; the message does not repeat it, for it would reach the log."""
        if not is_server_address(url):
            raise ValueError(
                "the address of a server is expected here, such as http://gpu1:8000/v1, with no user, no password, no "
                "`?` and no `#`; a key is read from the environment variable that data.requests.key names"
            )
        return url


class RequestsSpec(Section):
    """How servers are asked.

    Attributes:
        model: the name that they serve the target under; null for the first one that each lists.
        interface: `completions` sends prompts as token ids where the server takes them, `chat` sends messages; `auto`
            takes the best that the server understands.
        stream: answers arrive in parts, which keeps proxies from giving up on long ones.
        concurrency: requests that each server works on at once.
        retries: attempts at one prompt that may fail before the run gives it up.
        timeout: seconds that an answer may take.
        patience: seconds without any server that answers, after which the run ends.
        key: the name of the environment variable that holds the servers' key, which is written nowhere.
    """

    model: str | None = None
    interface: Literal["auto", "completions", "chat"] = "auto"
    stream: bool = False
    concurrency: Positive = 32
    retries: Positive = 8
    timeout: Annotated[float, Field(gt=0)] = 600.0
    patience: Annotated[float, Field(gt=0)] = 600.0
    key: str = "OUTRIDER_SERVER_KEY"

    @field_validator("key")
    @classmethod
    def _names_a_variable(cls, key: str) -> str:
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", key):
            raise ValueError(
                "the name of an environment variable that holds the key is expected here, in capitals, never the key "
                "itself"
            )
        return key


class SourceSpec(Section):
    """Where rows come from, and how they are read.

    Attributes:
        path: as in `data.prompts`.
        weight: share of this source in the mixture, relative to the others; without any weights each is read whole.
        layout: how a row is read, where its keys do not say what it is; see `outrider.distill.dataset_formats`.
        column: the key that holds what is asked, where it is none of the known ones.
        split: of a folder or a Hub data set; `train` if it has one.
        revision: a branch, tag or commit of a Hub data set; null for its main branch.
        limit: so many rows, drawn as `data.sample` says.
    """

    path: str
    weight: Annotated[float, Field(gt=0)] | None = None
    layout: Literal["text", "question", "turns", "messages"] | None = None
    column: str | None = None
    split: str | None = None
    revision: str | None = None
    limit: Positive | None = None


_TEXT, _MAPPING = "(text)", "(mapping)"  # pydantic puts these into the path of an error
Source = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[SourceSpec, Tag(_MAPPING)],
    Discriminator(lambda value: _MAPPING if isinstance(value, (dict, SourceSpec)) else _TEXT),
]


class DataSpec(Section):
    """What the drafter learns from.

    Attributes:
        prompts: `embedded:code`, `embedded:docs`, `embedded:prose`, `smollm2:answers` (with `answers: given`), a
            .jsonl/.json/.parquet/.arrow/.txt file, a folder of them, or a Hub data set (`org/name` or
            `org/name:split`); each a text, or a mapping with `path`.
        limit: prompts used in all, taken from the sources in turn; null for all.
        sample: seed of the draw of rows where there are more than a limit; null for the first ones. Of a Hub data set
            some hundred times the limit are looked at.
        answers: `target` has the target answer every turn itself; `given` takes the answers that came with the rows.
        max_prompt_tokens: longer raw texts lose their beginning, longer chats are dropped, and a conversation ends
            before a longer question.
        malformed: whether a row that cannot be read ends the run (`refuse`) or is counted and dropped (`drop`).
        allow_leaks: take prompts that are measured in `eval.suites`, too; otherwise they are an error.
        max_new_tokens: length limit of a response.
        sampling: how a response is drawn; sample as you will serve.
        batch_size: prompts the target answers at once.
        features: whether hidden states are computed while training ("online"), or once, to disk ("cached"), or made by
            the target's engine while training, and kept nowhere ("engine").
        features_dtype: how cached ones are stored: "auto" as the target computes them; float8_e4m3fn with a scale for
            each vector.
        holdout: fraction of the sequences kept for evaluation during training.
        learn_prompts: also learn to predict the prompts' tokens (`completion_only_loss=False` in TRL): more to learn
            from per sequence, though not the target's own words. Held-out figures count responses only, either way.
        servers: URLs of OpenAI-compatible servers of the target, which answer instead of our own decoder; each may be a
            mapping with the keys url and concurrency.
        requests: how they are asked.
        drafter: folder of a drafter that our decoder speculates with while it answers; the text stays the same.
        draft_depth: draft tokens of each of its rounds, which a drafter that reaches less deep cuts down.
        responses: a finished data folder to use instead of generating one.
        on_policy: fraction of the rows of every step whose response the drafter writes anew and the target scores
            (`lmbda` in TRL's GKDConfig; DistillSpec, arXiv 2310.08461). Up to `max_new_tokens`; needs a drafter that is
            a whole language model, and features online.
        on_policy_temperature: at which it writes them.
    """

    prompts: Annotated[list[Source], Field(min_length=1), EachOnce]
    limit: Positive | None = None
    sample: int | None = 0
    answers: Literal["target", "given"] = "target"
    max_prompt_tokens: Positive = 2048
    malformed: Literal["refuse", "drop"] = "refuse"
    allow_leaks: bool = False
    max_new_tokens: Positive = 192
    sampling: SamplingSpec = Field(default_factory=SamplingSpec)
    batch_size: Positive = 32
    features: Literal["online", "cached", "engine"] = "online"
    features_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"] = "auto"
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    learn_prompts: bool = False
    servers: Annotated[list[ServerSpec], Field(min_length=1), EachOnce] | None = None
    requests: RequestsSpec = Field(default_factory=RequestsSpec)
    drafter: str | None = None
    draft_depth: Positive = 4
    responses: str | None = None
    on_policy: Annotated[float, Field(ge=0, le=1)] = 0.0
    on_policy_temperature: Temperature = 1.0

    @field_validator("servers", mode="before")
    @classmethod
    def _are_urls_or_more(cls, servers: Any) -> Any:
        if not isinstance(servers, list):
            return servers
        return [{"url": server} if isinstance(server, str) else server for server in servers]

    @model_validator(mode="after")
    def _is_consistent(self) -> DataSpec:
        if self.answers == "given" and (self.servers or self.drafter):
            raise ValueError("answers: given takes the rows' own answers; leave out servers, drafter")
        if self.servers is not None and self.drafter is not None:
            raise ValueError(
                "drafter speeds up our own decoder, and servers answer instead of it; leave out one of them"
            )
        if self.servers is None and self.requests != RequestsSpec():
            raise ValueError(
                "requests are settings for servers, and there are none; name them (servers), or leave it out"
            )
        if self.features_dtype != "auto" and self.features != "cached":
            raise ValueError(
                f"features_dtype is how features are stored, and those of features: {self.features} are not; set "
                "features: cached, or leave it out"
            )
        if self.on_policy > 0 and self.features != "online":
            raise ValueError(
                f"on_policy text is written while training, so it has no stored features; leave out features: "
                f"{self.features}"
            )
        return self


class EvalSpec(Section):
    """What is measured, and how.

    Attributes:
        suites: `code`, `docs`, `prose`, prompt files (Spec-Bench, MT-Bench, SPEED-Bench, …), or org/name[:split] on the
            Hub.
        depth: draft tokens per round, in a tree on its longest path.
        width, nodes: more than 1 drafts dynamic trees of that many nodes; see `outrider.decode.Plan`.
            Without nodes a tree has width × depth of them.
        tree: a static tree instead, the parent of each node as in `outrider.decode.Tree`; it decides the depth.
        temperatures: each is measured; the first decides what is tuned.
        max_new_tokens: length limit of a completion.
        limit: prompts per suite, some of each of its categories; null for all.
        max_prompt_tokens: longer prompts are left out, and counted; null: one that does not fit the target's context
            is an error.
        contexts: every prompt is filled up to these lengths, in tokens, by the suite's other prompts; [] leaves them.
        batch_sizes: ragged batches of so many prompts are measured, too.
        sampling: `temperatures` alone, or `served` as the target's own generation_config.json says.
        repeats: timed passes over each suite; contestants are interleaved.
        seed: of the draws above temperature 0, and of the intervals.
        baselines: drafters without weights that are measured beside the trained one.
        threads: of torch while measuring, on a CPU; null leaves its own choice.
        dtype: of the target while measuring; `auto` as the target's own setting says.
        training_prompts: on so many prompts of the suites, taken from them in turn, the decoder measures τ at each
            evaluation of the training (training.eval_steps), at the first of the temperatures. It is logged as
            `measured_tau`, and with `tau_gap`: what the held-out rows' analytic τ is above it.
        patience: ends the training when so many evaluations brought no better measured τ, and keeps the best
            checkpoint; null for all steps.
    """

    suites: Annotated[list[str], Field(min_length=1), EachOnce] = Field(
        default_factory=lambda: ["code", "docs", "prose"]
    )
    depth: Positive = 4
    width: Positive = 1
    nodes: Positive | None = None
    tree: list[int] | None = None
    temperatures: Annotated[list[Temperature], Field(min_length=1), EachOnce] = Field(
        default_factory=lambda: [0.0, 1.0]
    )
    max_new_tokens: Positive = 128
    limit: Positive | None = None
    max_prompt_tokens: Positive | None = None
    contexts: Annotated[list[Positive], EachOnce] = Field(default_factory=list)
    batch_sizes: Annotated[list[Positive], EachOnce] = Field(default_factory=list)
    sampling: Literal["temperatures", "served"] = "temperatures"
    repeats: Positive = 3
    seed: int = 0
    baselines: Annotated[list[str], EachOnce] = Field(default_factory=lambda: ["ngram"])
    threads: Positive | None = None
    dtype: Dtype = "auto"
    training_prompts: Annotated[int, Field(ge=0)] = 0
    patience: Positive | None = None

    @field_validator("tree")
    @classmethod
    def _is_a_tree(cls, tree: list[int] | None) -> list[int] | None:
        try:
            if tree is not None:
                tree_depths(tree)
        except BadInputError as error:
            raise ValueError(str(error).removesuffix(".")) from error
        return tree

    @model_validator(mode="after")
    def _is_consistent(self) -> EvalSpec:
        if self.patience is not None and not self.training_prompts:
            raise ValueError("patience waits for a better measured τ; set training_prompts, to 16 for example")
        if self.tree is not None:
            if self.width > 1 or self.nodes is not None:
                raise ValueError(
                    "a static tree has its own width and number of nodes; leave out width and nodes, or tree"
                )
            self.depth = tree_depths(self.tree)[-1]
        elif self.nodes is not None and self.width == 1:
            raise ValueError(f"nodes says how many nodes of a tree are verified, {self.nodes}; it needs width > 1")
        return self


class Recipe(Section):
    """Everything about one training.

    Attributes:
        name: of the run, of its folder and of the pair that is made of it.
        target: the model being accelerated.
        data: what the drafter learns from.
        eval: what is measured, and how.
        drafter: `type` and the fields of that drafter's config; `init: <folder>` starts from a saved drafter. (A draft
            model's `init` may also be random, pretrained or prune.)
        training: fields of `transformers.TrainingArguments`.
        template: arguments of the target's chat template, such as `enable_thinking: false`, for data and suites.
        output: where everything of this run goes; `{name}` is replaced.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
    target: TargetSpec
    drafter: Open
    data: DataSpec
    template: Open = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    eval: EvalSpec = Field(default_factory=EvalSpec)
    output: Annotated[str, Field(min_length=1)] = "runs/{name}"

    @model_validator(mode="after")
    def _is_consistent(self) -> Recipe:
        if self.target.engine is not None and self.eval.training_prompts:
            raise ValueError(
                "target.engine leaves the target's layers on the disk, and eval.training_prompts runs them; leave that "
                "out"
            )
        if self.target.engine is None and self.data.features == "engine":
            raise ValueError("data.features: engine needs target.engine, which says where it is; or leave it out")
        if self.target.engine is not None and self.data.features == "online":
            raise ValueError(
                "target.engine makes hidden states before the training (data.features: cached), or meanwhile (data."
                "features: engine); set one of them, or leave target.engine out"
            )
        answered = self.data.servers or self.data.responses or self.data.answers == "given"
        if self.target.engine is not None and self.target.engine.urls and not answered:
            raise ValueError(
                "target.engine.url makes hidden states, and writes them for every answer, too; name who answers "
                "(data.servers), take responses that are finished (data.responses), or let Outrider start the engine "
                "(target.engine.python)"
            )
        return self

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "recipe") -> Recipe:
        """Return the recipe that a mapping says; `where` names it in messages.

        Raises:
            BadInputError: an unknown or missing key, or a value of the wrong type; one line for each.
        """
        return validated(cls, _without_gone(values, printable_urls(where)), printable_urls(where))

    @property
    def output_folder(self) -> Path:
        return Path(self.output.replace("{name}", self.name)).expanduser()

    def to_yaml(self, **sections: Any) -> str:
        """Return the recipe with every default written out, and `sections` in place of its own; `load_recipe` reads it.

        Defaults of `drafter` are `heads.registry.with_defaults`' to tell, those of `training` are transformers'.
        """
        return yaml_text(self.model_dump(mode="json") | sections)


# Keys that earlier versions had: the value that meant "off", which every recipe.yaml of a run names, the last day
# that had them, and what to do instead. What was off is read without them, what was on is refused.
GONE: dict[str, tuple[object, str, str]] = {
    "joint": (
        None,
        "2026-11-28",
        "Fine-tune the target by itself (trl, peft), or name what joint training left: joint=null "
        "target.adapter=<output>/adapter",
    ),
    "data.verified": (0.0, "2026-11-28", "It brought nothing that could be measured: leave it out"),
}


def gone_and_off() -> dict[str, object]:
    """Return these keys, switched off: with them the recipe of a pair of that time is read."""
    return {path: off for path, (off, _, _) in GONE.items()}


def _without_gone(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a recipe's values without keys that went, and were off; BadInputError for one that was on."""
    for path, (off, last_day, advice) in GONE.items():
        section, _, key = path.rpartition(".")
        here = values.get(section) if section else values
        if not isinstance(here, dict) or key not in here:
            continue
        if here[key] != off:
            raise BadInputError(
                f"{where}: {path} is a key that Outrider had until {last_day}. {advice}; or use an Outrider of "
                "that day."
            )
        rest = {name: value for name, value in here.items() if name != key}
        values = values | {section: rest} if section else rest
    return values


_BOUNDS = {"greater_than_equal": ">=", "greater_than": ">", "less_than_equal": "<=", "less_than": "<"}
_EXPECTED = {
    "too_short": "at least one entry",
    "string_too_short": "some text",
    "string_pattern_mismatch": "at most 100 letters, digits, '.', '_' and '-'",
}


def validated(form: type[Form], values: object, where: str) -> Form:
    """Return what a mapping says, in the form. BadInputError: a line that begins with `where` for each fault."""
    try:
        return form.model_validate(as_mapping(form, values, where))
    except ValidationError as error:
        lines = [f"{where}: {_explain(form, e)}" for e in error.errors(include_url=False)]
        raise BadInputError("\n".join(lines)) from None


def as_mapping(form: type[BaseModel], values: object, where: str) -> dict[str, Any]:
    """Return what a file holds, if it is a mapping; BadInputError names the keys that were expected."""
    if isinstance(values, dict):
        return values
    found = "nothing" if values is None else f"a {type(values).__name__}"
    raise BadInputError(f"{where}: expected a mapping with the keys {', '.join(form.model_fields)}; found {found}.")


def _explain(form: type[BaseModel], error: Any) -> str:
    """Return one pydantic error as `data.limit: expected an integer or null, found 'many'`."""
    path = tuple(part for part in error["loc"] if part not in (_TEXT, _MAPPING))
    kind, context = error["type"], error.get("ctx", {})
    name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".") or "the whole file"
    if kind == "value_error":
        return f"{name}: {context['error']}."
    if kind in ("extra_forbidden", "invalid_key"):
        return f"unknown key {name}; {nearest_key(path, form)}"
    if kind == "missing":
        return f"{name} is missing; expected {in_words(_annotation(form, path))}."
    if kind in _BOUNDS:
        (bound,) = context.values()
        expected = f"a value {_BOUNDS[kind]} {bound}"
    else:
        expected = _EXPECTED.get(kind) or in_words(_annotation(form, path))
    text = printable_urls(repr(error["input"]))
    return f"{name}: expected {expected}, found {text if len(text) <= 80 else text[:77] + '...'}."


def _annotation(root: type[BaseModel], path: tuple[str | int, ...]) -> Any:
    """Return the declared type at a path of a form."""
    here: Any = root
    for part in path:
        forms = [a for a in alternatives(here) if a is not type(None)]
        form = next(filter(is_section, forms), forms[0])
        if part == "[key]":  # pydantic's name for the key itself
            here = str
        elif is_section(form):
            field = form.model_fields.get(str(part))
            here = field.annotation if field else Any
        else:
            here = get_args(form)[0] if get_origin(form) is list else Any
    return here


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, with constraints taken off."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(a for member in get_args(annotation) for a in alternatives(member))
    return (annotation,)


def nearest_key(path: tuple[str | int, ...], form: type[BaseModel] = Recipe) -> str:
    """Return the nearest known key: among its neighbours first, then one of that name elsewhere in the form."""
    key, parents = str(path[-1]), path[:-1]
    known = _known_keys(form)
    prefix = ".".join(part for part in parents if isinstance(part, str))
    if prefix and prefix not in known:
        return nearest_key(parents, form)
    siblings = [k for k in known if k.rpartition(".")[0] == prefix]
    for candidates in (siblings, known):
        names = {k.rpartition(".")[2]: k for k in reversed(candidates)}
        if near := difflib.get_close_matches(key, names, n=1, cutoff=0.6):
            return f"did you mean {names[near[0]]}?"
    return f"known keys here: {', '.join(k.rpartition('.')[2] for k in siblings)}."


def _known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every typed key of the recipe by dotted path, outermost first."""
    keys = [prefix + name for name in section.model_fields]
    for name, field in section.model_fields.items():
        forms = alternatives(field.annotation)
        entries = [a for form in forms if get_origin(form) is list for a in alternatives(get_args(form)[0])]
        for member in filter(is_section, [*forms, *entries]):
            keys += _known_keys(member, f"{prefix}{name}.")
    return keys
