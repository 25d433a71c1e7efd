"""The archives that users install: what they contain, and commands in an environment without the checkout.

Building them needs hatchling from a package index: without one the tests are skipped.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import gguf_files
import pytest
import tiny
from paths import ROOT
from random_adapters import random_adapter

import xinfer_jax as xj

pytestmark = [pytest.mark.full, pytest.mark.oldest]

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
QUESTION = "--prompt=What is the capital of France?"
ANSWER = "The capital of France is Paris."


def build(backend: Path, source: Path, out: Path, target: str) -> Path:
    """Builds an archive of a folder of sources, and returns its file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=source, env=os.environ | {"PYTHONPATH": str(backend)}, check=True)
    (file,) = out.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """The archive of the sources, and a wheel that is built from it."""
    folder = tmp_path_factory.mktemp("archives")
    backend = folder / "backend"
    requires = PYPROJECT["build-system"]["requires"]
    got = subprocess.run([*PIP, "install", "--target", backend, *requires], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"{requires} cannot be installed here: {got.stderr.strip()[-200:]}")
    sources = build(backend, ROOT, folder / "sources", "sdist")
    with tarfile.open(sources) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    wheel = build(backend, unpacked, folder / "from_sources", "wheel")
    direct = build(backend, ROOT, folder / "direct", "wheel")
    assert names_in(direct) == names_in(wheel)
    return sources, wheel


def names_in(archive: Path) -> set[str]:
    if archive.suffix == ".whl":
        return {*zipfile.ZipFile(archive).namelist()}
    with tarfile.open(archive) as file:
        return {name.partition("/")[2] for name in file.getnames()}


class Installed:
    """A new environment in which the wheel is installed. Other packages are those of this environment."""

    def __init__(self, folder: Path, wheel: Path):
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        self.folder = folder
        done = subprocess.run([*PIP, "--python", self.python, "install", "--no-deps", wheel])
        assert done.returncode == 0
        (packages,) = folder.glob("lib/python*/site-packages")
        # Without the links to checkouts that these folders hold, as Python reads such files in its own alone.
        others = [path for path in sys.path if "site-packages" in path]
        (packages / "others.pth").write_text("\n".join(others))
        left_out = ("PYTHONPATH", "PYTEST")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}

    def start(self, *command: object, **options) -> subprocess.Popen:
        program = self.folder / "bin" / str(command[0])
        return subprocess.Popen(
            [str(program), *map(str, command[1:])], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        )  # fmt: skip

    def run(self, *command: object) -> str:
        """Returns the output of a command. It fails if the exit code is not 0."""
        process = self.start(*command)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-2000:]
        return out


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory) -> Installed:
    return Installed(tmp_path_factory.mktemp("environment"), archives[1])


def test_a_wheel_has_one_top_level_name(archives):
    wheel = names_in(archives[1])
    own = {name for name in wheel if not name.startswith("xinfer_jax/")}
    assert {name.split("/")[0] for name in own} == {f"xinfer_jax-{PROJECT['version']}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in own)
    assets = ("assets/model.safetensors", "assets/mtp.safetensors")
    for name in ("py.typed", *assets, "estimates/model_shapes.json", "serve/page.html"):
        assert f"xinfer_jax/{name}" in wheel
    assert {f"xinfer_jax/{path}" for path in tracked("xinfer_jax") if path.suffix == ".py"} <= wheel
    assert {f"xinfer_jax/kernels_pallas/{path}" for path in tracked("kernels_pallas")} <= wheel


def test_the_archive_of_the_sources_has_tests_programs_and_changes(archives):
    sources = names_in(archives[0])
    for folder in ("tests", "scripts", "kernels_pallas"):
        assert {f"{folder}/{path}" for path in tracked(folder)} <= sources
    assert {"pyproject.toml", "README.md", "LICENSE", "xinfer_jax/CHANGELOG.md"} <= sources


def tracked(folder: str) -> set[Path]:
    """The files of a folder, without those that git does not keep."""
    files = (
        path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(ROOT / folder) for path in files}


def test_it_is_imported_from_the_environment_by_one_name(installed):
    program = (
        "import importlib.util as u, xinfer_jax, xinfer_jax.kernels_pallas as k;"
        "print(xinfer_jax.__file__, k.__file__, xinfer_jax.__version__, u.find_spec('kernels_pallas'))"
    )
    package, kernels, version, other = installed.run("python", "-c", program).split()
    assert Path(package).is_relative_to(installed.folder) and Path(kernels).is_relative_to(installed.folder)
    assert (version, other) == (PROJECT["version"], "None")
    types = installed.run("python", "-c", "import xinfer_jax.estimates, xinfer_jax.serve; print('found')")
    assert types == "found\n"


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_every_installed_name_starts(installed, name):
    version = installed.run(name, "--version")
    assert version.startswith(f"{name} {PROJECT['version']} (jax ")


def test_the_first_command_answers(installed):
    assert installed.run("xinfer-jax", QUESTION) == f"{ANSWER}\n"
    assert installed.run("python", "-m", "xinfer_jax", QUESTION) == f"{ANSWER}\n"


def test_a_quantized_checkpoint_is_written_and_answers(installed, tmp_path):
    flags = ("--quantize=int8", "--method=rtn", f"--output={tmp_path / 'int8'}")
    report = json.loads(installed.run("xinfer-jax", "quantize", *flags).splitlines()[-1])
    assert report["mib"] < 0.4 * report["mib_float32"]
    assert installed.run("xinfer-jax", f"--model={tmp_path / 'int8'}", QUESTION) == f"{ANSWER}\n"


def test_plan_and_perplexity_print(installed, tmp_path):
    assert "model=1 " in installed.run("xinfer-jax", "plan", "--model=qwen2.5-7b")
    (tmp_path / "text").write_text("What is the capital of France? It is Paris.\n" * 4)
    report = installed.run("xinfer-jax", "perplexity", f"--text={tmp_path / 'text'}").splitlines()[-1]
    assert json.loads(report)["perplexity"] > 1


def test_an_adapter_changes_the_answer(installed, tmp_path):
    config = xj.load_model().config
    xj.lora.save_adapter(random_adapter(config, 0, 2), config, tmp_path / "a")
    out = installed.run("xinfer-jax", QUESTION, f"--adapter={tmp_path / 'a'}", "--max_tokens=8")
    assert out.strip() and out != f"{ANSWER}\n"


def test_a_gguf_file_answers(installed, tmp_path):
    path = tmp_path / "model.gguf"
    metadata = gguf_files.tokenizer_metadata(tiny.tokenizer().to_str(), "gpt-2", 288)
    gguf_files.write(path, "qwen2", hf=dict(vocab_size=288), metadata=metadata)
    flags = ("--raw", "--max_tokens=4", "--output=json", "--prompt=the thing")
    assert len(json.loads(installed.run("xinfer-jax", f"--model={path}", *flags))["tokens"]) > 0


def test_a_server_answers_and_ends(installed):
    server = installed.start("xinfer-jax", "serve", "--port=0", "--rows=2", "--capacity=128", "--grace=5")
    try:
        lines = iter(server.stderr.readline, "")
        address = next(
            found for line in lines if (found := re.search(r"listening on http://(\S+:\d+)", line))
        )
        connection = http.client.HTTPConnection(address[1], timeout=120)
        body = {"messages": [{"role": "user", "content": QUESTION.partition("=")[2]}], "max_tokens": 16}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
        assert answer["choices"][0]["message"]["content"] == ANSWER
        connection.request("GET", "/")
        assert b"<html" in connection.getresponse().read()
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        assert server.returncode == 0
    finally:
        server.kill()
