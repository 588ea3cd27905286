"""A signed pair: only the owner of the key can sign it again, and ssh-keygen verifies it without Outrider."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.common import BadInputError
from outrider.pair import Pair, verify
from outrider.pair.manifest import MANIFEST, SIGNATURE
from outrider.pair.signature import NAMESPACE, PASSPHRASE, check_signature, sign
from outrider.scripts.cli import app

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH's ssh-keygen")


def ssh_keygen(*arguments: object) -> str:
    command = ["ssh-keygen", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def made(key: Path, passphrase: str = "") -> Path:
    ssh_keygen("-q", "-a", "1", "-t", "ed25519", "-N", passphrase, "-C", "ci@example.com", "-f", key)
    return key


@pytest.fixture(scope="module")
def key(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("keys") / "key")


@pytest.fixture
def folder(tmp_path) -> Path:
    """What a signature is over: of the rest of a pair, pair.json holds the digests."""
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair" / MANIFEST).write_text('{"any": "manifest"}\n')
    return tmp_path / "pair"


def public(key: Path) -> Path:
    return key.with_name(f"{key.name}.pub")


def allowed(file: Path, key: Path, options: str = "", name: str = "ci@example.com") -> Path:
    kind, encoded, *_ = public(key).read_text().split()
    file.write_text(f"# who may sign\n\n{name} {options} {kind} {encoded} a comment\n")
    return file


def ssh_keygen_verifies(folder: Path, signers: Path, name: str = "ci@example.com") -> bool:
    command = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", name, "-n", NAMESPACE, "-s", folder / SIGNATURE]
    manifest = (folder / MANIFEST).read_bytes()
    return subprocess.run(list(map(str, command)), input=manifest, capture_output=True).returncode == 0


@pytest.mark.parametrize("passphrase", ["", "correct horse"])
def test_ssh_keygen_verifies_a_signed_pair(folder, tmp_path, passphrase, monkeypatch):
    key = made(tmp_path / "key", passphrase=passphrase)
    if passphrase:
        monkeypatch.setenv(PASSPHRASE, passphrase)
    fingerprint = sign(folder / MANIFEST, key)
    assert fingerprint in ssh_keygen("-l", "-f", key).split()
    assert ssh_keygen_verifies(folder, allowed(tmp_path / "signers", key))
    (folder / MANIFEST).write_text('{"any": "other"}\n')
    assert not ssh_keygen_verifies(folder, tmp_path / "signers")


def test_what_ssh_keygen_signed_is_verified(folder, key):
    ssh_keygen("-q", "-Y", "sign", "-f", key, "-n", NAMESPACE, folder / MANIFEST)
    signer, problem = check_signature(folder / MANIFEST, public(key))
    assert (signer.name, problem) == ("ci@example.com", "")
    assert signer.fingerprint in ssh_keygen("-l", "-f", key)
    theirs = (folder / SIGNATURE).read_text()
    assert sign(folder / MANIFEST, key) == signer.fingerprint
    assert (folder / SIGNATURE).read_text() == theirs, "the same bytes: Ed25519 leaves nothing to chance"


def test_every_flipped_bit_is_found(folder, key):
    """Of the signature file's letters, and of what it signs."""
    sign(folder / MANIFEST, key)
    for file in (folder / SIGNATURE, folder / MANIFEST):
        whole = file.read_bytes()
        for place in range(len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
            signer, problem = check_signature(folder / MANIFEST, public(key))
            assert signer is None or whole[place : place + 1] == b"\n", (file.name, place)
            assert signer is not None or problem.startswith(SIGNATURE)
        file.write_bytes(whole)
    assert check_signature(folder / MANIFEST, public(key))[0] is not None


def test_a_stranger_cannot_renew_the_signature(folder, key, tmp_path):
    fingerprint = sign(folder / MANIFEST, made(tmp_path / "other"))
    signer, problem = check_signature(folder / MANIFEST, public(key))
    assert signer is None
    assert fingerprint in problem
    (folder / SIGNATURE).unlink()
    assert "pair.json is not signed" in check_signature(folder / MANIFEST, public(key))[1]


def test_a_signature_for_another_purpose_is_none(folder, key):
    """The same key signs commits: such a signature over the same bytes says nothing about pairs."""
    ssh_keygen("-q", "-Y", "sign", "-f", key, "-n", "git", folder / MANIFEST)
    assert "namespace does not match" in check_signature(folder / MANIFEST, public(key))[1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "-----BEGIN SSH SIGNATURE-----",
        "é",
        "\0" * 100_000,
        "-----BEGIN SSH SIGNATURE-----\nU1NI\n-----END SSH SIGNATURE-----",
    ],
)
def test_anything_else_in_its_place_is_a_finding(folder, key, text):
    (folder / SIGNATURE).write_text(text)
    signer, problem = check_signature(folder / MANIFEST, public(key))
    assert signer is None
    assert "no signature of" in problem


