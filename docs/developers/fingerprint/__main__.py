"""Print a fingerprint of what the package computes, so that two checkouts can be shown to compute the same bits.

    OMP_NUM_THREADS=1 .venv/bin/python docs/developers/fingerprint > before.json
    .venv/bin/python docs/developers/fingerprint --compare before.json after.json

Each case is a name and a digest of exact bits, with a few figures that help to read a difference. `--compare` lists
the cases that differ and exits with 1 if there are any; `--renamed OLD NEW` (regular expressions, as often as needed)
first gives the weights of the first file their new names. Sections run alone, too (`… fingerprint decode pure`).

Models, plans and trainings stand in cases.yaml. The package is used through the names in `PLACES`
(parts.py); a name that stands in none of its places is recorded as "missing: ...".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from parts import (
    TABLES,
    WITHOUT_WEIGHTS,
    Cases,
    Products,
    at,
    differences,
    digest,
    drafter_of,
    lasting,
    model,
    narrow_target,
    native_checkpoint,
    save,
)
from torch import Tensor, nn

NO_TREES = WITHOUT_WEIGHTS | {"plain", "dflash", "pard", "peagle"}
PROMPTS = [torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 9, 3)]
FEW = (3, 11, 50, 51)  # heads that keep the last 20 of 64 tokens have two of them


def sampling(drawn: str) -> Any:
    values = dict(TABLES["samplings"][drawn])
    few = values.pop("few", False)
    return at.Sampling(**values, suppress=tuple(token for token in range(64) if few and token not in FEW))


def generated(
    decoder: Any, prompts: list[list[int]], drawn: str, plan: dict[str, Any], new: int = 12, **more: Any
) -> str:
    """Return a digest of texts and rounds (which hold all that τ is counted from), with the rule that ran."""
    out = decoder.generate(prompts, new, sampling(drawn), at.Plan.from_dict(plan), **more)
    rounds = [[(one.drafted, one.accepted, one.emitted) for one in row] for row in out.rounds]
    return f"{digest([out.tokens, rounds])} {out.rule}{' lossy' * out.lossy}"


def multiplied(*settings: Any) -> str:
    """Return a digest of all products of matrices while `generated` runs, in whatever order they come."""
    with Products() as products:
        generated(*settings, new=5)
    return f"{digest(sorted(products.digests))} of {len(products.digests)}"


def decode(cases: Cases) -> None:
    """All drafters, shapes, rules and samplings; ragged together, alone, and in rounds of fixed shapes."""
    target, thorough = at.Target(model()), TABLES["thorough"]
    cases.add("decode/types of drafters", sorted(at.HEADS))
    for name in ("plain", *TABLES["drafters"]):
        drafter = None if name == "plain" else cases.note(f"decode/{name}/made", drafter_of, name, target)
        eager, static = (at.Decoder(target, drafter, static=fixed) for fixed in (False, True))
        for shape in ["chain"] if name.split()[0] in NO_TREES else TABLES["shapes"]:
            plan, rules = TABLES["shapes"][shape]
            rules = rules if " " not in name else rules[:1]  # further settings of a type need not run everything
            other = [drawn for drawn in TABLES["samplings"] if shape == "chain" or "all tokens" not in drawn]
            ways = [(rule, "T=1") for rule in rules] + [("auto", drawn) for drawn in other if drawn != "T=1"]
            ways += [("typical", "T=0")] if name in thorough else []
            for rule, drawn in ways:
                how, case = (drawn, plan | {"verify": rule}), f"decode/{name}/{shape}/{rule}/{drawn}"
                cases.note(f"{case}/together", generated, eager, PROMPTS, *how)
                if drawn in ("T=0", "T=0.8") or name in thorough:
                    cases.note(f"{case}/static", generated, static, PROMPTS, *how)
                if shape == "chain" and (drawn == "T=0" or rule == "coupled"):
                    cases.note(f"{case}/alone", generated, eager, PROMPTS[2:3], *how, sequence_ids=[2])
            for label, decoder in (("together", eager), ("static", static)):
                cases.note(f"decode/{name}/{shape}/products/{label}", multiplied, decoder, PROMPTS, "T=1", plan)
        if name in thorough:
            decode_lengths(cases, target, drafter, f"decode lengths/{name}")
    decode_families(cases)


def decode_lengths(cases: Cases, target: Any, drafter: Any, case: str) -> None:
    """Rounds whose depth is decided one by one, streams, and rows that do not speculate."""
    for (label, plan), drawn, fixed in product(TABLES["lengths"].items(), ("T=0", "T=1"), (False, True)):
        run = f"{case}/{label}/{drawn}/{'static' if fixed else 'together'}"
        cases.note(run, generated, at.Decoder(target, drafter, static=fixed), PROMPTS, drawn, plan)
    decoder, half = at.Decoder(target, drafter), [True, False, True, False]
    cases.note(f"{case}/half of the rows", generated, decoder, PROMPTS, "T=1", {}, speculate=half)
    events = decoder.stream(PROMPTS[2], 12, sampling("T=1"))
    cases.note(f"{case}/stream", lambda: [(one.tokens, one.accepted, one.drafted) for one in events])


def decode_families(cases: Cases) -> None:
    """Targets of other kinds, with drafters that were saved and loaded for them."""
    prompts, names = [PROMPTS[2] * 4, PROMPTS[0], PROMPTS[3] * 8], ("ngram", "draft_model", "eagle3", "medusa", "mtp")
    for (kind, values), name in product(TABLES["families"].items(), names):
        target, case = at.Target(model(kind, **values)), f"decode families/{kind}/{name}"
        with tempfile.TemporaryDirectory() as folder:
            settings = {"taps": [0, 1, 3]} if name == "eagle3" else {}
            if cases.note(f"{case}/saved", save, folder, name, target, settings) is None:
                continue
            drafter = cases.note(f"{case}/loaded", "load_drafter", folder, target)
        for shape, drawn in product(("chain", "static tree"), ("T=0", "T=1")):
            how = (at.Decoder(target, drafter), prompts, drawn, TABLES["shapes"][shape][0])
            cases.note(f"{case}/{shape}/{drawn}", generated, *how)
        cases.note(f"{case}/products", multiplied, *how)


def loss(cases: Cases) -> None:
    """Losses, metrics and gradients of every drafter that is trained; what each drafter saves, and reads again."""
    target = at.Target(model())
    for name in TABLES["drafters"]:
        for rule in TABLES["losses"] if name.split()[0] not in WITHOUT_WEIGHTS else ():
            cases.note(f"loss/{name}/{rule}", slopes, cases, f"loss/{name}/{rule}", target, name, rule)
        with tempfile.TemporaryDirectory() as folder:
            cases.note(f"saved/{name}/identity", save, folder, name, target)
            cases.files(f"saved/{name}", Path(folder))
            cases.note(f"saved/{name}/read again", lambda held, on: at.load_drafter(held, on).digest(), folder, target)


def slopes(cases: Cases, case: str, target: Any, name: str, rule: str | dict[str, float]) -> str:
    """Return the exact loss of a ragged batch and a digest of its gradients; record the metrics, too."""
    tokens = torch.randint(0, 64, (3, 14), generator=torch.Generator().manual_seed(1))
    supervised = torch.arange(14) >= torch.tensor([[0], [4], [7]])
    drafter = drafter_of(name, target).requires_grad_(True).train()
    drafter.config.loss = drafter.config.loss if rule == "own" else rule
    seen = target.forward(tokens, taps=drafter.taps)
    result = drafter(at.TargetBatch(target, tokens, supervised, seen.hidden, seen.last, 7))
    result.total.backward()
    gradients = sorted(digest(weight.grad) for weight in drafter.parameters() if weight.grad is not None)
    cases.add(f"{case}/metrics", sorted(f"{key} {digest(value)}" for key, value in result.metrics.items()))
    return f"{float(result.total.detach()).hex()} {digest([int(result.count), gradients])}"


def train(cases: Cases) -> None:
    """Two steps of each recipe for the embedded target, and variants, on a narrow one: there Muon is quick."""
    embedded, prefix = at.Target.load("embedded", dtype="float32", device="cpu"), "embedded-"
    cases.note("train/embedded target", lambda: str(embedded.fingerprint().digest))
    narrow, names = narrow_target(embedded), [name for name in at.packaged_recipes() if name.startswith(prefix)]
    runs = {name.removeprefix(prefix): [name.removeprefix(prefix)] for name in names} | TABLES["trainings"]
    runs["embedded target itself"] = ["self-speculative"]
    with tempfile.TemporaryDirectory() as root:
        for name, (recipe, *changes) in runs.items():
            target = embedded if "itself" in name else narrow
            asked = [*TABLES["small"], *(change.format(root=root) for change in changes), f"output={root}/{name}"]
            cases.note(f"train/{name}/losses", two_steps, cases, f"train/{name}", prefix + recipe, asked, target)


def two_steps(cases: Cases, case: str, recipe: str, asked: list[str], target: Any) -> str:
    """Return the exact loss of each pass of the drafter; record metrics, the log, the data and the weights, too."""
    passes: list[Any] = []

    def note(module: nn.Module, _: Any, result: Any) -> None:
        if isinstance(module, at.Drafter):
            passes.append((float(result.total.detach()).hex(), int(result.count), result.metrics))

    hook = nn.modules.module.register_module_forward_hook(note)
    try:
        trained = at.train(at.load_recipe(recipe, asked), target)
    finally:
        hook.remove()
    output = trained.drafter_folder.parent
    states = [json.loads(file.read_text()) for file in sorted(output.glob("checkpoints/*/trainer_state.json"))]
    logged = [lasting(entry) for state in states for entry in (*state["log_history"], trained.metrics)]
    rows = [list(row.values()) for row in datasets.load_from_disk(str(output / "data"))]
    for label, value in (("metrics", passes), ("log", [sorted(entry.items()) for entry in logged]), ("data", rows)):
        cases.add(f"{case}/{label}", digest(value))
    for folder in filter(None, (trained.drafter_folder, trained.adapter_folder)):
        cases.files(f"{case}/{folder.name}", folder)
    return " ".join(value for value, *_ in passes)


def export(cases: Cases) -> None:
    """Every drafter that an engine or a format takes: its files, what lint finds in them, and the drafter read back."""
    narrow = narrow_target(at.Target.load("embedded", dtype="float32", device="cpu"))
    cases.add("export/layouts", sorted(f"{to} {kind}" for to, layouts in at.LAYOUTS.items() for kind in layouts))
    with tempfile.TemporaryDirectory() as root:
        for (to, layouts), (kind, listed) in product(at.LAYOUTS.items(), TABLES["exported"].items()):
            for number, settings in enumerate(listed if kind in layouts else []):
                exported(cases, narrow, Path(root, f"{to} {kind} {number}"), kind, settings)
        native = native_checkpoint(Path(root, "native"))
        target = at.Target.load(native, dtype="float32", device="cpu")
        for to in ("vllm", "sglang"):
            exported(cases, target, Path(root, f"{to} mtp"), "mtp", {"init": "native", "path": str(native)})


def exported(cases: Cases, target: Any, folder: Path, kind: str, settings: dict[str, Any]) -> None:
    """Record one drafter's export into `folder`, whose name begins with the engine's."""
    case, to = f"export/{folder.name}", folder.name.split()[0]

    def write() -> str:
        return str(at.export_drafter(drafter_of(kind, target, settings), target, to, folder, 3).layout)

    if cases.note(f"{case}/layout", write) is not None:
        cases.files(case, folder)
        cases.note(f"{case}/lint", lambda: [(one.check, one.is_fault) for one in at.lint(folder)])
        cases.note(f"{case}/read back", lambda: at.import_drafter(folder, target).digest())


def pure(cases: Cases) -> None:
    """Rules, randomness, divergences, attention and statistics, on scripted inputs."""
    for seed in range(8):
        judged(cases, seed)
    for name in (*at.DIVERGENCES, "hard_ce", "jsd(0.1)", "lk_hybrid(10)"):
        for kept in (None, torch.arange(0, 30, 2)):
            cases.note(f"pure/compared/{name}/{'whole' if kept is None else 'pruned'}", compared, name, kept)
    for way, dtype, own, packed in product(("attend", "plain"), ("float32", "bfloat16"), (0, 2), (False, True)):
        case = f"pure/{way}/{dtype}, {own} further steps, {'packed' if packed else 'whole'} rows"
        cases.note(case, attended, way, getattr(torch, dtype), own, packed)
    rows, places = torch.tensor([[0], [1], [2**40], [-1]]), torch.arange(5)
    for seed, stream in product((0, -1, 2**63 - 1), (1, 4)):
        cases.note(f"pure/uniforms/seed {seed}, stream {stream}", "uniforms", seed, stream, rows, places)
    cases.note("pure/shared_gumbel", "shared_gumbel", 3, rows, places, 11)
    for nodes in (1, 4, 9):
        cases.note(f"pure/best_tree/{nodes}", "best_tree", [[0.8, 0.3, 0.1], [0.6, 0.25], [0.5, 0.2], [0.4]], nodes)


def judged(cases: Cases, seed: int) -> None:
    """Record what each rule makes of random drafts: of one row p = q, and rows propose different numbers."""
    generator, size = torch.Generator().manual_seed(seed), (3, 6)
    p, q = (torch.randn(3, 7, 7, generator=generator).mul(2).softmax(-1) for _ in range(2))
    tokens, wanted = torch.randint(0, 7, size, generator=generator), torch.randint(0, 7, (3, 7), generator=generator)
    q[0], wanted[0, :4] = p[0], tokens[0, :4]
    draws = [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in (size, (3,))]
    parents = torch.tensor([[-1, -1, 0, 0, 1, 2], [-1, 0, 1, -1, 3, 3], [-1, -1, -1, 0, 1, 2]])
    lengths, real = torch.tensor([6, 3, 0]), torch.arange(6) < torch.tensor([[6], [4], [5]])
    logits = 3 * torch.randn(3, 6, 40, generator=generator)
    inputs = dict.fromkeys(("rejection", "block"), (tokens, lengths, p, q[:, :6], *draws))
    inputs |= dict.fromkeys(("without_replacement", "traversal"), (tokens, parents, real, p, q, *draws, 3))
    inputs |= {"match": (tokens, lengths, wanted), "match_tree": (tokens, parents, real, wanted, 3)}
    inputs |= {"typical": (tokens, parents, real, p, 3), "draw": (p[:, :6], draws[0])}
    inputs |= {"probabilities": (logits, at.Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01))}
    inputs |= {"penalize": (logits, logits > 1, at.Sampling(1.0, repetition_penalty=1.3))}
    for name, values in inputs.items():
        cases.note(f"pure/{name}/seed {seed}", name, *values)


def compared(name: str, kept: Tensor | None) -> list[Any]:
    """Return a divergence of random logits, directly and in chunks, with gradients."""
    torch.manual_seed(5)
    hidden = torch.randn(40, 8)
    drafted = torch.randn(2, 40, 6).requires_grad_()
    weights = torch.rand(2, 40)
    theirs, own = torch.randn(8, 30), torch.randn(6, 30 if kept is None else len(kept)).requires_grad_()
    following, rule = torch.randint(0, 30, (40,)), at.divergence(name)
    heads = (lambda states: states @ theirs, lambda states: states @ own)
    settings = at.ComparisonSettings(*heads, rule, kept, [own], 16)
    result = at.chunked_compare(hidden, drafted, settings, weights, following)
    direct = rule(at.Reference.of(hidden @ theirs, kept, following), (drafted[0] @ own).log_softmax(-1))
    figures = [getattr(result, figure) for figure in ("total", "loss", "alpha", "top1")]
    return [*figures, direct, *torch.autograd.grad(result.total, [drafted, own])]


def attended(way: str, dtype: torch.dtype, own: int, packed: bool) -> list[Tensor]:
    """Return what unrolled attention gathers of random inputs, of rows of one text or of several, and gradients."""
    torch.manual_seed(1)
    sizes = [33, 40, 40] + [33] * 2 * own
    inputs = [torch.randn(2, n, 2, 8).transpose(1, 2).to(dtype).requires_grad_() for n in sizes]
    texts = [(0, slice(0, 12), 2, slice(0, 9)), (0, slice(12, 40), 3, slice(9, 30)), (1, slice(0, 40), 7, slice(0, 33))]
    q, keys, values, *rest = inputs
    spans = [at.Span(*text) for text in texts] if packed else None
    result = getattr(at, way)(q, (keys, values), (0, 7), list(zip(rest[::2], rest[1::2], strict=True)), spans)
    result = torch.cat([result[0, :, :30], result[1]], 1)  # of packed rows, the others mean nothing
    return [result, *torch.autograd.grad(result.float().square().sum(), inputs)]


def cli(cases: Cases) -> None:
    """The verbs of the command, and of the lab."""
    command, environment = str(Path(sys.executable).with_name("outrider")), os.environ | {"TERM": "dumb"}
    for case, group in (("cli/verbs", []), ("cli/lab verbs", ["lab"])):
        asked = [command, *group, "--help"]
        shown = subprocess.run(asked, capture_output=True, text=True, env=environment, check=False)
        cases.add(case, re.findall(r"^│ ([a-z][a-z-]*) ", shown.stdout, re.MULTILINE) or "missing: verbs in --help")


SECTIONS = {"decode": decode, "loss": loss, "train": train, "export": export, "pure": pure, "cli": cli}


def take(names: Sequence[str]) -> dict[str, Any]:
    """Return the fingerprint's sections of these names, and the conditions under which others compare with it."""
    torch.set_num_threads(1)
    cases = Cases()
    for name in names:
        began, before = time.process_time(), len(cases.results)
        with redirect_stdout(sys.stderr):
            cases.note(f"{name} runs", SECTIONS[name], cases)
        spent = time.process_time() - began
        print(f"{name}: {len(cases.results) - before} cases, {spent:.0f} s of the processor", file=sys.stderr)
    conditions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"conditions": conditions | {"cpu": torch.backends.cpu.get_cpu_capability()}, "cases": cases.results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; all, if none is named")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--renamed", nargs=2, action="append", default=[], metavar=("OLD", "NEW"))
    options = parser.parse_args()
    if options.compare is None:
        print(json.dumps(take(options.sections or list(SECTIONS)), indent=1))
        return 0
    before, after = (json.loads(file.read_text(encoding="utf-8")) for file in options.compare)
    listed = list(differences(before["cases"], after["cases"], options.renamed))
    if before["conditions"] != after["conditions"]:
        listed.insert(0, f"taken under other conditions: {before['conditions']}, {after['conditions']}")
    print("\n".join(listed) or f"all {len(before['cases'])} cases are the same")
    return 1 if listed else 0


if __name__ == "__main__":
    sys.exit(main())
