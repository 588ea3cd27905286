"""The forms of others: each written from a `Passport`, and read back as `Claims`.

The layouts are from their own sources:

- ModelOpt's `speculation_profile.json`, schema 1.0: `examples/specdec_bench/specdec_bench/speculation_profile.py` of
  NVIDIA/Model-Optimizer at edf879d3daf7879acdeb2dab9f54a591837da7b0, the branch of its open pull request 2247.
- InferenceX's golden YAML: `golden_al_distribution/` of SemiAnalysisAI/InferenceX at
  843c6254ff69b567f772f6a5fd97675af3d04431.
- SPEED-Bench's matrix, `specbench_results.json`: `specdec_bench/metrics/acceptance_rate.py` and `specbench.py` of
  NVIDIA/Model-Optimizer at a2fbac7bad8ab446d3f8783dadb0c3366eb0ad73.
- vLLM's per-request metrics: `docs/features/speculative_decoding/acceptance_metrics.md` of vllm-project/vllm at
  02cf515f0b62e6fc36d5ff8fb9b486a30e8dbe08.
- The Hub's model card: metadata as `huggingface_hub` writes and reads it.

MLPerf defines no file of acceptance, and trtllm-bench derives its figures from iterations that a report does not hold
(`tensorrt_llm/bench/dataclasses/reporting.py`), so neither has a form here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..common import BadInputError
from ..common.untrusted_files import Unreadable, parse_json, parse_yaml, read_text, yaml_text
from ..eval.reports.figures import PromptRecord
from ..eval.reports.tables import markdown_text
from .claims import Claims
from .passport import Passport, conditional, histogram_of, survival

# Methods whose K drafts are the first K of K + 1, so that one measurement tells the lengths of all below.
_CHAIN_METHODS = ("eagle1", "eagle3", "draft_model", "mtp")
_MOST_LINES = 20_000  # of a file of requests, each checked for itself


@dataclass(frozen=True)
class PassportForm:
    """One form: its file's usual name, how it is written, and what one part of such a file claims, if it is one."""

    file: str
    write: Callable[[Passport], str]
    read: Callable[[Any], Sequence[dict[str, Any]]]


def read_claims(file: Path) -> list[Claims]:
    """Return what a file in any of the forms claims.

    Raises:
        BadInputError: it cannot be read, or is in none of them.
    """
    readers = [form.read for form in FORMS.values() if Path(form.file).suffix == file.suffix]
    found = []
    try:
        for place, values in _parts(file):
            if isinstance(values, dict) and values.get("measured") is False:
                raise BadInputError(
                    f"{file}{place}: is a placeholder (measured: false), and says nothing of a drafter."
                )
            claimed = next(filter(None, (read(values) for read in readers)), [])
            found += [Claims(**{"tolerance": 0.001} | c | {"where": c["where"] + place}) for c in claimed]
    except Unreadable as error:
        raise BadInputError(f"{error} It is in none of the forms that can be checked.") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = error.errors()[0] if isinstance(error, ValidationError) else None
        said = f"{type(error).__name__}: {error}" if what is None else f"{what['loc'][0]}: {what['msg']}"
        raise BadInputError(f"{file}: a field is missing or of another type ({said}).") from None
    if not found:
        known = ", ".join(f"{name} ({form.file})" for name, form in FORMS.items())
        raise BadInputError(f"{file} is in none of the forms that can be checked: {known}.")
    return found


