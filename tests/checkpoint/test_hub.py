"""Checkpoints of the hub: pinned revisions, subfolders, files that were downloaded before, and errors.

No test reaches the hub. The tests of the cache run the code of huggingface_hub on a cache that they write.
The other tests stand in for the download, and check its arguments.
"""

import json
import os
import shutil
import subprocess
import sys

import huggingface_hub
import jax
import numpy as np
import pytest
import tiny
from huggingface_hub import constants, errors

import xinfer_jax as xj
from xinfer_jax.formats.hub import split_revision

pytestmark = pytest.mark.oldest

NAME = "owner/name"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Returns a cache of huggingface_hub with two revisions of a model, which differ in their weights, and
    with an adapter in a subfolder.
    """
    path = tmp_path_factory.mktemp("hub")
    repository = path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    for seed, (revision, commit) in enumerate(COMMITS.items()):
        (repository / "refs" / revision).write_text(commit)
        folder = repository / "snapshots" / commit
        tiny.write(folder, weights=tiny.tensors(seed=seed), shards=1 + seed)
        model = xj.load_model(folder, dtype="float32")
        adapter = xj.lora.init_adapter(model.config, jax.random.key(seed), 2 + seed, ["q"])
        xj.lora.save_adapter(adapter, model.config, folder / "adapters" / "one", base=NAME)
    return path


@pytest.fixture
def cached(cache, monkeypatch):
    """Lets huggingface_hub use the cache of the tests. Returns the directory of its repository."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache / "models--owner--name"


@pytest.fixture
def download(monkeypatch, tmp_path):
    """Stands in for the download: records its arguments, and returns a directory with a model."""
    calls = []

    def snapshot_download(repo_id, **arguments):
        calls.append(dict(repo_id=repo_id, **arguments))
        return str(tmp_path / COMMITS["v1"])

    tiny.write(tmp_path / COMMITS["v1"] / "sub" / "folder")
    tiny.write(tmp_path / COMMITS["v1"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def weights_of(seed):
    return tiny.tensors(seed=seed)[tiny.EMBED]


# --- by the code of huggingface_hub, from its cache ---------------------------------------------------------


@pytest.mark.parametrize(
    "name, revision, seed",
    [
        (NAME, None, 0),
        (NAME, "main", 0),
        (NAME, "v1", 1),
        (NAME, COMMITS["v1"], 1),
        (f"{NAME}@v1", None, 1),
        (f"{NAME}@{COMMITS['v1']}", None, 1),
        (f"{NAME}@v1", "v1", 1),
    ],
)
def test_a_revision_pins_the_files(cached, name, revision, seed):
    model = xj.load_model(name, dtype="float32", revision=revision, local_files_only=True)
    np.testing.assert_array_equal(model.params["embed"]["weight"], weights_of(seed))
    assert model.name == NAME  # the name, which an adapter's base is compared with


def test_an_adapter_is_pinned_too(cached):
    config = xj.load_model(NAME, local_files_only=True).config
    asked = dict(subfolder="adapters/one", local_files_only=True)
    for revision, rank in (("main", 2), ("v1", 3)):
        by_argument = xj.lora.load_adapter(config, NAME, revision=revision, **asked)
        by_name = xj.lora.load_adapter(config, f"{NAME}@{revision}", **asked)
        assert {len(pair.a) for pair in by_argument.matrices.values()} == {rank}
        jax.tree.map(np.testing.assert_array_equal, by_argument, by_name)


def test_files_that_were_not_downloaded(cached):
    for revision in ("v2", "c" * 40):
        with pytest.raises(xj.InputError, match="local_files_only is True: load it once without local_files"):
            xj.load_model(NAME, revision=revision, local_files_only=True)
    with pytest.raises(xj.InputError, match="model 'owner/other' does not exist here, and the local cache"):
        xj.load_model("owner/other", local_files_only=True)
    with pytest.raises(xj.InputError, match="has no folder 'sub': give a subfolder that it has"):
        xj.load_model(NAME, subfolder="sub", local_files_only=True)


def test_weights_that_were_not_downloaded(cached, tmp_path, monkeypatch):
    copied = tmp_path / "models--owner--name"
    shutil.copytree(cached, copied)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (copied / "snapshots" / COMMITS["main"] / "model.safetensors").unlink()
    with pytest.raises(
        xj.InputError, match="has no weights in the local cache .* load it once without local_fil"
    ):
        xj.load_model(NAME, local_files_only=True)


def test_offline_the_remedy_is_named(cache, tmp_path):
    """The test runs in its own process, since huggingface_hub reads the variable when it is imported."""
    program = "import xinfer_jax as xj; print(xj.load_model('owner/name@v1').name); xj.load_model('owner/x')"
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | offline, capture_output=True, text=True, timeout=300
    )
    assert run.stdout == f"{NAME}\n"
    assert run.stderr.rstrip().endswith(
        "InputError: model 'owner/x' does not exist here, and the local cache of the hub lacks it or some of"
        " its files, while HF_HUB_OFFLINE is set: unset HF_HUB_OFFLINE to download it, or give a directory"
    )


# --- what the download is asked for -------------------------------------------------------------------------


def test_the_arguments_of_the_download(download):
    xj.load_model(f"{NAME}@refs/pr/1", token="secret")
    (call,) = download
    assert call["revision"] == "refs/pr/1" and call["token"] == "secret" and not call["local_files_only"]
    assert call["repo_id"] == NAME and "config.json" in call["allow_patterns"]


def test_a_subfolder_of_a_repository(download):
    xj.load_model(NAME, revision="v1", subfolder="sub/folder")
    (call,) = download
    assert {pattern.startswith("sub/folder/") for pattern in call["allow_patterns"]} == {True}


def test_a_subfolder_of_a_directory(tmp_path):
    tiny.write(tmp_path / "model" / "sub")
    xj.load_model(tmp_path / "model", subfolder="sub", local_files_only=True)
    message = (
        f"model {str(tmp_path / 'model')!r} has no folder 'other': give a subfolder that it has, or none"
    )
    with pytest.raises(xj.InputError) as found:
        xj.load_model(tmp_path / "model", subfolder="other")
    assert str(found.value) == message


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        (f"{NAME}@v1", dict(revision="v2"), "and revision='v2' name two revisions: give one of them"),
        (f"{NAME}@", {}, "has no revision after the @: give owner/name@main, or owner/name"),
        (NAME, dict(revision=""), "revision must be a branch, a tag or a commit, got ''"),
        (NAME, dict(revision=1), "revision must be a branch, a tag or a commit, got 1"),
        (NAME, dict(token=1), "token must be a text, True, False or None, got int"),
        (NAME, dict(subfolder="../x"), "subfolder must be a relative path within the checkpoint, got '../x'"),
        (NAME, dict(subfolder="/x"), "subfolder must be a relative path within the checkpoint, got '/x'"),
        (NAME, dict(subfolder=None), "subfolder must be a relative path within the checkpoint, got None"),
        (NAME, dict(local_files_only=1), "local_files_only must be True or False, got 1"),
        (
            None,
            dict(revision="v1"),
            "the bundled checkpoint has no revision and no subfolder: give the model",
        ),
        ("nowhere@main", {}, "model 'nowhere@main' does not exist: give a directory, "),
    ],
)
def test_arguments_that_contradict(download, name, arguments, message):
    with pytest.raises(xj.InputError) as found:
        xj.load_model(name, **arguments)
    assert message in str(found.value)
    assert not download


