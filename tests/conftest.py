"""Shared fixtures: tiny real models with random weights, a tiny real tokenizer, and no network."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Read once, at import, by the libraries: so they stand above their imports. Subprocesses of tests inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OUTRIDER_TEST_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", os.environ["OUTRIDER_TEST_THREADS"])
os.environ.setdefault("WANDB_MODE", "offline")
# The others are written for a CPU: training would move what they share to a GPU. (Workers inherit what was decided
# here.)
if "PYTEST_XDIST_WORKER" not in os.environ and not any("gpu" in argument.split() for argument in sys.argv[1:]):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.decode import Sampling
from outrider.heads import HEADS, Drafter, drafter_config
from outrider.targets import RaggedCache, Target

from .closeness import computing_in

TEXT = [
    "def add(first, second):\n    return first + second\n",
    "for name in sorted(names):\n    print(name, len(name))\n",
    "The target verifies what the drafter proposes, and the text stays the same.\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
] * 4

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, metavar="N", help="of each test's parameters, run at most N")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark as slow what a module's `SLOW` names; keep a sample of what other plugins left, if one is asked for."""
    for item in items:
        if isinstance(item, pytest.Function) and (slow := getattr(item.module, "SLOW", ())):
            values = item.callspec.params.values() if hasattr(item, "callspec") else ()
            if any(value in slow for value in values if isinstance(value, str)):
                item.add_marker(pytest.mark.slow)
    yield
    if config.option.sample:
        kept = sample(items, config.option.sample)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def sample(items: Sequence[pytest.Item], most: int) -> set[pytest.Item]:
    """Return `most` items of each test, or all that it has: always the same, whatever rows its table gains elsewhere.

    The checksum of an item's name decides, so that a sample crosses all columns of a table of parameters.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {item for own in tests.values() for item in sorted(own, key=lambda i: zlib.crc32(i.nodeid.encode()))[:most]}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models run fastest on one thread, and sums are made in one order; two stand for other machines.

    A forked process has one: OpenMP's threads do not live on there, and waiting for them crashes or never ends.
    """
    torch.set_num_threads(int(os.environ["OUTRIDER_TEST_THREADS"]))
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


@pytest.fixture(scope="session", autouse=True)
def forkable() -> None:
    """Let autograd count devices now: it does so at its first pass, and starts a thread for each.

    Under fake tensors a CUDA build counts one that is not there.
    """
    torch.ones((), requires_grad=True).backward()


@pytest.fixture(scope="session", autouse=True)
def frozen() -> None:
    """Let searches for cycles pass over what is there now: each training makes one, of all libraries' objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Let Ctrl-C and SIGHUP interrupt what the tests start.

    A shell starts background jobs with Ctrl-C ignored, and `nohup` its command with SIGHUP ignored; so would everything
    that the tests start and interrupt.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """A connection to anything but this machine is an error, at once."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"tests have no network: {address[0]} was asked for")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_only)
        yield


@pytest.fixture(autouse=True)
def precision(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The floats of a test, and of the fixtures that are its own: float32, or what `closeness` has it tried in."""
    dtype = getattr(request, "param", torch.float32)
    with computing_in(dtype):
        yield dtype


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[RaggedCache]]]:
    """Of all caches made meanwhile, during which Python does not search for cycles."""
    found: list[weakref.ref[RaggedCache]] = []
    begin = RaggedCache.__init__

    def noted(self: RaggedCache, *arguments: Any, **named: Any) -> None:
        found.append(weakref.ref(self))
        begin(self, *arguments, **named)

    monkeypatch.setattr(RaggedCache, "__init__", noted)
    gc.disable()
    yield found
    gc.enable()


def place_of(variable: str, what: str) -> Path:
    """Return the path that an environment variable holds: the `served` group is for those who have an engine."""
    found = os.environ.get(variable)
    if not found:
        pytest.fail(f"{variable} must name {what}; see CONTRIBUTING.md.")
    return Path(found)


def make_llama(layers: int = 6, hidden: int = 32, vocab: int = 64, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    values: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # wide enough that no two tokens tie for the first place
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**values | changes)).eval().requires_grad_(False)


def drafter_in_training(target: Target, values: dict[str, Any]) -> Drafter[Any]:
    """Return a new drafter, as the section of a recipe says, without weights that are zero.

    Some begin so, and would hide what they read.
    """
    torch.manual_seed(3)
    drafter_class, config = drafter_config(values)
    drafter = drafter_class.build(config, target, torch.arange(target.vocab_size)).float().train()
    for parameter in drafter.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape)
    return drafter


def installed(table: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a table by drafters whose package is there: the lab's may be missing."""
    return {name: row for name, row in table.items() if name.split()[0] in HEADS}


ALL_TOKENS = tuple(range(64))
FEW_TOKENS = (3, 50, 51)  # heads that keep the last 20 of 64 tokens have two of them


def few(tokens: Sequence[int] = FEW_TOKENS, **settings: Any) -> Sampling:
    """Let only these of 64 tokens be written: of so few, random drafters are often right.

    Of all 64 they are almost never, and what follows an accepted draft would go unseen. But texts of few tokens repeat
    themselves, and hide what reads a wrong place: such tests are run with all tokens, too.
    """
    return Sampling(suppress=tuple(token for token in ALL_TOKENS if token not in tokens), **settings)


def best_of_few(
    logits: torch.Tensor, token_ids: torch.Tensor | None = None, tokens: Sequence[int] = FEW_TOKENS
) -> torch.Tensor:
    """Return the most probable of the tokens that `few` leaves: `[...]` target ids of logits `[..., V']`."""
    ids = torch.arange(logits.shape[-1]) if token_ids is None else token_ids
    return ids[logits.masked_fill(~torch.isin(ids, torch.tensor(tokens)), float("-inf")).argmax(-1)]


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """`tiny_llama(layers=6, hidden=32, vocab=64, seed=0, **config)`: a new random Llama, fp32, without an end token."""
    return make_llama


def byte_level_bpe(special: list[str], texts: Iterable[str]) -> Any:
    """Return a byte-level BPE of 320 entries that learned from `texts`; it can write any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 entries, with a chat template that marks what the assistant says.

    It can write any text.
    """
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(special, TEXT),
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=special[2:],
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture
def tiny_target(tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    """A new 6-layer random Llama with `tiny_tokenizer`; it ends at `<|end|>`."""
    model = make_llama(
        vocab=len(tiny_tokenizer), eos_token_id=tiny_tokenizer.eos_token_id, pad_token_id=tiny_tokenizer.pad_token_id
    )
    return Target(model, tiny_tokenizer)
