"""States of an engine are a plain forward's, or they are refused by the name of the fault, before anything is learnt.

The engine here is a server in this process that writes files as the connector does; tests/distill/test_real_engine.py
asks a real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from outrider.common import BadInputError, IncompatibleError
from outrider.distill import FeatureStore
from outrider.distill.engine_checks import UntrustedStatesError
from outrider.distill.engine_connector import VERSION, EngineFacts, checkpoint_digest, wait_for_room, write_states
from outrider.distill.engine_states import EngineStates
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.targets.without_layers import target_without_layers

from ..conftest import make_llama
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
    requests: int = 0
    fails: set[int] = field(default_factory=set)  # requests that are answered by an error
    last_written: dict[str, Any] = field(default_factory=dict)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/tokenize":
            return 200, {"tokens": self._tokens(body)}
        with self.lock:
            self.requests += 1
            if self.requests in self.fails:
                return 500, {}
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
            "hidden_states": every[:, list(self.facts.layers)],
            "token_ids": torch.tensor(tokens),
            "facts": self.facts,
            "normed": out.last[0],
        }
        self.change(self, written)
        file = self.folder / f"cmpl-{self.requests}.safetensors"
        write_states(file, written["hidden_states"], written["token_ids"], written["facts"])
        self.after(file)
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
        data = {"prompts": ["unused"], "features": "cached"}
        drafter = {"type": "eagle3"}
        return Recipe.from_dict(
            {"name": "t", "target": target, "drafter": drafter, "data": data, "output": str(self.folder / "run")}
        )

    def build(self, output: str = "features", dtype: str = "auto", **engine: Any) -> FeatureStore:
        target, recipe = self.target, self.recipe(**engine)
        states = EngineStates.of_recipe(recipe, target, TAPS)
        size = 4 * 32 * 3 * 40  # three shards or so
        return FeatureStore.build(self.folder / output, target, self.rows, TAPS, dtype, shard_bytes=size, engine=states)


@pytest.fixture
def lab(tmp_path: Path, tiny_target: Target) -> Any:
    tiny_target.body.norm.weight.data.uniform_(0.5, 2.0)  # with ones a norm of a norm changes nothing
    tiny_target.model.save_pretrained(tmp_path / "target")
    tiny_target.require_tokenizer().save_pretrained(tmp_path / "target")
    spool = tmp_path / "spool"
    spool.mkdir()
    facts = EngineFacts(
        VERSION, "0", "first", (2, 4, 6), 6, "float32", "", checkpoint_digest(tmp_path / "target"), False, False
    )
    server = StatesServer(tiny_target, folder=spool, facts=facts)
    server.start()
    yield Lab(tmp_path, server)
    server.stop()


def test_a_store_of_an_engine_is_that_of_the_loaded_target(lab: Lab) -> None:
    """Format and numbers; and nothing is left in the folder that the engine writes into."""
    own = FeatureStore.build(lab.folder / "own", Target.load(lab.folder / "target", device="cpu"), lab.rows, TAPS)
    made = lab.build()
    for index in range(len(LENGTHS)):
        for ours, theirs in zip(own.batch([index]), made.batch([index]), strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    assert not list(lab.server.folder.iterdir())
    asked = lab.server.requests
    lab.build()  # it is found again, and no engine is asked
    assert lab.server.requests == asked


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
    if server.requests > 2 and (before := server.last_written):
        count = min(len(before["every"]), len(written["every"]))
        mixed = written["hidden_states"].clone()
        mixed[-count:] = before["every"][-count:, [2, 4, 6]]
        written["hidden_states"] = mixed


def restarted(server: StatesServer, written: dict[str, Any]) -> None:
    if server.requests > 3:
        written["facts"] = replace(written["facts"], instance="second", weights="f" * 64)


def ended(server: StatesServer, written: dict[str, Any]) -> None:
    """It was started again, which is checked by two rows; and then a file of its first start appears."""
    if server.requests in (4, 5, 6):
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
    lab.server.fails = {lab.server.requests + 3, lab.server.requests + 6}
    again = lab.build("again")
    assert contents(again) == contents(whole)
    assert lab.build("eighths", "float8_e4m3fn").precision.has_scale


def test_an_engine_waits_while_its_budget_of_disk_is_full(tmp_path: Path) -> None:
    """One file always has room, however large; more have not, until somebody reads."""
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