def test_a_directory_has_no_revision(download, tmp_path, monkeypatch):
    tiny.write(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    message = "is a local directory, which has no revision 'v1': leave the revision out"
    for name, arguments in (
        (NAME, dict(revision="v1")),
        (f"{NAME}@v1", {}),
        (tmp_path / "owner", dict(revision="v1")),
        (f"{tmp_path / 'owner'}@v1", {}),
    ):
        with pytest.raises(xj.InputError, match=message):
            xj.load_model(name, **arguments)
    assert xj.load_model(NAME).name == NAME and not download
    (tmp_path / "x.gguf").touch()
    with pytest.raises(xj.InputError, match="the file 'x.gguf' has no revision and no subfolder"):
        xj.load_model("x.gguf", revision="v1")


def test_a_directory_whose_name_has_an_at(tmp_path):
    path = tiny.write(tmp_path / "owner" / "name@v1")
    assert xj.load_model(path).name == str(path)
    assert split_revision(str(path)) == (str(path), None)


@pytest.mark.parametrize(
    "error, remedy",
    [
        (errors.GatedRepoError, "accept its terms on its page on the hub, and log in with `hf auth login`"),
        (errors.RepositoryNotFoundError, "check the name; if the repository is private, log in with"),
        (errors.RevisionNotFoundError, "give a branch, a tag or a commit that the repository has"),
        (errors.LocalEntryNotFoundError, "check the connection, or give a directory"),
    ],
)
def test_each_failure_has_its_remedy(monkeypatch, error, remedy):
    def snapshot_download(*_, **__):
        failure = error.__new__(error)  # its arguments differ between versions of huggingface_hub
        failure.args = ("404 Client Error.",)
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(xj.InputError) as found:
        xj.load_model(NAME, revision="v1", token="secret")
    assert remedy in str(found.value) and "secret" not in str(found.value)


# --- commands -----------------------------------------------------------------------------------------------


def test_a_command_takes_a_revision(command, cached, monkeypatch):
    """The revision is given by flag and by name: the answers of two revisions of random weights differ."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ask = "--prompt=the thing", "--raw", "--output=json"
    with_flag = command(f"--model={NAME}", "--revision=v1", *ask)
    with_name = command(f"--model={NAME}@v1", *ask)
    other = command(f"--model={NAME}@main", *ask)
    tokens = [json.loads(out)["tokens"] for _, out, _ in (with_flag, with_name, other)]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model=DIRECTORY", "--revision=v1"], "is a local directory, which has no revision 'v1'"),
        (["--revision=v1"], "the bundled checkpoint has no revision and no subfolder"),
        (["--model=owner/name@v1", "--revision=v2"], "and revision='v2' name two revisions: give one"),
        (["--revision="], "--revision=: give a branch, a tag or a commit"),
        (["--model=owner/name@"], "has no revision after the @"),
    ],
)
def test_wrong_revisions_of_a_command(command, tmp_path, flags, message):
    flags = [flag.replace("DIRECTORY", str(tmp_path)) for flag in flags]
    code, out, err = command("--prompt=a", *flags)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("xinfer-jax: ") and message in err
