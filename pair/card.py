"""The model card of a registry on the Hub: the newest version of each of its pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from huggingface_hub import EvalResult

from ..eval.model_card import CardTarget, model_card, portable_command, results_of, serving
from ..eval.reports.tables import markdown_text
from .manifest import Manifest


def registry_card(repository: str, manifests: Sequence[Manifest], earlier: str = "") -> str:
    """Return the card of a repository of pairs, in the place of an earlier one; see `eval.model_card`."""
    bases = {base for manifest in manifests if (base := _target(manifest).hub_id) is not None}
    body = [f"# {repository.rpartition('/')[2]}", ""]
    for manifest in manifests:
        body += _section(repository, manifest)
    results = [result for manifest in manifests for result in _results(manifest)]
    drafters = sorted({manifest.drafter.type for manifest in manifests})
    return model_card("\n".join(body), repository, drafters, sorted(bases), results, earlier)


def _suites(manifest: Manifest) -> str:
    return ", ".join(manifest.measurements.suites)


def _results(manifest: Manifest) -> Iterator[EvalResult]:
    for line in manifest.measurements.headline:
        of = f" of {manifest.name} at temperature {line.temperature:g}"
        yield from results_of({"tau": line.tau.value, "speedup": line.speedup.value}, _suites(manifest), of)


def _target(manifest: Manifest) -> CardTarget:
    source, fingerprint = manifest.target.source, manifest.target.fingerprint
    return CardTarget(source.path, bool(source.adapter), fingerprint.digest, markdown_text(fingerprint.dtype))


def _section(repository: str, manifest: Manifest) -> list[str]:
    """Return a pair in lines of Markdown. Whatever is a name or a text in it may be a stranger's."""
    target, made_by = _target(manifest), f"Outrider {markdown_text(manifest.outrider_version)}"
    return [
        f"## {markdown_text(manifest.name)} version {manifest.version}",
        "",
        f"{target.sentence(markdown_text(manifest.drafter.type))} The two are one pair, made by {made_by} "
        f"({markdown_text(manifest.lineage.reason)}), which drafts by {manifest.plan.restored()}.",
        "",
        *_figures(manifest),
        "",
        "Take it, as one folder that is checked byte for byte. `outrider train pair/recipe.yaml` makes such a drafter "
        "again.",
        "",
        "```sh",
        f"outrider pair pull {manifest.name}@{manifest.version} pair --registry hf://{repository}",
        "```",
        "",
        *serving(manifest.drafter.type, target, manifest.plan.depth),
    ]


def _figures(manifest: Manifest) -> list[str]:
    """Return τ and speedup with what they hold for; the sentence that there are none."""
    lines = manifest.measurements.headline
    if not lines:
        return ["**Not measured**: this version came without a report, so neither τ nor a speedup is known."]
    said = manifest.measurements.conditions
    batch, limit, command = (said.get(name) for name in ("batch_size", "max_new_tokens", "command"))
    where = markdown_text(f"{said.get('device_name')}, {said.get('dtype')}, batch size {batch}")
    told = [
        *(
            f"- temperature {line.temperature:g}: τ {line.tau.text('not known')}, speedup "
            f"{line.speedup.text('not known')} (rule {markdown_text(line.rule)}, {line.num_prompts} prompts)"
            for line in lines
        ),
        "",
        "τ is the mean number of tokens emitted per round, with the target's own; the speedup is over the plain target "
        f"in the same engine and run. Measured on {markdown_text(_suites(manifest))}, up to {limit} new tokens each: "
        f"{where}.",
    ]
    if isinstance(command, str) and (again := markdown_text(portable_command(command))):
        told += ["", "```sh", again, "```"]
    return told
