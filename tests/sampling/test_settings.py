"""A sampling setting is one entry: rows, bodies, flags, generation_config.json and beams follow from it."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
import tiny
import toy_settings
from paths import ROOT, SUPPORT

import xinfer_jax as xj
from xinfer_jax.sampling.settings import SETTINGS


def test_fields_are_the_entries():
    """Other defaults than those of the entries would be sampled with."""
    fields = {field.name: field.default for field in dataclasses.fields(xj.SamplingConfig)}
    assert [*fields] == [*SETTINGS]
    for name, setting in SETTINGS.items():
        assert fields[name] == (setting.default if setting.valid else None), name


@pytest.fixture(scope="module")
def found(tmp_path_factory, good):
    """What `toy_settings.py` prints with a copy of the package that has its settings."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "xinfer_jax"
    shutil.copytree(ROOT / "xinfer_jax", package, ignore=shutil.ignore_patterns("__pycache__"))
    toy_settings.add_to(package)
    paths = os.pathsep.join(map(str, (folder, ROOT)))
    command = [sys.executable, SUPPORT / "toy_settings.py", good]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout)


def listed(*texts: str) -> list[int]:
    tokenizer = tiny.tokenizer()
    return [i for i in range(tokenizer.get_vocab_size()) if any(x in tokenizer.decode([i]) for x in texts)]


@pytest.mark.full
def test_rows_and_processors(found):
    assert found["rows"] == dict(
        toy_boost=["float32", [2]], toy_places=["int32", [2]], toy_switch=["bool", [2]],
        toy_texts=["bool", [2, tiny.CONFIG["vocab_size"]]],
    )  # fmt: skip
    assert found["row_values"] == [[1, 0], [2, 3], [True, False]]
    assert found["kept"] == [[0, 0], [3, 3], [False, False]]
    boost, places, switch = found["row_errors"]
    assert boost.startswith("toy_boost must be from 0 (off) to 1, got")
    assert places.startswith("toy_places must be a whole number") and "true or false" in switch
    assert found["tokens"][1] == found["plain_tokens"][0] == found["plain_tokens"][1]
    assert found["tokens"][0] != found["tokens"][1]
    assert {*found["tokens"][0]} <= {*listed("an", "in")}


@pytest.mark.full
def test_bodies(found):
    texts = listed("an", "in")
    assert found["body"] == dict(toy_boost=1, toy_places=2, toy_switch=True, toy_texts=texts)
    assert found["off"] == dict(toy_boost=0, toy_places=3, toy_switch=0, toy_texts=None)
    assert found["default_texts"] == found["default_flags"] == listed("th")
    boost, places, switch, texts, many, unfound, unknown = found["body_errors"]
    assert boost.startswith("toy_boost: toy_boost must be from 0 (off) to 1")
    assert places.startswith("toy_n: toy_n must be a whole number from 0 to 9")
    assert switch.startswith("toy_switch: toy_switch must be true or false")
    assert texts.startswith("toy_texts: toy_texts must be a text or a list of texts")
    assert many.startswith("toy_texts: toy_texts has 17 texts, more than the limit of 16")
    assert unfound.startswith("toy_texts: toy_texts: no token contains 'no token has this'")
    assert unknown is None  # `toy_places` is nobody's field


@pytest.mark.full
def test_flags(found):
    texts = listed("an", "in")
    assert found["flags"] == dict(toy_boost=0.5, toy_places=4, toy_switch=True, toy_texts=texts)
    assert found["no_flags"] == found["off"]
    boost, places, switch = found["flag_errors"]
    assert "--toy_boost=2: give a number from 0 (off) to 1" in boost
    assert "--toy_n=-1: give a whole number" in places and "true or false" in switch
    assert found["help"] == [True] * 4


@pytest.mark.full
def test_generation_config(found):
    wanted = dict(toy_boost=0, toy_places=3, toy_switch=True, toy_texts=None)
    assert found["generation_config"] == wanted | dict(toy_boost=0.5)
    text, switch, large = found["generation_errors"]
    assert text.startswith("generation_config.json: toy_boost must be a number, got 'x'")
    assert switch.startswith("generation_config.json: toy_switch must be true or false")
    assert large.startswith("toy_boost must be from 0 (off) to 1")


@pytest.mark.full
def test_beams(found):
    assert found["beams"] == "toy_boost does not combine with beams: leave it out"
    assert found["some_beams"] is None
