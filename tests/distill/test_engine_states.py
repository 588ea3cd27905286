"""States of an engine are a plain forward's, or they are refused by the name of the fault, before anything is learnt.

The engine here is a server in this process that writes files as the connector does; tests/distill/test_real_engine.py
asks a real one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor

from outrider.common import BadInputError, IncompatibleError, digest_cache
from outrider.common.http_client import BadAnswerError
from outrider.common.server_process import without_launcher
from outrider.distill import FeatureStore
from outrider.distill.engine_checks import EngineRow, UntrustedStatesError, check_forward, check_next_token
from outrider.distill.engine_connector import (
    VERSION,
    EngineFacts,
    checkpoint_digest,
    quantization_of,
    require_plain,
    wait_for_room,
    write_states,
)
from outrider.distill.engine_live_states import LiveStates
from outrider.distill.engine_states import EngineStates
from outrider.distill.journal import Identity
from outrider.recipes import Recipe
from outrider.targets import Target, config_only
from outrider.targets.config_only import target_without_layers
from outrider.train import train

from ..closeness import assert_same
from ..conftest import make_llama
from ..train.conftest import losses, write_data
from .conftest import Server

LENGTHS = [17, 24, 9, 31, 12, 22, 14, 28]
TAPS = (2, 4, 6)  # the last one is the last state

Change = Callable[["StatesServer", dict[str, Any]], None]


@dataclass
class StatesServer(Server):
    """An engine with the connector: `written` are what a file will hold and the facts, which `change` may spoil."""

    folder: Path = Path()
    facts: EngineFacts | None = None
    change: Change = lambda server, written: None
    after: Callable[[Path], object] = lambda file: None  # what happens to a file that is there
    name: str = ""  # of several engines
    requests: int = 0
    fails: dict[int, int] = field(default_factory=dict)  # requests that are answered by an error, and its status
    last_written: dict[str, Any] = field(default_factory=dict)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/tokenize":
            return 200, {"tokens": self._tokens(body)}
        with self.lock:
            self.requests += 1
            if self.requests in self.fails:
                return self.fails[self.requests], {}
            return 200, self._written(body["prompt"], "prompt_logprobs" in body)

    def _written(self, tokens: list[int], probe: bool) -> dict[str, Any]:
        layers = self.target.num_layers
        norm = self.target.body.norm
        seen: list[Tensor] = []
        hook = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        with torch.no_grad():
            out = self.target.forward(torch.tensor([tokens]), taps=tuple(range(layers)))
        hook.remove()
        every = torch.cat([out.hidden[0], seen[0][0, :, None]], dim=1)  # [T, N + 1, H]
        said = out.logits[0].log_softmax(-1)
        assert self.facts is not None
        written = {
            "every": every,
            "hidden_states": every[:, sorted(self.facts.layers)],  # as vLLM does, whatever it was asked
            "token_ids": torch.tensor(tokens),
            "facts": self.facts,
            "normed": out.last[0],
        }
        self.change(self, written)
        file = self.folder / f"cmpl-{self.name}{self.requests}.safetensors"

        def write() -> None:
            write_states(file, written["hidden_states"], written["token_ids"], written["facts"])
            self.after(file)

        threading.Timer(0.01, write).start()  # after the answer, as the connector does
        self.last_written = written
        following = int(said[-1].argmax())
        told = [None, *({str(t): {"logprob": float(said[i, t])}} for i, t in enumerate(tokens[1:]))]
        choice = {"token_ids": [following], "logprobs": {"token_logprobs": [float(said[-1, following])]}}
        choice |= {"prompt_logprobs": told} if probe else {}
        return {"choices": [choice], "kv_transfer_params": {"hidden_states_path": f"/elsewhere/{file.name}"}}


@dataclass
class Lab:
    """A target on the disk, an engine of it, and a store of its states."""

    folder: Path
    server: StatesServer
    check: str = "auto"

    @property
    def target(self) -> Target:
        return target_without_layers(self.folder / "target", dtype="float32")

    @property
    def rows(self) -> Dataset:
        generator = torch.Generator().manual_seed(0)
        return Dataset.from_dict(
            {"input_ids": [torch.randint(5, 300, (n,), generator=generator).tolist() for n in LENGTHS]}
        )

    def recipe(self, **engine: Any) -> Recipe:
        values = {"url": self.server.url, "folder": str(self.server.folder), "timeout": 5, "check": self.check}
        target = {"path": str(self.folder / "target"), "dtype": "float32", "engine": {**values, **engine}}
        data = {"prompts": ["unused"], "features": "cached", "responses": "unused"}
        drafter = {"type": "eagle3"}
        return Recipe.from_dict(
            {"name": "t", "target": target, "drafter": drafter, "data": data, "output": str(self.folder / "run")}
        )

    def build(
        self, output: str = "features", dtype: str = "auto", taps: tuple[int, ...] = TAPS, **engine: Any
    ) -> FeatureStore:
        target, recipe = self.target, self.recipe(**engine)
        states = EngineStates.of_recipe(recipe, target, taps)
        size = 4 * 32 * 3 * 40  # three shards or so
        return FeatureStore.build(self.folder / output, target, self.rows, taps, dtype, shard_bytes=size, engine=states)


def plain_row(target: Target) -> EngineRow:
    """A row whose last state is any, before the norm."""
    tokens = torch.randint(5, 300, (20,), generator=torch.Generator().manual_seed(3))
    states = torch.randn(20, 3, target.hidden_size)
    facts = EngineFacts(VERSION, "first", (2, 4, 6), 6, "float32", "", "")
    return EngineRow(states, tokens, facts, next_token=0)


@pytest.fixture
def lab(tmp_path: Path, tiny_target: Target) -> Any:
    tiny_target.body.norm.weight.data.uniform_(0.5, 2.0)  # with ones a norm of a norm changes nothing
    tiny_target.model.save_pretrained(tmp_path / "target")
    tiny_target.require_tokenizer().save_pretrained(tmp_path / "target")
    spool = tmp_path / "spool"
    spool.mkdir()
    facts = EngineFacts(VERSION, "first", (2, 4, 6), 6, "float32", "", checkpoint_digest(tmp_path / "target"))
    server = StatesServer(tiny_target, folder=spool, facts=facts)
    server.start()
    yield Lab(tmp_path, server)
    server.stop()


@pytest.mark.parametrize("taps", [TAPS, (4, 2, 6)])
def test_a_store_of_an_engine_is_that_of_the_loaded_target(lab: Lab, taps: tuple[int, ...]) -> None:
    """Format and numbers, in the drafter's order; and nothing is left in the folder that the engine writes into."""
    own = FeatureStore.build(lab.folder / "own", Target.load(lab.folder / "target", device="cpu"), lab.rows, taps)
    made = lab.build(taps=taps)
    for index in range(len(LENGTHS)):
        for ours, theirs in zip(own.batch([index]), made.batch([index]), strict=True):
            assert_same(theirs, ours)
    assert not list(lab.server.folder.iterdir())
    asked = lab.server.requests
    lab.build(taps=taps)  # it is found again, and no engine is asked
    assert lab.server.requests == asked


