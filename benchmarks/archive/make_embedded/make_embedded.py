"""Make the embedded target: a small causal LM trained on Python's own standard library.

    python -m benchmarks.make_embedded --work build/embedded                # all of it, about 90 CPU minutes
    python -m benchmarks.make_embedded --work build/embedded --steps 20     # a smoke test on a laptop

The work folder keeps the corpus, the tokenizer and checkpoints; a second call continues where the first stopped.
Nothing is downloaded: the corpus is the `.py` source of the interpreter that runs the script (PSF-2.0).

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import shutil
import sysconfig
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BODY_REQUEST = "Write the body of this function.\n\n"
TOPICS_FILE = "pydoc_data/topics.py"  # the `prose` domain: never trained on, so that a fine-tune on it is a real shift
SKIPPED = (
    "site-packages",
    "lib2to3/tests/data",
    "test/data",
    "bad_coding",
    "badsyntax",
    "encodings/cp",
    "encodings/mac_",
    "encodings/iso8859",
    "encodings/koi8",
    "_sysconfigdata",
    TOPICS_FILE,
)
SUITE_SIZE = 40


@dataclass(frozen=True)
class Settings:
    """One training run of the embedded target; saved as provenance beside the weights."""

    steps: int = 2700
    decay_fraction: float = 0.4
    warmup_steps: int = 80
    tokens_per_step: int = 6144
    short_length: int = 256  # most of the run; attention is 40% of the cost at 512
    long_length: int = 512
    short_fraction: float = 0.9
    muon_lr: float = 4e-3
    adamw_lr: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 0
    mix: tuple[float, float, float] = (0.50, 0.35, 0.15)  # library, tests, chat


# ---------------------------------------------------------------- corpus


def bucket(name: str) -> int:
    """A stable number in [0, 100) for a name: the split must not move when files are added."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100


def read_library(root: Path) -> dict[str, str]:
    """All usable `.py` files of the standard library, by path relative to `root`."""
    files = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in SKIPPED):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if (
            len(text) > 200
            and sum(c.isascii() for c in text) > 0.98 * len(text)
            and max(map(len, text.splitlines())) < 400
        ):
            files[name] = text
    return files


def is_test(name: str) -> bool:
    return any(part in ("test", "tests", "idle_test") or part.startswith("test_") for part in name.split("/"))


def is_held_out(name: str) -> bool:
    return not is_test(name) and bucket(name) < 6


@dataclass(frozen=True)
class Function:
    """A documented function: `head` is its signature and docstring, `body` what follows them (both dedented)."""

    head: str
    body: str


def documented_functions(source: str) -> list[Function]:
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        if (
            not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            or not ast.get_docstring(node)
            or len(node.body) < 2
        ):
            continue
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]))
        body = textwrap.dedent("\n".join(lines[node.body[0].end_lineno : node.end_lineno])).strip("\n")
        if 40 < len(head) < 900 and 30 < len(body) < 1500:
            found.append(Function(head, body))
    return found


@dataclass(frozen=True)
class Corpus:
    library: dict[str, str]
    tests: dict[str, str]
    held_out: dict[str, str]
    functions: list[Function]
    held_out_functions: list[Function]


def split_corpus(files: dict[str, str]) -> Corpus:
    library = {n: t for n, t in files.items() if not is_test(n) and not is_held_out(n)}
    held_out = {n: t for n, t in files.items() if is_held_out(n)}
    functions = [f for text in library.values() for f in documented_functions(text)]
    seen = {f.body for f in functions}
    held_out_functions = [f for text in held_out.values() for f in documented_functions(text) if f.body not in seen]
    return Corpus(library, {n: t for n, t in files.items() if is_test(n)}, held_out, functions, held_out_functions)


# ---------------------------------------------------------------- tokenizer