def _parts(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a file, each with its place: lines, or the runs that specdec_bench adds to a list."""
    if file.suffix == ".jsonl":
        lines = read_text(file).removesuffix("\n").split("\n", _MOST_LINES)
        if len(lines) > _MOST_LINES:
            raise Unreadable(str(file), f"longer than {_MOST_LINES} lines")
        told = ((f", line {number}", line) for number, line in enumerate(lines, 1) if line.strip())
        yield from ((place, parse_json(line, f"{file}{place}")) for place, line in told)
    elif file.suffix == ".json":
        values = parse_json(read_text(file), str(file))
        runs = {f", run {n}": run for n, run in enumerate(values, 1)} if isinstance(values, list) else {"": values}
        yield from ((place, run) for place, run in runs.items() if isinstance(run, dict))
    else:
        yield "", parse_yaml(read_text(file), str(file)) if file.suffix == ".yaml" else read_text(file)


def _json(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _lengths(histogram: Sequence[int]) -> dict[str, int]:
    """Return a histogram keyed by tokens per round, the target's own included, as specdec_bench's is."""
    return {str(kept + 1): rounds for kept, rounds in enumerate(histogram) if rounds}


def _by_kept(histogram: dict[str, int] | None) -> dict[str, Any]:
    """Return the claims of a histogram by tokens per round: rounds that kept 0, 1, … drafts, and those of length 0."""
    by_length = {int(length): rounds for length, rounds in (histogram or {}).items()}
    if not by_length:
        return {}
    kept = [by_length.get(length, 0) for length in range(1, min(max(by_length), 2000) + 1)]  # longer ones are refused
    return {"histogram": kept, "empty": by_length.get(0, 0)}


def _request_length(record: PromptRecord) -> float:
    return 1 + sum(record.accepted) / len(record.accepted)


def _requests(passport: Passport) -> dict[str, float]:
    return {f"{r.suite}/{r.prompt}": round(_request_length(r), 6) for r in passport.records if r.accepted}


def _write_modelopt(p: Passport) -> str:
    histogram, requests = p.histogram(), _requests(p)
    marginal, length = survival(histogram), round(p.length().value, 6)
    c = p.conditions
    return _json(
        {
            "schema_version": "1.0",
            "measured": True,
            "method": p.info.drafter,
            "draft_checkpoint": {"digest": p.identity.get("drafter")},
            "target_model": {"digest": p.identity.get("target"), "model_type": c.target.get("model_type")},
            "num_speculative_tokens": p.k,
            "block_size": None,
            "max_supported_k": max(p.info.trained_depth or 0, p.k),
            "verification_method": "block" if p.figures.rule == "block" else "longest_prefix",
            "conditional_accept_rates": [round(rate, 6) for rate in conditional(marginal)],
            "marginal_accept_rates": [round(rate, 6) for rate in marginal],
            "mean_accept_length": length,
            "mean_accept_length_per_request": round(sum(requests.values()) / len(requests), 6),
            "accept_length_model": "chain_analytic" if _extrapolates(p) else "measured_per_k",
            "accept_length_by_k": {str(p.k): length},
            "acceptance_length_histogram": _lengths(histogram),
            "per_category": {s: {"mean_accept_length": round(_mean(r), 6)} for s, r in p.by_suite().items()},
            "measurement_conditions": {
                "dataset": [s.name for s in c.suites],
                "num_samples": len(p.records),
                "osl": c.max_new_tokens,
                "temperature": p.figures.temperature,
                "concurrency": c.batch_size,
                "engine": "outrider",
                "device": c.device_name,
            },
            "validation": _validation(length, [round(rate, 6) for rate in marginal]),
            "outrider": p.provenance(averaged="rounds, in per_category too"),
        }
    )


def _validation(length: float, marginal: Sequence[float]) -> dict[str, Any]:
    """Return the source's two checks of a profile; rates of rounds that were counted cannot rise."""
    implied, tolerance = 1 + sum(marginal), 0.02
    consistency = {
        "implied_mean_accept_length": round(implied, 6),
        "reported_mean_accept_length": length,
        "abs_delta": round(abs(implied - length), 6),
        "tolerance": tolerance,
        "passed": abs(implied - length) <= tolerance,
    }
    return {"mean_consistency": consistency, "marginal_monotonicity": {"passed": True, "violations": []}}


def _mean(records: Sequence[PromptRecord]) -> float:
    return 1 + sum(sum(r.accepted) for r in records) / max(1, sum(len(r.accepted) for r in records))


def _extrapolates(p: Passport) -> bool:
    # Block verification keeps drafts whose prefix alone would have been refused: rates by depth do not add up.
    chain = p.is_chain and p.figures.rule != "block"
    return chain and p.info.drafter in _CHAIN_METHODS and p.info.control is None


def _read_modelopt(values: dict[str, Any]) -> list[dict[str, Any]]:
    if "marginal_accept_rates" not in values:
        return []
    claims = {
        "where": "ModelOpt's speculation profile",
        "k": values["num_speculative_tokens"],
        "length": values["mean_accept_length"],
        "by_k": values.get("accept_length_by_k") or {},
        "chain": values.get("accept_length_model") == "chain_analytic",
        "per_request": values.get("mean_accept_length_per_request"),
        "marginal": values["marginal_accept_rates"],
        "conditional": values.get("conditional_accept_rates"),
    }
    return [claims | _by_kept(values.get("acceptance_length_histogram"))]


def _write_inferencex(p: Passport) -> str:
    """The curve below the measured K follows from the rates by depth, for chains; a comment says so."""
    marginal = survival(p.histogram(undrafted=False))
    depths = range(1, p.k + 1) if _extrapolates(p) else [p.k]
    lengths = {k: round(1 + sum(marginal[:k]), 2) for k in depths}
    asked = [p.conditions.template[key] for key in ("enable_thinking", "thinking") if key in p.conditions.template]
    mode = ("thinking_on" if asked[0] else "thinking_off") if asked else ""  # which is the template's own, unknown here
    length, c = p.length(undrafted=False), p.conditions
    name = str(c.target.get("path") or c.target.get("model_type") or "target").rstrip("/").rpartition("/")[2]
    lines = [
        "Acceptance Length (AL) reference values.",
        f"dataset: {', '.join(s.name for s in c.suites)} | output_len: {c.max_new_tokens}",
        f"{mode or 'template'}: temperature={p.figures.temperature:g}, chat_template_kwargs: {json.dumps(c.template)}",
        f"Measured at K={p.k}: AL {length.text(3)}; "
        + ("lengths at smaller K follow from its rates by depth." if len(lengths) > 1 else "no other K was measured."),
        p.conventions(undrafted=False),
        "key = num_speculative_tokens; value = golden AL",
    ]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    return comments + yaml_text({name: {mode: lengths} if mode else lengths})


def _read_inferencex(values: Any) -> list[dict[str, Any]]:
    found = []
    for model, modes in (values if isinstance(values, dict) else {}).items():
        if str(model).startswith("_"):  # such as _metadata
            continue
        curves = modes if any(str(key).startswith("thinking") for key in modes) else {"": modes}
        for mode, curve in curves.items():
            levels = {k: al for level in curve for k, al in level.items()} if isinstance(curve, list) else curve
            if lengths := {k: length for k, length in levels.items() if length != "N/A"}:
                found.append({"where": f"InferenceX, {model} {mode}".strip(), "by_k": lengths, "tolerance": 0.011})
    return found


def _write_speed_bench(p: Passport) -> str:
    requests, histogram = _requests(p), p.histogram()
    marginal = [1.0, *survival(histogram)]  # by tokens per round, from 1 on
    per_suite = {s: [_request_length(r) for r in own if r.accepted] for s, own in p.by_suite().items()}
    by_length = {str(length): rate for length, rate in enumerate(marginal, 1)}
    given = {str(length): rate for length, rate in enumerate([1.0, *conditional(marginal[1:])], 1)}
    body = {
        "Request_AL": requests,
        "Category_AL": {s: round(sum(own) / len(own), 6) for s, own in per_suite.items() if own},
        "Average_AL": round(sum(requests.values()) / len(requests), 6),
        "Acceptance_Length_Histogram": _lengths(histogram),
        "Conditional_Acceptance_Rate": given,
        "Joint_Acceptance_Rate": by_length,
        "outrider": p.provenance(averaged="requests (Average_AL, Category_AL) and rounds (the rates)"),
    }
    return _json(body)


def _read_speed_bench(values: dict[str, Any]) -> list[dict[str, Any]]:
    if "Acceptance_Length_Histogram" not in values:
        return []
    counted = _by_kept(values["Acceptance_Length_Histogram"])
    deepest = len(counted.get("histogram", []))
    rates = [values.get(name) or {} for name in ("Joint_Acceptance_Rate", "Conditional_Acceptance_Rate")]
    # A length that never occurred is left out; then the conditional rates are of other steps than depths.
    dense = all(counted.get("histogram", [0])) and all(len(r) == deepest for r in rates)
    joint, given = ([r[str(n)] for n in range(2, deepest + 1)] if dense else None for r in rates)
    turns = (own.values() if isinstance(own, dict) else [own] for own in values["Request_AL"].values())
    claims = {
        "where": "SPEED-Bench's matrix",
        "per_request": values["Average_AL"],
        "requests": list(chain.from_iterable(turns)),
        "parts": values.get("Category_AL") or {},
        "marginal": joint,
        "conditional": given,
    }
    return [claims | counted]


def _write_vllm(p: Passport) -> str:
    lines = []
    for record in p.records:
        rounds = [(d, a) for d, a in zip(record.drafted, record.accepted, strict=True) if d]
        drafted, accepted = sum(d for d, _ in rounds), sum(a for _, a in rounds)
        by_length: dict[int, list[int]] = {}
        for proposed, kept in rounds:
            by_length.setdefault(proposed, [0] * (proposed + 1))[kept] += 1
        metrics = {
            "mean_acceptance_length": 1 + accepted / len(rounds) if rounds else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram_of([record], p.k, undrafted=False),
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": len(rounds),
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": p.k,
            "per_step_accepted": [a for _, a in rounds],
            "per_step_drafted": [d for d, _ in rounds],
        }
        usage = {"prompt_tokens": record.prompt_tokens, "completion_tokens": record.tokens}
        own = {"id": f"{record.suite}/{record.prompt}", "usage": usage, "metrics": {"speculative_decoding": metrics}}
        lines.append(json.dumps(own | {"outrider": p.conventions(undrafted=False, averaged="the rounds of a request")}))
    return "\n".join(lines) + "\n"


_VLLM = {  # our names of its fields; the last three, where it tells rounds or knows lengths of drafts
    "k": "num_spec_tokens",
    "length": "mean_acceptance_length",
    "histogram": "acceptance_histogram",
    "rounds": "num_spec_steps",
    "accepted": "num_accepted_draft_tokens",
    "drafted": "num_draft_tokens",
    "rate": "draft_acceptance_rate",
    "kept": "per_step_accepted",
    "proposed": "per_step_drafted",
    "by_proposed": "acceptance_histogram_by_draft_length",
}
_VLLM_MORE = ("kept", "proposed", "by_proposed")


def _read_vllm(line: dict[str, Any]) -> list[dict[str, Any]]:
    metrics = line.get("metrics", {"speculative_decoding": line})
    body = metrics and metrics.get("speculative_decoding")
    if body is None:  # not told, as of requests with several answers
        return []
    said = {our: body[field] for our, field in _VLLM.items() if our not in _VLLM_MORE or body.get(field) is not None}
    if not said["rounds"]:  # a length of nothing
        said["length"] = None
    return [{"where": "vLLM's metrics"} | said]


def _write_markdown(p: Passport) -> str:
    length = p.length()
    histogram = p.histogram()
    figures = p.figures
    rounds = sum(histogram)
    rows = zip(range(1, p.k + 1), survival(histogram), conditional(survival(histogram)), strict=True)
    lines = [
        f"### Acceptance of {markdown_text(p.info.label)}",
        "",
        f"Mean acceptance length {length.text(4)} at K={p.k}; speedup {figures.speedup.text(unit='×')} over the plain "
        f"target in the same engine and run; {len(p.records)} prompts, {rounds} rounds.",
        "",
        "| depth | marginal rate | conditional rate |",
        "|--:|--:|--:|",
        *(f"| {depth} | {marginal:.4f} | {given:.4f} |" for depth, marginal, given in rows),
        "",
        "| drafts kept | rounds |",
        "|--:|--:|",
        *(f"| {kept} | {count} |" for kept, count in enumerate(histogram)),
        "",
        f"Conventions: {markdown_text(p.conventions())}.",
        "",
    ]
    return "\n".join(lines)


def _read_markdown(text: str) -> list[dict[str, Any]]:
    said = re.search(r"Mean acceptance length (\S{1,32})[^;\n]{0,64} at K=(\d{1,4});", text)
    if said is None:
        return []
    rates = re.findall(r"^\| \d+ \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    kept = re.findall(r"^\| \d+ \| (\d+) \|$", text, re.MULTILINE)
    marginal, given = ([rate[i] for rate in rates] for i in (0, 1))
    claims = {"where": "Markdown", "k": said[2], "length": said[1], "histogram": kept}
    return [claims | {"marginal": marginal, "conditional": given}]


def _write_card(p: Passport) -> str:
    from ..eval.model_card import model_card, results_of  # takes seconds, and only this form needs it

    title = f"{markdown_text(str(p.info.drafter))} drafter"
    suites = ", ".join(s.name for s in p.conditions.suites)
    figures = {"mean_acceptance_length": p.length().value, "speedup": p.figures.speedup.value}
    return model_card(f"# {title}\n\n{_write_markdown(p)}", title, results=results_of(figures, suites))


FORMS = {
    "modelopt": PassportForm("speculation_profile.json", _write_modelopt, _read_modelopt),
    "speed-bench": PassportForm("specbench_results.json", _write_speed_bench, _read_speed_bench),
    "inferencex": PassportForm("golden_al.yaml", _write_inferencex, _read_inferencex),
    "vllm": PassportForm("requests.jsonl", _write_vllm, _read_vllm),
    "markdown": PassportForm("acceptance.md", _write_markdown, _read_markdown),
    "card": PassportForm("README.md", _write_card, _read_markdown),
}