@pytest.mark.parametrize(
    ("options", "name", "counts"),
    [
        ("", None, True),
        ("", "ci@example.com", True),
        ("", "eve@example.com", False),
        (f'namespaces="git,{NAMESPACE}"', None, True),
        (f'namespaces="git,{NAMESPACE}",valid-before="20200101"', None, False),
        (f'namespaces="{NAMESPACE}",cert-authority', None, False),
        (f'namespaces="!{NAMESPACE},*"', None, False),
        ('namespaces="git"', None, False),
        ("cert-authority", None, False),
        ('valid-before="20200101"', None, False),
        ('valid-before="20990101"', None, True),
    ],
)
def test_options_of_allowed_signers(folder, tmp_path, key, options, name, counts):
    sign(folder / MANIFEST, key)
    signer, problem = check_signature(folder / MANIFEST, allowed(tmp_path / "signers", key, options), name)
    assert (signer is not None) == counts
    assert counts or "signers does not allow" in problem


@pytest.mark.parametrize("text", [None, "", "# nobody yet\n"])
def test_a_list_without_signers_is_bad_input(folder, tmp_path, key, text):
    sign(folder / MANIFEST, key)
    if text is not None:
        (tmp_path / "signers").write_text(text)
    with pytest.raises(BadInputError, match=r"holds no key|no such file"):
        check_signature(folder / MANIFEST, tmp_path / "signers")


def test_keys_that_cannot_sign_are_refused_with_what_can(folder, tmp_path, key, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)  # an agent may hold the private half of a public key
    lonely = tmp_path / "lonely.pub"
    shutil.copy(public(key), lonely)
    for bad in (lonely, tmp_path / "missing", tmp_path, folder / MANIFEST):
        with pytest.raises(BadInputError, match="ssh-keygen -t ed25519"):
            sign(folder / MANIFEST, bad)
    monkeypatch.setenv(PASSPHRASE, "wrong one")
    with pytest.raises(BadInputError, match="incorrect passphrase"):
        sign(folder / MANIFEST, made(tmp_path / "locked", passphrase="right one"))
    assert not (folder / SIGNATURE).exists()


def test_the_command_signs_and_verifies(make_pair, key, tmp_path):
    """A signed pair is a pair like any other; one that was altered, or tuned, is not the one that was signed."""

    def outrider(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        return result.exit_code, " ".join(result.output.split())

    pair = make_pair("eagle3")
    assert outrider("pair", "verify", pair.folder, "--signer", public(key))[0] == 1
    assert outrider("pair", "sign", pair.folder, "--key", key)[0] == 0
    assert verify(pair.folder) == []
    assert Pair.load(pair.folder).manifest == pair.manifest
    signers = allowed(tmp_path / "signers", key)
    code, said = outrider("pair", "verify", pair.folder, "--signer", signers, "--identity", "ci@example.com")
    assert (code, "is intact, signed by ci@example.com, SHA256:" in said) == (0, True), said
    assert outrider("pair", "verify", pair.folder, "--signer", public(made(tmp_path / "other")))[0] == 1
    (pair.folder / "recipe.yaml").write_text("name: other")
    assert outrider("pair", "verify", pair.folder, "--signer", signers)[0] == 1
    code, said = outrider("pair", "sign", pair.folder, "--key", key)
    assert (code, "was altered after it was made, and is not signed" in said) == (2, True), said


def test_forms_are_signed_with_the_pairs_own_key_and_altered_ones_are_found(make_pair, report_folder, key, tmp_path):
    """A pair that nobody signed has no key, and another key is not the pair's."""

    def report(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["lab", "report", *map(str, arguments)])
        return result.exit_code, " ".join(result.output.split())

    pair = make_pair("ngram", report_folder=report_folder)
    asked = (pair.folder, "--to", "modelopt", "--to", "card", "--out", tmp_path / "forms", "--replace")
    profile = tmp_path / "forms" / "speculation_profile.json"
    assert report(*asked, "--key", key)[0] == 2
    sign(pair.folder / MANIFEST, key)
    code, said = report(*asked, "--key", made(tmp_path / "other"))
    assert (code, f"is signed with {sign(pair.folder / MANIFEST, key)}, and" in said) == (2, True), said
    assert not (tmp_path / "forms" / "speculation_profile.json.sig").exists()
    assert report(*asked, "--key", key)[0] == 0
    code, said = report("--check", profile, "--check", tmp_path / "forms" / "README.md", "--signer", public(key))
    assert (code, said.count("signed by ci@example.com, SHA256:")) == (0, 2), said
    assert report("--check", profile, "--signer", public(tmp_path / "other"))[0] == 1
    profile.write_text(profile.read_text() + " ")
    code, said = report("--check", profile)
    assert (code, "signature: speculation_profile.json.sig: no signature of this" in said) == (1, True), said
    assert report(*asked)[0] == 0
    assert "holds together; not signed" in report("--check", profile)[1]


def test_rates_of_drafts_that_stopped_by_themselves_are_not_replayed(make_pair, report_folder):
    """n-grams draft nothing where nothing matches; rates by depth would be of a drafter that always drafts."""
    pair = make_pair("ngram", report_folder=report_folder)
    result = CliRunner().invoke(app, ["lab", "replay", str(pair.folder), "--to", "vllm"])
    assert (result.exit_code, "chains that end by themselves" in " ".join(result.stderr.split())) == (2, True)
