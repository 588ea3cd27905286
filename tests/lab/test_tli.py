"""A draft model of another tokenizer: the tokens of both are drafted, and the text stays the target's."""

from __future__ import annotations

import json
import os
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from outrider.common import BadInputError, IncompatibleError
from outrider.decode import Decoder, Plan, Sampling
from outrider.decode.sampling import probabilities
from outrider.formats import export_drafter, launch
from outrider.heads import Fusion, Ngram, Suffix, drafter_config, load_drafter
from outrider.lab.cascade import Cascade
from outrider.lab.tli import MAP, Tli, TliConfig, VocabularyMap
from outrider.lab.tli_layouts import engine_map
from outrider.lab.transplant import token_bytes
from outrider.recipes import load_recipe
from outrider.targets import RowLengths, Target
from outrider.train import train
from outrider.train.drafter_init import make_drafter

from ..closeness import assert_same, both_precisions
from ..conftest import byte_level_bpe, few
from ..decode.test_distribution import ENDS, FEW, HEADS, QUICK, SAMPLINGS, SIZE, expected_law, p_value, rollouts
from ..decode.test_rules import EXACT, SAMPLED, SHAPES, Trees, bias, random_source
from ..heads.conftest import batch, sequences

OTHER_TEXT = ["import os, sys", "the other words of another vocabulary", "größer als 20 €", "def f(x): return x"] * 4
NAMES = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]  # of the target's special tokens


def tokenizer(special: list[str], end: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(special, OTHER_TEXT), eos_token=end, pad_token=special[0]
    )


@pytest.fixture
def other(tmp_path) -> str:
    """The folder of a tokenizer of other words, whose special tokens have the target's names."""
    tokenizer(NAMES, "<|end|>").save_pretrained(tmp_path / "other")
    return str(tmp_path / "other")


def build(target: Target, folder: str, **settings: Any) -> Tli:
    head, config = drafter_config({"type": "tli", "tokenizer": folder, "model": {"num_hidden_layers": 2}, **settings})
    torch.manual_seed(5)
    drafter: Any = head.build(config, target, torch.arange(target.vocab_size))
    for weight in drafter.parameters():
        weight.data += 0.2 * torch.randn_like(weight)
    return drafter.eval().requires_grad_(False)


def spelled(vocabulary: VocabularyMap, text: list[int]) -> list[int]:
    """Return what a text is read as, token by token."""
    ends = [0, *vocabulary.ends.tolist()]
    pieces = [vocabulary.pieces[begin:end].tolist() for begin, end in pairwise(ends)]
    return [piece for token in text for piece in pieces[token]]


def overlapping(both: int, tokens: int = 5) -> VocabularyMap:
    """Return the map of `tokens` and four, which share so many; the other `tokens` are read as two or three."""
    counts = [1] * both + [2 + i % 2 for i in range(tokens - both)]
    pieces = [3 - i for i in range(both)] + [(7 * i + 1) % 4 for i in range(sum(counts) - both)]
    lists = [list(range(both)), [3 - i for i in range(both)], pieces, counts]
    return VocabularyMap(*(torch.tensor(values) for values in lists))


@pytest.mark.parametrize("both", [1, 2, 3, 4])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_the_law_is_the_targets_whatever_both_share(tiny_llama, both, temperature):
    """Enumerated in float64, by all rules, with what a session drafts after each of the target's five tokens.

    Without its attention's output a model's next token depends on the last one alone.
    """
    model = tiny_llama(vocab=4, layers=1, seed=2).double()
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    drafter = Tli(model, overlapping(both))
    session = drafter.open(Target(tiny_llama(vocab=5).double()), 5, 8)
    session.update(torch.zeros(5, 1, dtype=torch.long), None, RowLengths.of([1] * 5, "cpu"))
    logits = torch.full((5, 5), -torch.inf, dtype=torch.float64)
    logits[:, session.output_ids] = session.prefill(torch.arange(5))
    drawn = probabilities(torch.cat([logits, logits[:1]]), Sampling(temperature))
    assert (drawn.count_nonzero(1) == both).all()
    target = random_source(5, both)
    for name, rule in SAMPLED.items():
        for shape in ("chain of 1", "chain of 2") + (() if name in ("rejection", "block") else ("2 siblings",)):
            assert bias(rule, Trees.drawn(SHAPES[shape], target, drawn), target) < EXACT, (name, shape)


CASES = [case for case in QUICK if case.drafter == "draft_model"]
CASES = [(both, case) for both in (1, 3) for case in CASES if both > 1 or case.shape != "static"]