def test_answers_of_the_targets_engine_are_found_again_and_none_but_those(lab: Lab) -> None:
    identity = Identity(lab.target.fingerprint(), "prompts", {"temperature": 0.0}, {"engine": "vllm"})
    assert identity.differences(identity.to_dict()) == []
    own = replace(identity, answered_by=None)
    assert own.differences(identity.to_dict()) == ["who answers (was the target's engine, is our own decoder)"]


def live(lab: Lab, taps: tuple[int, ...], **engine: Any) -> Any:
    """The context of states that are made meanwhile, of which three rows are announced before they are read."""
    target = lab.target
    states = EngineStates.of_recipe(lab.recipe(**engine), target, taps)
    assert states is not None
    return LiveStates(states, target, lab.rows, taps, ahead=3).running()


def test_states_are_made_before_their_rows_are_read_and_are_those_of_a_store(lab: Lab) -> None:
    """Of rows that were announced, in any order; one that is passed over, and one nobody announced, harm nothing."""
    made, order = lab.build(taps=(6, 4, 2)), [3, 0, 7, 5, 1, 6, 4]
    with live(lab, (6, 4, 2)) as states:
        compared = lab.server.requests
        positions = states.near((place, [row]) for place, row in enumerate(order))
        assert next(positions) == 0
        deadline = time.monotonic() + 10
        while lab.server.requests < compared + 4:
            assert time.monotonic() < deadline, "the next rows are not made meanwhile"
            time.sleep(0.01)
        for place in positions:  # the first one is passed over
            one, other = states.batch([order[place], 2]), made.batch([order[place], 2])
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not list(lab.server.folder.iterdir())