def train_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=4096, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL_TOKENS[1:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def chat_text(tokenizer: PreTrainedTokenizerFast, function: Function) -> str:
    messages = [
        {"role": "user", "content": BODY_REQUEST + function.head},
        {"role": "assistant", "content": function.body},
    ]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[np.ndarray]:
    end = tokenizer.eos_token_id
    return [np.array([*ids, end], dtype=np.int64) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


# ---------------------------------------------------------------- batches


class Stream:
    """Rows of tokens from documents shuffled anew every epoch; its whole state is two integers."""

    def __init__(self, documents: list[np.ndarray], seed: int):
        self.documents, self.seed = documents, seed
        self.epoch, self.position = 0, 0
        self._shuffle()

    def _shuffle(self) -> None:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.documents))
        self.tokens = np.concatenate([self.documents[i] for i in order])

    def row(self, length: int) -> np.ndarray:
        if self.position + length > len(self.tokens):
            self.epoch, self.position = self.epoch + 1, 0
            self._shuffle()
        row = self.tokens[self.position : self.position + length]
        self.position += length
        return row

    def state(self) -> list[int]:
        return [self.epoch, self.position]

    def restore(self, state: list[int]) -> None:
        self.epoch, self.position = state
        self._shuffle()


def next_batch(streams: list[Stream], settings: Settings, step: int) -> torch.Tensor:
    """The tokens of one step, `[B, T]`, rows drawn from the sources in the proportions of `settings.mix`."""
    length = settings.short_length if step < settings.short_fraction * settings.steps else settings.long_length
    rows = settings.tokens_per_step // length
    sources = np.random.default_rng((settings.seed, step, 1)).choice(len(streams), size=rows, p=settings.mix)
    return torch.from_numpy(np.stack([streams[s].row(length) for s in sources]))