@pytest.mark.parametrize(("both", "case"), CASES, ids=str)
def test_texts_have_the_targets_law_through_the_decoder(tiny_llama, both, case):
    """Chi-square of the joint law of four tokens, by each rule, in chains and trees, whatever processors there are."""
    four_tokens = SimpleNamespace(get_vocab=lambda: {str(i): i for i in range(4)})
    target = Target(tiny_llama(layers=2, hidden=16, vocab=6, seed=5, eos_token_id=ENDS, **HEADS), four_tokens)
    drafter = Tli(tiny_llama(vocab=4, layers=1, hidden=16, seed=6, **HEADS), overlapping(both, 6))
    counts = rollouts(target, drafter, case.plan, SAMPLINGS[case.sampling], FEW)
    assert p_value(counts, expected_law(target, SAMPLINGS[case.sampling])) > SIZE / len(CASES)


def test_vocabularies_that_share_nothing_are_refused(tiny_tokenizer):
    own = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x\u0000y": 0}, unk_token="x\u0000y")))
    own.backend_tokenizer.decoder = decoders.ByteLevel()
    with pytest.raises(IncompatibleError, match="share no token, so nothing could be drafted"):
        VocabularyMap.of(own, tiny_tokenizer, len(tiny_tokenizer), 4)


@pytest.mark.parametrize("most", [9, 2, 0])
def test_tokens_are_joined_by_their_bytes_and_others_are_spelled(tiny_tokenizer, most):
    own = tokenizer(["<pad>", "</s>"], "</s>")
    found = VocabularyMap.of(own, tiny_tokenizer, len(tiny_tokenizer), most)
    ours, theirs = token_bytes(own), token_bytes(tiny_tokenizer)
    pairs = dict(zip(found.target_ids.tolist(), found.own_ids.tolist(), strict=True))
    assert pairs[tiny_tokenizer.eos_token_id] == own.eos_token_id
    assert pairs[tiny_tokenizer.pad_token_id] == own.pad_token_id
    same = {i for i, text in theirs.items() if text in ours.values()}
    assert same < pairs.keys()
    assert all(ours[pairs[i]] == theirs[i] for i in same)
    alone = [i for i in theirs if i not in pairs]
    assert len(alone) > 20
    for i in alone:
        read = spelled(found, [i])
        whole = b"".join(ours.get(piece, b"") for piece in read)
        assert (read == [own.eos_token_id]) if most == 0 else theirs[i].endswith(whole) and 1 <= len(read) <= most
        assert most < 9 or whole == theirs[i]
    assert not found.faults(len(own))


def test_a_sentencepiece_vocabulary_and_one_of_bytes_are_joined():
    words = {"<unk>": 0, "</s>": 1, "\u2581the": 2, "he": 3, "\u2581": 4, "t": 5, "<0x0A>": 6, "h": 7, "e": 8}
    pieces = Tokenizer(models.BPE(words, []))
    pieces.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces.add_special_tokens(["</s>"])
    ours = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="</s>", unk_token="<unk>")
    bytewise = Tokenizer(models.BPE({"Ġthe": 0, "Ġthe\u010a": 1, "the": 2, "q": 3, "\u010a": 4, "<|end|>": 5}, []))
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(["<|end|>"])
    theirs = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|end|>")
    found = VocabularyMap.of(ours, theirs, 6, 4)
    assert (found.target_ids.tolist(), found.own_ids.tolist()) == ([0, 4, 5], [2, 6, 1])
    assert [spelled(found, [i]) for i in range(6)] == [[2], [2, 6], [5, 3], [0], [6], [1]]


