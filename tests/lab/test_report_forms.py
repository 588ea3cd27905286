"""A drafter's acceptance in the forms of others: what is written is read back, and wrong conventions have names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.common import BadInputError
from outrider.common.untrusted_files import parse_yaml, yaml_text
from outrider.lab.claims import Claims, contradictions
from outrider.lab.passport import Passport, conditional, survival
from outrider.lab.report_forms import FORMS, read_claims

from ..eval.conftest import make_report

# Two requests of unlike lengths: 8 rounds that kept (0, 1, 2, 4, 4, 4, 4, 1) drafts, and 2 that kept (0, 0).
ACCEPTED = [[0, 1, 2, 4, 4, 4, 4, 1], [0, 0]]
HISTOGRAM = [3, 2, 1, 0, 4]
LENGTH, PER_REQUEST = 3.0, 2.25


@pytest.fixture
def passport() -> Passport:
    return Passport.of(make_report(ACCEPTED))


def written(form: str, passport: Passport, folder: Path) -> Path:
    file = folder / FORMS[form].file
    file.write_text(FORMS[form].write(passport))
    return file


def test_counts_of_rounds_give_all_figures(passport):
    assert passport.k == 4
    assert passport.histogram() == HISTOGRAM
    assert passport.length().value == LENGTH
    assert survival(HISTOGRAM) == [0.7, 0.5, 0.4, 0.4]
    assert conditional(survival(HISTOGRAM)) == pytest.approx([0.7, 5 / 7, 0.8, 1.0])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_back_with_the_same_figures_and_says_its_conventions(form, passport, tmp_path):
    file = written(form, passport, tmp_path)
    claims = read_claims(file)
    assert [c for claim in claims for c in contradictions(claim)] == []
    if form == "inferencex":  # a chain of EAGLE's: its first drafts tell the lengths at smaller K
        assert claims[0].by_k == {1: 1.7, 2: 2.2, 3: 2.6, 4: 3.0}
    elif form == "vllm":
        assert [c.histogram for c in claims] == [[1, 2, 1, 0, 4], [2, 0, 0, 0, 0]]
        assert [c.length for c in claims] == [3.5, 1.0]
    else:
        (claim,) = claims
        assert claim.histogram == HISTOGRAM
        assert (claim.length or LENGTH, claim.per_request or PER_REQUEST) == (LENGTH, PER_REQUEST)
    text = file.read_text()
    for said in ("target's own token", "drafts greedy", "temperature 0", "K=4", "template {}"):
        assert said.replace('"', '\\"') in text, said


def changed(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(values)


def _shift_curve(by: float) -> Callable[[dict[str, Any]], None]:
    def shift(body: dict[str, Any]) -> None:
        (curve,) = body.values()
        curve.update({k: length + by for k, length in curve.items()})

    return shift


def _request(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["metrics"]["speculative_decoding"].update(values)


RATES, GIVEN = survival(HISTOGRAM), conditional(survival(HISTOGRAM))
BY_DRAFTS = {str(kept): n for kept, n in enumerate(HISTOGRAM)}
WRONG: list[tuple[str, str, Callable[[dict[str, Any]], Any]]] = [
    ("length without the bonus", "modelopt", changed(mean_accept_length=LENGTH - 1)),
    ("bonus counted twice", "modelopt", changed(mean_accept_length=LENGTH + 1)),
    ("mean of requests as mean of rounds", "modelopt", changed(mean_accept_length=PER_REQUEST)),
    ("length summed from conditional rates", "modelopt", changed(mean_accept_length=1 + sum(GIVEN))),
    ("length and rates", "modelopt", changed(mean_accept_length=2.6)),
    ("conditional read as marginal", "modelopt", changed(marginal_accept_rates=GIVEN)),
    ("marginal read as conditional", "modelopt", changed(conditional_accept_rates=RATES)),
    ("histogram by drafts", "modelopt", changed(acceptance_length_histogram=BY_DRAFTS)),
    ("truncated rates", "modelopt", changed(marginal_accept_rates=RATES[:2])),
    ("percent", "modelopt", changed(marginal_accept_rates=[100 * rate for rate in RATES])),
    (
        "rising marginal rates",
        "modelopt",
        changed(marginal_accept_rates=[0.4, 0.5, 0.4, 0.7], acceptance_length_histogram=None),
    ),
    ("mean of rounds as mean of requests", "speed-bench", changed(Average_AL=LENGTH)),
    ("length without the bonus", "inferencex", _shift_curve(-1)),
    ("length beyond K + 1", "inferencex", _shift_curve(0.6)),
    ("bonus counted as accepted", "vllm", _request(num_accepted_draft_tokens=28)),
    ("acceptance rate", "vllm", _request(draft_acceptance_rate=20 / 8 / 5)),
    ("more accepted than drafted", "vllm", _request(num_draft_tokens=8)),
    ("two lengths", "modelopt", changed(accept_length_by_k={"4": 2.0})),
    ("length and rates", "modelopt", changed(accept_length_by_k={"2": 2.6, "4": 3.0})),
    ("mean of a part", "speed-bench", changed(Category_AL={"code": 9.0})),
    ("rounds and histogram", "vllm", _request(per_step_accepted=[4, 4, 4, 4, 4, 0, 0, 0])),
    ("rounds and counters", "vllm", _request(per_step_drafted=[1] * 8)),
    ("histogram by draft length", "vllm", _request(acceptance_histogram_by_draft_length={"4": [8]})),
    ("more accepted than drafted", "vllm", _request(acceptance_histogram_by_draft_length={"1": HISTOGRAM})),
]


@pytest.mark.parametrize(("name", "form", "change"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_file_of_another_convention_is_refused_by_the_name_of_the_mistake(name, form, change, passport, tmp_path):
    file = written(form, passport, tmp_path)
    first, *others = file.read_text().splitlines() if form == "vllm" else [file.read_text()]
    body = parse_yaml(first, "") if form == "inferencex" else json.loads(first)
    change(body)
    text = yaml_text(body) if form == "inferencex" else json.dumps(body)
    file.write_text("\n".join([text, *others]))
    found = [c for claims in read_claims(file) for c in contradictions(claims)]
    assert found, "the file is believed"
    assert found[0].name == name


def test_files_in_no_form_are_bad_input_with_the_forms_that_there_are(tmp_path):
    for name, text in (("a.json", "{}"), ("b.json", "[1]"), ("c.txt", ""), ("d.md", "# x"), ("e.yaml", "[1]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadInputError, match=r"in none of the forms.*speculation_profile.json|another type"):
            read_claims(tmp_path / name)
    whole = {"marginal_accept_rates": [0.5], "num_speculative_tokens": 1, "mean_accept_length": 1.5}
    (tmp_path / "f.json").write_text(json.dumps(whole))
    assert len(read_claims(tmp_path / "f.json")) == 1
    for change in (
        {"marginal_accept_rates": "many"},
        {"marginal_accept_rates": [[]]},
        {"num_speculative_tokens": 10**9},
        {"num_speculative_tokens": None, "mean_accept_length": {}},
        {"acceptance_length_histogram": {"1000000000": 1}},
        {"acceptance_length_histogram": {"1": -1}},
        {"acceptance_length_histogram": [1, 2]},
    ):
        (tmp_path / "f.json").write_text(json.dumps(whole | change))
        with pytest.raises(BadInputError, match="a field is missing or of another type"):
            read_claims(tmp_path / "f.json")
    (tmp_path / "h.jsonl").write_text('{"metrics": null}\n' * 20_001)
    with pytest.raises(BadInputError, match="longer than 20000 lines"):
        read_claims(tmp_path / "h.jsonl")
    (tmp_path / "g.json").write_text('{"marginal_accept_rates": NaN}')
    with pytest.raises(BadInputError, match="none of the forms"):
        read_claims(tmp_path / "g.json")


def test_every_run_of_a_list_is_checked_and_a_placeholder_is_none(passport, tmp_path):
    whole = json.loads(FORMS["modelopt"].write(passport))
    (tmp_path / "runs.json").write_text(json.dumps([whole | {"mean_accept_length": 2.0}, whole]))
    first, second = read_claims(tmp_path / "runs.json")
    assert [c.line.partition(":")[0] for c in contradictions(first)] == ["ModelOpt's speculation profile, run 1"]
    assert not contradictions(second)
    assert whole["validation"]["mean_consistency"]["passed"]
    (tmp_path / "stub.json").write_text(json.dumps(whole | {"measured": False}))
    with pytest.raises(BadInputError, match=r"stub.json: is a placeholder \(measured: false\)"):
        read_claims(tmp_path / "stub.json")


def test_a_long_list_is_shown_in_part():
    claims = Claims(where="a file", histogram=[10, 5], kept=[0] * 1_000_000)
    assert all(len(one.line) < 500 for one in contradictions(claims))
    assert contradictions(claims)


def test_rare_depths_are_not_refused_for_their_rounding():
    """A marginal rate of 0.0002 has one digit in a file that rounds to six after the point, less after four."""
    told = {"k": 3, "marginal": [0.1, 0.001, 0.0002], "conditional": [0.1, 0.01, 0.1534], "tolerance": 0.0001}
    assert not contradictions(Claims("rounded", **told))
    assert contradictions(Claims("wrong", **told | {"conditional": [0.15, 0.01, 0.1534]}))


def test_served_sampling_stands_in_the_conventions():
    report = make_report(ACCEPTED)
    report.conditions.sampling = {"top_p": 0.9, "repetition_penalty": 1.1}
    assert "temperature 0, top_p 0.9, repetition_penalty 1.1; rule" in Passport.of(report).conventions()


def test_a_tree_tells_no_length_but_its_own(tmp_path):
    report = make_report(ACCEPTED)
    infos = [info.model_copy(update={"width": 4}) for info in report.contestants]
    tree = Passport.of(report.model_copy(update={"contestants": infos}))
    (claims,) = read_claims(written("inferencex", tree, tmp_path))
    assert claims.by_k == {4: 3.0}


@pytest.mark.parametrize(
    ("drafted", "accepted", "by_itself"),
    [
        ([4, 4, 4], [4, 0, 2], False),
        ([4, 1, 4], [4, 1, 0], True),
        ([4, 4, 2], [4, 1, 2], False),
        ([4, 0, 4], [1, 0, 0], True),
        ([4, 4, 0], [1, 0, 0], False),
    ],
)
def test_drafts_that_the_limit_or_the_end_of_a_text_cuts_do_not_stop_by_themselves(drafted, accepted, by_itself):
    report = make_report([accepted] * 2, max_new_tokens=11)
    for record in report.records_of("draft", 0.0):
        record.drafted = drafted
    assert Passport.of(report).stops_early == by_itself


def test_a_report_without_rounds_has_no_passport():
    with pytest.raises(BadInputError, match="holds no rounds of draft at temperature 0"):
        Passport.of(make_report(ACCEPTED, records=False))
