"""A pair of a stranger is a closed list of regular files, and its identity covers all that is loaded."""

from __future__ import annotations

import json
import os

import pytest

from outrider.common import BadInputError, OutriderError
from outrider.pair import Pair, verify
from outrider.pair.manifest import read_manifest


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a device", "a link to a folder", "a link to nothing"])
def test_what_is_no_regular_file_is_named_and_never_opened(make_pair, kind):
    pair = make_pair("ngram")
    place = pair.folder / "drafter" / "extra"
    goals = {"a link": pair.recipe_file, "a device": "/dev/zero", "a link to a folder": "/", "a link to nothing": "no"}
    if kind == "a pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(goals[kind])
    said = "a pipe" if kind == "a pipe" else "a link"
    assert verify(pair.folder) == [f"drafter/extra: {said}; a pair holds regular files only"]
    with pytest.raises(OutriderError, match="regular files only"):
        Pair.load(pair.folder)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\\b", "C:/x", "./x", "", "a//b", "a\nb"])
def test_a_name_that_leads_out_of_the_pair_is_refused(make_pair, name):
    pair = make_pair("ngram")
    values = json.loads((pair.folder / "pair.json").read_text())
    values["drafter"]["files"][name] = "0" * 64
    (pair.folder / "pair.json").write_text(json.dumps(values))
    with pytest.raises(BadInputError, match="is no plain path inside the pair"):
        read_manifest(pair.folder)


def test_another_tokenizer_in_the_folder_is_another_pair(make_pair):
    """Whoever seals pair.json again after changing the tokenizer has made another identity."""
    made = make_pair("ngram").manifest
    files = dict.fromkeys(made.target.tokenizer_files, "0" * 64)
    other = made.model_copy(update={"target": made.target.model_copy(update={"tokenizer_files": files})})
    assert other.identity() != made.digest == made.identity()