def test_a_fault_in_states_that_are_made_meanwhile_ends_the_training_by_its_name(lab: Lab) -> None:
    with live(lab, TAPS) as states:
        states.batch([0, 1])
        lab.server.change = cut(slice(1, None))
        positions = states.near((row, [row]) for row in range(2, 8))
        assert next(positions) == 2
        with pytest.raises(UntrustedStatesError, match="missing first token"):
            states.batch([2])


def test_losses_are_the_same_whether_states_are_stored_or_made_meanwhile(lab: Lab) -> None:
    """With evaluations in between, which read rows of their own; of packs, too."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(5, 300, (n,), generator=generator).tolist() for n in [*LENGTHS, *LENGTHS]]
    rows = [
        {"id": str(i), "suite": "s", "input_ids": t, "loss_mask": [0] * 4 + [1] * (len(t) - 4)}
        for i, t in enumerate(texts)
    ]
    data = write_data(lab.folder / "data", rows, lab.server.target)
    drafter = {"type": "eagle3", "steps": 2, "taps": [2, 4, 6]}
    training = {"max_steps": 10, "logging_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True}
    training |= {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 4}

    def learnt(name: str, features: str, **more: Any) -> list[float]:
        values = lab.recipe().model_dump() | {"drafter": drafter, "output": str(lab.folder / name)}
        values["training"] = training | more
        values["data"] |= {"responses": str(data), "features": features, "holdout": 0.2}
        train(Recipe.from_dict(values))
        return losses(Recipe.from_dict(values))

    stored = learnt("stored", "cached")
    assert len(stored) == 10
    assert learnt("live", "engine") == stored
    assert learnt("packed", "engine", packing=True) == learnt("packed-stored", "cached", packing=True)


def states(name: str, make: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda server, written: written.update({name: make(written)})


def facts(**values: Any) -> Change:
    return lambda server, written: written.update(facts=replace(written["facts"], **values))


def cut(part: slice) -> Change:
    def change(server: StatesServer, written: dict[str, Any]) -> None:
        written.update(hidden_states=written["hidden_states"][part], token_ids=written["token_ids"][part])

    return change


def stale_prefix(server: StatesServer, written: dict[str, Any]) -> None:
    written["hidden_states"] = written["hidden_states"].clone()
    written["hidden_states"][:4] = written["hidden_states"][-4:].clone()


def swapped(server: StatesServer, written: dict[str, Any]) -> None:
    if before := server.last_written:
        written.update(hidden_states=before["hidden_states"], token_ids=before["token_ids"])


def swapped_unsaid(server: StatesServer, written: dict[str, Any]) -> None:
    """Two rows' states are exchanged, and their tokens are not."""
    if server.requests > 3 and (before := server.last_written):
        count = min(len(before["every"]), len(written["every"]))
        mixed = written["hidden_states"].clone()
        mixed[-count:] = before["every"][-count:, [2, 4, 6]]
        written["hidden_states"] = mixed


