"""Which batches of prompts are run."""

from __future__ import annotations

import pytest

from outrider.common import BadInputError
from outrider.distill.prompt_table import Prompt
from outrider.eval.batch_timing import make_groups
from outrider.eval.suites import PromptJob


@pytest.fixture
def jobs() -> list[PromptJob]:
    """Ten ragged prompts over a vocabulary of 64."""
    return [
        PromptJob("code", Prompt(f"p{i}", "code", tuple((7 * i + 3 * j) % 64 for j in range(3 + i % 4))), i)
        for i in range(10)
    ]


def test_batches_of_one_pass_share_no_prompt_and_all_are_full(jobs):
    groups = make_groups(jobs, 3, least=1)
    assert [len(g) for g in groups] == [3, 3, 3]
    used = [job.sequence for group in groups for job in group]
    assert len(set(used)) == 9


def test_where_prompts_fill_too_few_batches_they_are_drawn_again(jobs):
    groups = make_groups(jobs, 4, least=5)
    assert [len(g) for g in groups] == [4] * 5
    assert len({tuple(sorted(job.sequence for job in g)) for g in groups}) == 5
    assert [[j.sequence for j in g] for g in make_groups(jobs, 4, least=5)] == [[j.sequence for j in g] for g in groups]
    assert len(make_groups(jobs, 1, least=2)) == 10


def test_sizes_without_a_full_batch_are_refused(jobs):
    for size in (0, 11):
        with pytest.raises(BadInputError, match=f"between 1 and the number of prompts, 10; got {size}"):
            make_groups(jobs, size, 1)
    with pytest.raises(BadInputError, match="at least one batch"):
        make_groups(jobs, 1, 0)