# ---------------------------------------------------------------- training


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "eager"  # at these lengths 1.3x faster than SDPA on a CPU, forward and backward
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(
        matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def rate(step: int, settings: Settings) -> float:
    """Warm-up, constant, then linear decay to zero (so that a run can be lengthened before its decay)."""
    decay_start = settings.steps * (1 - settings.decay_fraction)
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    return 1.0 if step < decay_start else max(0.0, (settings.steps - step) / (settings.steps - decay_start))


def held_out_loss(model: LlamaForCausalLM, documents: list[np.ndarray], length: int, limit: int = 200_000) -> float:
    """Mean nats per token over consecutive windows of the held-out files."""
    tokens = np.concatenate(documents)[:limit]
    windows = torch.from_numpy(tokens[: len(tokens) // length * length].reshape(-1, length))
    model.eval()
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
        losses = [model(input_ids=w, labels=w).loss.item() * len(w) for w in windows.to(model.device).split(16)]
    model.train()
    return sum(losses) / len(windows)


def save_checkpoint(
    folder: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], state: dict
) -> None:
    scratch = folder.with_suffix(".tmp")
    scratch.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(scratch)
    torch.save([o.state_dict() for o in optimizers], scratch / "optimizers.pt")
    (scratch / "state.json").write_text(json.dumps(state))
    old = folder.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    scratch.rename(folder)
    if old.exists():
        shutil.rmtree(old)


def load_checkpoint(folder: Path, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]) -> dict:
    load_model(model, str(folder / "model.safetensors"))
    for optimizer, saved in zip(optimizers, torch.load(folder / "optimizers.pt", weights_only=True), strict=True):
        optimizer.load_state_dict(saved)
    return dict(json.loads((folder / "state.json").read_text()))


def backward(model: LlamaForCausalLM, tokens: torch.Tensor, rows_at_once: int = 6) -> float:
    """Add the gradients of the mean next-token loss on `tokens` `[B, T]`; returns it, in nats.

    The output embedding runs over a few rows at a time: all logits at once do not fit a CPU's cache.
    """
    with torch.autocast(model.device.type, torch.bfloat16):
        body: Any = model.model
        hidden = body(input_ids=tokens, use_cache=False).last_hidden_state
        leaf, total = hidden.detach().requires_grad_(), 0.0
        for part, wanted in zip(leaf[:, :-1].split(rows_at_once), tokens[:, 1:].split(rows_at_once), strict=True):
            loss = torch.nn.functional.cross_entropy(
                model.lm_head(part).flatten(0, 1).float(), wanted.flatten(), reduction="sum"
            )
            (loss / tokens[:, 1:].numel()).backward()
            total += loss.item()
    hidden.backward(leaf.grad)
    return total / tokens[:, 1:].numel()


def train(
    model: LlamaForCausalLM, streams: list[Stream], held_out: list[np.ndarray], settings: Settings, work: Path
) -> dict:
    """Train to `settings.steps`, writing a checkpoint every 200 steps; returns the final state (seconds, losses)."""
    optimizers = build_optimizers(model, settings)
    state: dict = {"step": 0, "seconds": 0.0, "history": [], "runs": []}
    checkpoint = work / "checkpoint"
    if checkpoint.exists():
        state = load_checkpoint(checkpoint, model, optimizers)
        for stream, saved in zip(streams, state["streams"], strict=True):
            stream.restore(saved)
    # A run may be lengthened before its decay ends; what the rate was is known only with every length it was given.
    state["runs"].append(
        {"from_step": state["step"], **{k: getattr(settings, k) for k in ("steps", "decay_fraction", "short_fraction")}}
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module: torch.nn.Module = model
    module.to(device).train()
    started, seconds = time.monotonic(), state["seconds"]
    for step in range(state["step"], settings.steps):
        tokens = next_batch(streams, settings, step).to(device)
        loss = backward(model, tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, base in zip(optimizers, (settings.muon_lr, settings.adamw_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * rate(step, settings)
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            print(
                f"step {step} loss {loss:.3f} rate {rate(step, settings):.2f} "
                f"{seconds + time.monotonic() - started:.0f}s",
                flush=True,
            )
        if (step + 1) % 200 == 0 or step + 1 == settings.steps:
            measured = held_out_loss(model, held_out, settings.long_length)
            state["history"].append({"step": step + 1, "held_out": round(measured, 4)})
            state |= {
                "step": step + 1,
                "seconds": seconds + time.monotonic() - started,
                "streams": [s.state() for s in streams],
            }
            print(f"step {step + 1} held-out {measured:.4f} nats/token", flush=True)
            save_checkpoint(checkpoint, model, optimizers, state)
    return state


# ---------------------------------------------------------------- prompts


def code_prompts(files: dict[str, str], count: int, salt: str) -> list[dict]:
    """Beginnings to continue: a stretch of a file that ends with the header of a function or class.

    The line break after it is left to the model: the tokenizer joins it with the indentation of the next line.
    """
    found = []
    for name, text in files.items():
        lines = text.splitlines(keepends=True)
        starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "class ")) and i >= 20]
        for i in sorted(starts, key=lambda i: bucket(f"{salt}{name}:{i}"))[: 2 + count // max(1, len(files))]:
            found.append(
                {"id": f"code/{name}:{i + 1}", "suite": "code", "text": "".join(lines[max(0, i - 24) : i + 1]).rstrip()}
            )
    return pick(found, count, salt)


def docs_prompts(functions: list[Function], count: int, salt: str) -> list[dict]:
    found = [
        {
            "id": f"docs/{hashlib.sha256(f.head.encode()).hexdigest()[:12]}",
            "suite": "docs",
            "messages": [{"role": "user", "content": BODY_REQUEST + f.head}],
        }
        for f in functions
    ]
    return pick(found, count, salt)


def prose_sections(held_out: bool) -> list[tuple[str, str]]:
    """`(topic, text)` of the language reference, as `help()` prints it; a third of the topics is held out."""
    return [(k, v) for k, v in sorted(topics.items()) if (bucket(k) < 33) == held_out and len(v) > 600]


def prose_prompts(held_out: bool, count: int, salt: str) -> list[dict]:
    found = []
    for topic, text in prose_sections(held_out):
        paragraphs = [p for p in text.split("\n\n") if len(p) > 80]
        for i in range(0, len(paragraphs) - 3, 3):
            found.append(
                {"id": f"prose/{topic}:{i}", "suite": "prose", "text": "\n\n".join(paragraphs[i : i + 2]).rstrip()}
            )
    return pick([f for f in found if len(f["text"]) < 1400], count, salt)


def pick(rows: list[dict], count: int, salt: str) -> list[dict]:
    """`count` different rows in an order that depends on their names alone."""
    unique = {json.dumps([r.get("text"), r.get("messages")]): r for r in rows}
    return sorted(unique.values(), key=lambda r: hashlib.sha256((salt + r["id"]).encode()).digest())[:count]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")


def write_prompts(corpus: Corpus, folder: Path) -> None:
    """The three suites (held out), training prompts for distillation, and the prose that a fine-tune learns."""
    write_jsonl(folder / "suites/code.jsonl", code_prompts(corpus.held_out, SUITE_SIZE, "eval"))
    write_jsonl(folder / "suites/docs.jsonl", docs_prompts(corpus.held_out_functions, SUITE_SIZE, "eval"))
    write_jsonl(folder / "suites/prose.jsonl", prose_prompts(True, SUITE_SIZE, "eval"))
    write_jsonl(folder / "prompts/code.jsonl", code_prompts(corpus.library, 600, "train"))
    write_jsonl(folder / "prompts/docs.jsonl", docs_prompts(corpus.functions, 600, "train"))
    write_jsonl(folder / "prompts/prose.jsonl", prose_prompts(False, 600, "train"))
    write_jsonl(folder / "texts/prose.jsonl", [{"id": f"prose/{k}", "text": v} for k, v in prose_sections(False)])


# ---------------------------------------------------------------- main


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, provenance: dict) -> None:
    # Both end a text: the first a document, the second a turn of a chat.
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"])
    model.config._attn_implementation = None
    module: torch.nn.Module = model
    module.to("cpu", torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints; kept between calls")
    parser.add_argument("--out", type=Path, help="where the finished target and prompts go (default: WORK/out)")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's own choice)")
    parser.add_argument("--prompts-only", action="store_true", help="write the prompt files and stop")
    arguments = parser.parse_args()

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    settings = Settings(steps=arguments.steps)
    out = arguments.out or arguments.work / "out"
    corpus = split_corpus(read_library(Path(sysconfig.get_paths()["stdlib"])))
    write_prompts(corpus, out)
    if arguments.prompts_only:
        return
    tokenizer = train_tokenizer(list(corpus.library.values()), arguments.work / "tokenizer")
    sources = [
        list(corpus.library.values()),
        list(corpus.tests.values()),
        [chat_text(tokenizer, f) for f in corpus.functions],
    ]
    streams = [Stream(encode_documents(tokenizer, texts), settings.seed + i) for i, texts in enumerate(sources)]
    held_out = encode_documents(tokenizer, list(corpus.held_out.values()))
    print("tokens:", [len(s.tokens) for s in streams], "held out:", sum(map(len, held_out)), flush=True)

    model = build_model(tokenizer, settings.seed)
    state = train(model, streams, held_out, settings, arguments.work)
    provenance = {
        "settings": asdict(settings),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "corpus": {
            "source": "Python standard library",
            "licence": "PSF-2.0",
            "library_files": len(corpus.library),
            "test_files": len(corpus.tests),
            "held_out_files": sorted(corpus.held_out),
            "chat_functions": len(corpus.functions),
            "tokens": [len(s.tokens) for s in streams],
            "epochs": [round(s.epoch + s.position / len(s.tokens), 2) for s in streams],
        },
        "tokens_trained": settings.steps * settings.tokens_per_step,
        "seconds": round(state["seconds"]),
        "device": str(next(model.parameters()).device),
        "threads": torch.get_num_threads(),
        "held_out_nats_per_token": state["history"][-1]["held_out"],
        "history": state["history"],
        "runs": state["runs"],
    }
    export(model, tokenizer, out / "target", provenance)


if __name__ == "__main__":
    main()
