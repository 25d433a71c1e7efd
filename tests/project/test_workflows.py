"""The files in .github: they parse, and call steps of .ci/run that exist. Links and placeholders agree."""

import re

import pytest
from paths import ROOT

yaml = pytest.importorskip("yaml", reason="the workflows are YAML: pip install pyyaml")

pytestmark = [pytest.mark.unit, pytest.mark.oldest]

GITHUB = ROOT / ".github"
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def read(name: str) -> dict:
    return yaml.safe_load((GITHUB / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(GITHUB.rglob("*.yml")), ids=lambda path: path.name)
def test_files_parse(path):
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def test_ci_runs_steps_that_exist():
    jobs = read("workflows/ci.yml")["jobs"]
    steps = jobs["step"]["strategy"]["matrix"]["step"]
    assert {*steps} == {*re.findall(r"^    (\w+)\)", CI, re.M)} - {"all"}
    for job in jobs.values():
        assert any(step.get("run", "").startswith(".ci/run") for step in job["steps"])


def test_a_release_is_tried_before_it_is_published():
    jobs = read("workflows/release.yml")["jobs"]
    assert jobs["publish"]["needs"] == ["build", "try"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in str(jobs) and "secrets." not in str(jobs)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
    assert jobs["try"]["strategy"]["matrix"]["python"] == classified


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_to_files(name):
    links = re.findall(r"\]\(([^)#]+)", (GITHUB / name).read_text(encoding="utf-8"))
    files = [link for link in links if not link.startswith("https://")]
    assert files and all((GITHUB / link).exists() for link in files)


def test_one_placeholder_stands_for_the_owner():
    """`sed -i s/OWNER/name/` of the files that pyproject.toml names fills all links."""
    files = ["pyproject.toml", ".github/ISSUE_TEMPLATE/config.yml"]
    text = (ROOT / files[0]).read_text(encoding="utf-8")
    assert f"sed -i s/OWNER/name/ {' '.join(files)}`" in text
    for file in files:
        links = re.findall(r"https://github\.com/(\w+)/xinfer_jax", (ROOT / file).read_text(encoding="utf-8"))
        assert links and {*links} == {"OWNER"} or "OWNER" not in links