def restarted(server: StatesServer, written: dict[str, Any]) -> None:
    if server.requests > 3:
        written["facts"] = replace(written["facts"], instance="second", weights="f" * 64)


def ended(server: StatesServer, written: dict[str, Any]) -> None:
    """It was started again, which is checked by three rows; and then a file of its first start appears."""
    if server.requests in (4, 5, 6, 7):
        written["facts"] = replace(written["facts"], instance="second")


def other_weights(server: StatesServer, written: dict[str, Any]) -> None:
    """The engine's files are the target's, and the weights in its memory are not."""
    other = Target(make_llama(vocab=server.target.vocab_size, seed=5)).forward(
        written["token_ids"][None], taps=(2, 4), logits=False
    )
    written["hidden_states"] = torch.cat([other.hidden[0], other.last[0][:, None]], dim=1)


def taps(*layers: int) -> Change:
    return states("hidden_states", lambda written: written["every"][:, list(layers)])


FAULTS: dict[str, tuple[str, Change]] = {
    "layer off by one": ("layer numbering", taps(3, 4, 6)),
    "layer off by one, as it says": ("layer numbering", facts(layers=(1, 3, 6))),
    "order of taps": ("order of taps", taps(4, 2, 6)),
    "order of taps, as it says": ("order of taps", facts(layers=(4, 2, 6))),
    "normed last state": (
        "normed last state",
        states("hidden_states", lambda w: torch.cat([w["every"][:, [2, 4]], w["normed"][:, None]], 1)),
    ),
    "bfloat16": ("precision", states("hidden_states", lambda w: w["hidden_states"].bfloat16())),
    "bfloat16 for float32": ("precision", states("hidden_states", lambda w: w["hidden_states"].bfloat16().float())),
    "a prefix cached away": ("cached prefix", cut(slice(4, None))),
    "a prefix of other states": ("cached prefix", stale_prefix),
    "a truncated row": ("truncated row", cut(slice(None, -2))),
    "fewer states than tokens": ("truncated row", states("hidden_states", lambda w: w["hidden_states"][:-1])),
    "another checkpoint": ("another checkpoint", facts(weights="0" * 64)),
    "other weights in memory": ("another checkpoint", other_weights),
    "a quantised target": ("quantised target", facts(quantization="fp8")),
    "a stale store": ("stale states", ended),
    "a missing first token": ("missing first token", cut(slice(1, None))),
    "two requests swapped": ("another request's states", swapped),
    "states swapped, tokens not": ("another checkpoint", swapped_unsaid),
    "restarted with other weights": ("engine restarted with other weights", restarted),
    "another connector": ("connector version", facts(version=VERSION + 1)),
    "numbers for tensors": (
        "altered file",
        lambda server, written: written.update(hidden_states=torch.tensor(1.0), token_ids=torch.tensor(1)),
    ),
    "an instance that is a list": ("altered file", facts(instance=["first"])),
    "layers that are lists": ("altered file", facts(layers=[[2], [4], [6]])),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_refused_by_name_before_training(lab: Lab, name: str) -> None:
    """No store comes about, and so no training."""
    fault, lab.server.change = FAULTS[name]
    with pytest.raises(UntrustedStatesError, match="refused") as refused:
        lab.build()
    assert refused.value.fault == fault
    assert not list(lab.folder.glob("features/*/features.json"))


@pytest.mark.parametrize(
    "name", [name for name, (fault, _) in FAULTS.items() if name not in ("layer off by one", "order of taps")]
)
def test_a_target_that_does_not_fit_is_checked_by_the_engines_own_logits(lab: Lab, name: str) -> None:
    """What is left are inner taps that another layer's states take the place of, in an engine that says otherwise."""
    lab.check, (fault, lab.server.change) = "logits", FAULTS[name]
    with pytest.raises(UntrustedStatesError) as refused:
        lab.build()
    assert refused.value.fault == fault


@pytest.mark.parametrize(
    "answer",
    [
        {"token_ids": [10**30]},
        {"token_ids": ["a"]},
        {"logprobs": {"token_logprobs": "abc"}},
        {"logprobs": {"token_logprobs": ["a"]}},
        {"prompt_logprobs": [None, {"5": {"logprob": [1]}}]},
    ],
)
def test_an_answer_of_other_types_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> None:
    plain = StatesServer._written

    def bent(self: StatesServer, tokens: list[int], probe: bool) -> dict[str, Any]:
        body = plain(self, tokens, probe)
        body["choices"][0] |= answer
        return body

    monkeypatch.setattr(StatesServer, "_written", bent)
    with pytest.raises(BadAnswerError, match="answers what cannot be used"):
        lab.build()


def test_a_next_token_that_the_target_does_not_have_is_refused(tiny_target: Target) -> None:
    with pytest.raises(UntrustedStatesError, match="another checkpoint"):
        check_next_token(tiny_target, replace(plain_row(tiny_target), next_token=2**31 - 1))


def test_another_template_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = lab.server.target.require_tokenizer()
    other = str(tokenizer.chat_template).replace("<|assistant|>{% endif %}", "{% endif %}")
    monkeypatch.setattr(tokenizer, "chat_template", other)
    with pytest.raises(UntrustedStatesError) as refused:
        lab.build()
    assert refused.value.fault == "another template"


def test_an_altered_file_and_one_that_never_comes_are_refused(lab: Lab) -> None:
    def alter(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)

    lab.server.after = alter
    with pytest.raises(UntrustedStatesError) as refused:
        lab.build()
    assert refused.value.fault == "altered file"
    lab.server.after = Path.unlink
    with pytest.raises(BadInputError, match=r"no hidden states are in .* Do this machine and the engine's see"):
        lab.build(timeout=0.3)


def contents(store: FeatureStore) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in store.folder.iterdir()}