def test_texts_are_spelled_row_by_row():
    found = overlapping(2)
    tokens = torch.randint(5, (4, 9), generator=torch.Generator().manual_seed(0))
    real = torch.rand(4, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    for kept in (None, real, torch.zeros_like(real)):
        ids, ends = found.spell(tokens, kept)
        for row in range(4):
            parts = [[t] if kept is None or kept[row, i] else [] for i, t in enumerate(tokens[row].tolist())]
            expected = [spelled(found, part) for part in parts]
            assert ids[row, : ends[row, -1]].tolist() == list(chain.from_iterable(expected))
            assert ends[row].tolist() == torch.tensor([len(each) for each in expected]).cumsum(0).tolist()


def read_whole(drafter: Tli, text: list[int]) -> Tensor:
    """By the library alone: the logits of the tokens of both after each token of a text, `[T, V']`."""
    ids = [spelled(drafter.vocabulary, [token]) for token in text]
    logits: Any = drafter.model(torch.tensor([list(chain.from_iterable(ids))])).logits[0]
    ends = torch.tensor([len(each) for each in ids]).cumsum(0) - 1
    return logits[ends][:, drafter.vocabulary.own_ids]


@both_precisions
def test_a_session_has_read_what_the_library_reads_of_the_spelled_text(tiny_target, other):
    """Through rounds that keep all, some and no drafts, rounds without drafts, and foreign drafts."""
    drafter = build(tiny_target, other, pieces=9)
    texts = [[5, 90, 7], [300, 310, 11, 12, 305]]
    session: Any = drafter.open(tiny_target, 2, 60)
    width = max(map(len, texts))
    padded = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    session.update(padded, None, RowLengths.of([len(text) for text in texts], "cpu"))
    drawn = torch.Generator().manual_seed(3)
    both = drafter.vocabulary.target_ids
    for drafted, kept in (([2, 2], [2, 0]), ([0, 0], [0, 0]), ([3, 3], [1, 3]), ([0, 0], [2, 1]), ([3, 3], [3, 2])):
        roots = torch.randint(len(drafter.vocabulary.counts), (2,), generator=drawn)
        drafts = both[torch.randint(len(both), (2, 3), generator=drawn)]
        if drafted == [3, 3]:
            drafts[0, 1] = 318  # which another drafter proposed, and has several pieces
        if drafted[0]:
            found = [session.prefill(roots)]
            found += [session.decode(drafts[:, i : i + 1])[:, 0] for i in range(drafted[0] - 1)]
            for row, text in enumerate(texts):
                expected = read_whole(drafter, [*text, int(roots[row])])[-1]
                assert_same(found[0][row], expected)
                if drafted[0] == 2:
                    assert_same(found[1][row], read_whole(drafter, [*text, int(roots[row]), int(drafts[row, 0])])[-1])
        session.update(torch.cat([roots[:, None], drafts], 1), None, RowLengths.of([1 + n for n in kept], "cpu"))
        for row, text in enumerate(texts):
            text += [int(roots[row]), *drafts[row, : kept[row]].tolist()]
    session.select([1])
    assert_same(session.prefill(torch.tensor([9]))[0], read_whole(drafter, [*texts[1], 9])[-1])


@both_precisions
def test_training_learns_where_decoding_drafts(tiny_target, other):
    drafter = build(tiny_target, other)
    tokens = sequences(2, 9, tiny_target.vocab_size)
    loss = drafter.loss(batch(tiny_target, drafter, tokens))
    total = 0.0
    for row in tokens.tolist():
        p = tiny_target.forward(torch.tensor([row])).logits[0, :-1, drafter.vocabulary.target_ids].softmax(-1)
        log_q = read_whole(drafter, row)[:-1].log_softmax(-1)
        total += float((p * (p.log() - log_q)).sum())
    assert loss.count == 16
    assert_same(loss.total, torch.tensor(total, dtype=loss.total.dtype))


@pytest.mark.parametrize("statistical", [Ngram, Suffix])
def test_text_is_the_targets_beside_drafts_that_the_model_does_not_know(tiny_target, other, statistical):
    prompts = [[5, 300, 301, 5, 300, 301, 5], [310, 9]]
    fused = Fusion(statistical(), build(tiny_target, other))
    for sampling in (Sampling(), few((300, 301, 90)), few((300, 301, 90), temperature=1.0)):
        plan = Plan(3, verify="auto" if sampling.greedy else "coupled")
        alone = Decoder(tiny_target).generate(prompts, 20, sampling, Plan(0, verify=plan.verify))
        assert Decoder(tiny_target, fused).generate(prompts, 20, sampling, plan).tokens == alone.tokens


def test_a_cascade_does_not_guess_for_a_model_of_another_tokenizer(tiny_target, other):
    with pytest.raises(BadInputError, match="tli cannot read guessed tokens in one pass"):
        Cascade(Ngram(), build(tiny_target, other))


def test_a_saved_drafter_is_checked_at_the_door(tiny_target, tiny_llama, tiny_tokenizer, other, tmp_path, caplog):
    caplog.set_level("INFO", "outrider.lab.tli")
    drafter = build(tiny_target, other)
    assert "of the target's 320 tokens can be drafted, " in caplog.text
    folder = tmp_path / "saved"
    drafter.save(folder)
    caplog.clear()
    loaded: Any = load_drafter(folder, tiny_target)
    assert "% of the text that it learns from" in caplog.text
    assert loaded.digest() == drafter.digest()
    assert loaded.config.covers == drafter.config.covers > 0.3

    changed = Target(tiny_target.model, tokenizer(NAMES, "<|end|>"))
    with pytest.raises(IncompatibleError, match="their ids mean other tokens"):
        load_drafter(folder, changed)
    with pytest.raises(IncompatibleError, match="a target with 320 ids, the target has 64"):
        load_drafter(folder, Target(tiny_llama()))

    tensors = load_file(folder / MAP)
    turned = tensors | {"own_ids": tensors["own_ids"].roll(1)}
    for damaged, match in (
        (turned, r"takes the target's token \d+ \(b'.*'\) for its own"),
        (tensors | {"own_ids": tensors["own_ids"] + 300}, "own_ids leave 0 to 318"),
        (tensors | {"counts": tensors["counts"] + 1}, "counts and pieces differ"),
        ({"own_ids": tensors["own_ids"]}, "target_ids is missing"),
    ):
        save_file(damaged, folder / MAP)
        with pytest.raises((BadInputError, IncompatibleError), match=match):
            load_drafter(folder, tiny_target)
    save_file(tensors, folder / MAP)

    tokenizer(["<pad>", "</s>"], "</s>").save_pretrained(folder)
    with pytest.raises(IncompatibleError, match="its map was made with a vocabulary of the digest"):
        load_drafter(folder, tiny_target)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"tli": 3}))
    with pytest.raises(BadInputError, match="expected tli of schema version 1"):
        load_drafter(folder, tiny_target)