def test_an_engine_that_fails_is_asked_again_and_the_store_is_the_same(lab: Lab) -> None:
    """Whatever is interrupted, whoever reads it cannot tell."""
    whole = lab.build("whole")
    asked = lab.server.requests
    lab.server.fails = {asked + 5: 500, asked + 8: 503}
    again = lab.build("again")
    assert contents(again) == contents(whole)
    assert lab.server.requests <= 2 * asked + 4  # not compared anew; of each failure a row may be asked for already
    assert lab.build("eighths", "float8_e4m3fn").precision.has_scale


@pytest.fixture
def second(lab: Lab) -> Any:
    """Another engine of the same target, which writes into the same folder."""
    assert lab.server.facts is not None
    facts = replace(lab.server.facts, instance="of the second")
    server = StatesServer(lab.server.target, folder=lab.server.folder, facts=facts, name="second-")
    server.start()
    server.lock = lab.server.lock  # they share a model
    yield server
    server.stop()


def test_two_engines_fill_one_store_and_one_of_them_may_die_and_come_back(lab: Lab, second: StatesServer) -> None:
    """The store is that of one engine; the one that is left does the work of both; a new start is compared again."""
    whole, urls = contents(lab.build("whole")), [lab.server.url, second.url]
    asked = lab.server.requests
    assert contents(lab.build("both", url=urls)) == whole
    assert lab.server.requests - asked + second.requests == len(LENGTHS) + 2 * 3
    assert min(lab.server.requests - asked, second.requests) > 3, "both have rows, not only the probes"

    port, before = second.port, second.requests

    def dies(file: Path) -> None:
        if second.requests == before + 4:
            threading.Thread(target=second.stop).start()

    second.after = dies
    assert contents(lab.build("left", url=urls)) == whole
    assert second.requests < before + 7

    second.after, second.change = lambda file: None, taps(3, 4, 6)
    second.start(port)
    second.lock = lab.server.lock
    lab.check = "logits"  # which cannot tell inner taps: but the other engine's are known
    with pytest.raises(UntrustedStatesError) as refused:
        lab.build("other", url=urls)
    assert refused.value.fault == "another checkpoint"