def test_what_is_missing_is_named(tiny_target, tmp_path):
    with pytest.raises(BadInputError, match=r"drafter\.tokenizer"):
        Tli.build(TliConfig(), tiny_target)
    tiny_target.model.save_pretrained(tmp_path / "bare")
    with pytest.raises(BadInputError, match="no tokenizer at"):
        Tli.build(TliConfig(path=str(tmp_path / "bare")), tiny_target)


def test_a_recipe_trains_one_for_the_embedded_target(other, tmp_path, monkeypatch):
    """With its own tokenizer beside it, and it is measured as any other."""
    changes = {
        "output": tmp_path / "run",
        "drafter.type": "tli",
        "drafter.init": "random",
        "drafter.tokenizer": other,
        "data.limit": 4,
        "data.max_new_tokens": 4,
        "training.max_steps": 1,
        "eval.training_prompts": 0,
    }
    recipe = load_recipe("embedded-draft-model", [f"{key}={value}" for key, value in changes.items()])
    train(recipe)
    target = Target.load("embedded", dtype="float32")
    drafter: Any = load_drafter(tmp_path / "run" / "drafter", target)
    assert 0 < drafter.config.covers < 1
    prompts = [target.require_tokenizer()("def add(a, b):\n    return")["input_ids"]]
    plain = Decoder(target).generate(prompts, 12)
    assert Decoder(target, drafter).generate(prompts, 12, plan=Plan(3)).tokens == plain.tokens
    further = make_drafter({**recipe.drafter, "init": str(tmp_path / "run")}, target, lambda: torch.ones(4096))
    assert further.digest() == drafter.digest(), "it goes on from there, as a refresh does"


def test_what_vllm_would_read_leaves_for_it_and_nothing_else(tiny_target, other, tmp_path):
    with pytest.raises(IncompatibleError, match=r"pieces: 4.*unknown token.*pieces: 0"):
        export_drafter(build(tiny_target, other), tiny_target, "vllm", tmp_path / "no", 3)
    out = tmp_path / "out"
    drafter = build(tiny_target, other, pieces=0)
    assert export_drafter(drafter, tiny_target, "vllm", out, 3).difference < 1e-4
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"], "vLLM reads every one there"
    settings = launch("vllm", "tli", "target", str(out), 3).settings
    assert settings["method"] == "draft_model"
    assert settings["use_heterogeneous_vocab"] is True
    assert settings["draft_sample_method"] == "greedy"

    tokenizer(["<pad>", "</s>"], "</s>").save_pretrained(tmp_path / "named")
    with pytest.raises(IncompatibleError, match=r"joins? other tokens.*'<\|pad\|>' \(id 0\) is None there"):
        export_drafter(build(tiny_target, str(tmp_path / "named"), pieces=0), tiny_target, "vllm", tmp_path / "no", 3)


def test_vllms_own_map_is_the_one_written_down(tiny_tokenizer, other):
    """With a vLLM: `OUTRIDER_VLLM_PYTHON=… ./scripts/test -m served` runs its file."""
    python = Path(os.environ.get("OUTRIDER_VLLM_PYTHON", "/none"))
    files = list(python.parent.parent.glob("lib/python3*/site-packages/vllm/v1/spec_decode/vocab_mapping.py"))
    if not files:
        pytest.skip("no vLLM")
    source = (
        files[0]
        .read_text()
        .replace("from vllm.logger import init_logger", "from logging import getLogger as init_logger")
    )
    scope: dict[str, Any] = {}
    exec(compile(source, str(files[0]), "exec"), scope)
    own = PreTrainedTokenizerFast.from_pretrained(other)
    theirs = scope["VocabMapping"](tiny_tokenizer, own, len(tiny_tokenizer), len(own), "cpu")
    found = {i: j for i, j in enumerate(theirs.target_to_draft_ids.tolist()) if j >= 0}
    assert found == engine_map(tiny_tokenizer, own, len(tiny_tokenizer), len(own))