def test_a_row_without_room_for_the_engines_token_is_refused_before_any_work(lab: Lab) -> None:
    """The engine makes a token of each row, and no context has a place beyond its last one."""
    config = lab.folder / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": max(LENGTHS)}))
    with pytest.raises(BadInputError, match=f"{max(LENGTHS)} tokens, and the engine reads {max(LENGTHS) - 1} at most"):
        lab.build()
    assert lab.server.requests == 0


def test_a_request_that_the_engine_refuses_is_not_repeated(lab: Lab) -> None:
    lab.server.fails = {5: 400}
    with pytest.raises(BadInputError, match="HTTP status 400"):
        lab.build()
    assert lab.server.requests <= 6  # the next row may be asked for already


def test_an_engine_that_was_started_again_is_compared_again(lab: Lab) -> None:
    """By the same rows as at first; and from then on its states are right."""
    whole = contents(lab.build("whole"))
    asked = lab.server.requests

    def second(server: StatesServer, written: dict[str, Any]) -> None:
        if server.requests > asked + 5:
            written["facts"] = replace(written["facts"], instance="second")

    lab.server.change = second
    assert contents(lab.build("again")) == whole
    assert 2 * asked + 4 <= lab.server.requests <= 2 * asked + 5  # the next row may be asked for already


def test_an_engine_that_ended_before_it_wrote_is_known_before_the_time_is_over(lab: Lab) -> None:
    def ends(file: Path) -> None:
        file.unlink()
        threading.Thread(target=lab.server.stop).start()

    lab.server.after = ends
    began = time.monotonic()
    with pytest.raises(BadInputError, match="does not answer"):
        lab.build(timeout=600, start_seconds=0.1)
    assert time.monotonic() - began < 60


def test_only_states_are_removed_from_the_folder(lab: Lab) -> None:
    """Those of a run that was killed; a folder with weights in it is refused, and they stay."""
    left = lab.server.folder / "cmpl-9.safetensors"
    assert lab.server.facts is not None
    write_states(left, torch.zeros(2, 3, 32), torch.tensor([1, 2]), lab.server.facts)
    lab.build()
    assert not left.exists()
    for name in ("model.safetensors", "cmpl-1.safetensors"):
        foreign = lab.server.folder / name
        save_file({"weight": torch.ones(2)}, foreign)
        with pytest.raises(BadInputError, match="name a folder for states alone"):
            lab.build("other")
        assert foreign.exists()
        foreign.unlink()


def test_layers_that_change_little_are_still_told_apart(tiny_target: Target) -> None:
    """Each is within rounding of the next one, so only which one is nearest tells."""
    row = plain_row(tiny_target)
    every = range(tiny_target.num_layers)
    hidden = tiny_target.forward(row.token_ids[None], taps=tuple(every), logits=False).hidden[0]
    small = SimpleNamespace(
        device="cpu",
        num_layers=6,
        final_norm=tiny_target.final_norm,
        forward=lambda *_, **__: SimpleNamespace(
            hidden=(hidden[:, :1] + 1e-5 * (hidden - hidden[:, :1]))[None],
            last=tiny_target.final_norm(row.states[:, -1])[None],
        ),
    )
    near = small.forward().hidden[0]
    right = replace(row, states=torch.cat([near[:, [2, 4]], row.states[:, -1:]], 1))
    check_forward(small, right)  # type: ignore[arg-type]
    few = replace(right, states=right.states.clone())
    few.states[3] += 1  # a position that another expert computed
    check_forward(small, few)  # type: ignore[arg-type]
    shifted = replace(row, states=torch.cat([near[:, [3, 4]], row.states[:, -1:]], 1))
    with pytest.raises(UntrustedStatesError, match="layer numbering"):
        check_forward(small, shifted)  # type: ignore[arg-type]


def test_the_connector_refuses_what_its_files_do_not_say() -> None:
    """Overrides, adapters and replicas compute other states under the same digest of the files."""
    plain = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
        model_config=SimpleNamespace(hf_overrides={}),
        lora_config=None,
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    require_plain(plain)
    for changed, option in (
        ({"model_config": SimpleNamespace(hf_overrides={"rope_theta": 1.0})}, "--hf-overrides"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, "--data-parallel-size"),
        ({"cache_config": SimpleNamespace(enable_prefix_caching=True)}, "--no-enable-prefix-caching"),
    ):
        with pytest.raises(ValueError, match=option):
            require_plain(SimpleNamespace(**{**vars(plain), **changed}))


@pytest.mark.parametrize(
    ("checkpoint", "engine", "name"),
    [({"quant_method": "gptq"}, "auto_gptq", "gptq"), (None, "fp8", "fp8"), (None, None, ""),
     ({"quant_method": "mxfp4"}, "gpt_oss_mxfp4", "mxfp4")],
)  # fmt: skip
def test_quantisation_has_the_checkpoints_name(checkpoint: Any, engine: Any, name: str) -> None:
    """The engine's own names for the same weights differ."""
    config = SimpleNamespace(quantization_config=checkpoint)
    assert quantization_of(SimpleNamespace(hf_config=config, hf_text_config=config, quantization=engine)) == name


def test_a_server_of_a_launched_process_is_none_of_the_launch() -> None:
    launched = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0"}
    launched |= {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    kept = {"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": "0"}
    assert without_launcher(launched | kept | {"OMP_NUM_THREADS": "1"}) == kept
    assert without_launcher({"OMP_NUM_THREADS": "4"}) == {"OMP_NUM_THREADS": "4"}


def test_an_engine_waits_while_its_budget_of_disk_is_full(tmp_path: Path) -> None:
    """One file always has room, however large; more have not, until somebody reads. The connector's own takes none."""
    (tmp_path / "engine_connector.py").write_text("it lies beside them")
    assert wait_for_room(tmp_path, 10**12, budget=1)
    (tmp_path / "waiting.safetensors").write_bytes(b"0" * 100)
    assert wait_for_room(tmp_path, 50, budget=150)
    assert not wait_for_room(tmp_path, 51, budget=150, seconds=0.1)
    threading.Timer(0.2, (tmp_path / "waiting.safetensors").unlink).start()
    assert wait_for_room(tmp_path, 51, budget=150, seconds=10)


def test_a_target_without_layers_is_the_same_target(lab: Lab) -> None:
    """Embeddings, norm, logits and fingerprint; a pass, which it cannot make, is refused in a sentence."""
    whole, light = Target.load(lab.folder / "target", device="cpu"), lab.target
    tokens = torch.tensor([[3, 9, 4]])
    states = torch.randn(1, 3, 32)
    assert torch.equal(light.embed(tokens), whole.embed(tokens))
    assert torch.equal(light.lm_head(light.final_norm(states)), whole.lm_head(whole.final_norm(states)))
    assert light.fingerprint() == whole.fingerprint()
    assert sum(not p.is_meta for p in light.model.parameters()) == 3
    with pytest.raises(IncompatibleError, match="opened without its layers"):
        light.forward(tokens)


def test_a_fingerprint_is_kept_until_a_file_changes(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on does not read a large target again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(lab.folder / "cache"))
    monkeypatch.setattr(digest_cache, "_UNSETTLED", -1)
    made = lab.target.fingerprint()

    def reads(*_: Any) -> Any:
        raise AssertionError("it is read again")

    monkeypatch.setattr(config_only, "_whole_fingerprint", reads)
    assert lab.target.fingerprint() == made
    weights = lab.folder / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with pytest.raises(AssertionError, match="read again"):
        lab.target.fingerprint()
