"""A sampling setting is one entry: rows, bodies, flags, generation_config.json and beams follow from it.
Every form of biases, allowed and forbidden ids gives the same bias.
"""

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_settings
from paths import ROOT, SUPPORT

import xinfer_jax as xj
from xinfer_jax.sampling.batched_settings import settings_per_row
from xinfer_jax.sampling.settings import SETTINGS


def test_fields_are_the_entries():
    """Other defaults than those of the entries would be sampled with."""
    fields = {field.name: field.default for field in dataclasses.fields(xj.SamplingConfig)}
    assert [*fields] == [*SETTINGS]
    for name, setting in SETTINGS.items():
        assert fields[name] == (setting.default if setting.valid else None), name


@pytest.mark.full
def test_a_setting_is_one_entry(tmp_path, good):
    """The test runs in a copy of the package, to which `toy_settings.py` adds settings."""
    package = tmp_path / "xinfer_jax"
    shutil.copytree(ROOT / "xinfer_jax", package, ignore=shutil.ignore_patterns("__pycache__"))
    toy_settings.add_to(package)
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    command = [sys.executable, SUPPORT / "toy_settings.py", good]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]


# --- biases -------------------------------------------------------------------------------------------------

V = 8
INF = np.inf
GIVEN = np.array([0.5, 0, -2, 0, 0, 3, 0, -INF], np.float32)
BIASES = {
    "none": None,
    "dict": {0: 0.5, np.int64(2): np.float32(-2), 5: 3, 7: -INF},
    "list": GIVEN.tolist(),
    "tuple": tuple(GIVEN.tolist()),
    "numpy": GIVEN,
    "float64": GIVEN.astype(np.float64),
    "jax": jnp.asarray(GIVEN),
    "one row": GIVEN[None],
    "numpy rows": np.stack([GIVEN, GIVEN]),
    "jax rows": jnp.stack([GIVEN, GIVEN]),
    "nested": [GIVEN.tolist()] * 2,
}
IDS = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "numpy": np.array,
    "int8": lambda ids: np.array(ids, np.int8),
    "jax": jnp.array,
    "scalars": lambda ids: [jnp.int32(i) for i in ids],
}


def bias(rows=2, **settings) -> np.ndarray:
    return np.asarray(settings_per_row(xj.SamplingConfig(**settings), rows, V).logit_bias)


def wanted(given, allowed=None, forbidden=()) -> np.ndarray:
    row = np.zeros(V, np.float32) if given is None else GIVEN.copy()
    for i in range(V):
        if (allowed is not None and i not in allowed) or i in forbidden:
            row[i] = -INF
    return np.stack([row, row])


@pytest.mark.parametrize("given, ids", [*zip(BIASES, itertools.cycle(IDS), strict=False)])
def test_every_form_gives_one_bias(given, ids):
    given = BIASES[given]
    ids = IDS[ids]
    got = bias(logit_bias=given, allowed_token_ids=ids([0, 2, 5]), forbidden_token_ids=ids([3]))
    np.testing.assert_array_equal(got, wanted(given, [0, 2, 5]))
    np.testing.assert_array_equal(
        bias(logit_bias=given, forbidden_token_ids=ids([0, 3])), wanted(given, None, [0, 3])
    )
    np.testing.assert_array_equal(
        bias(logit_bias=given, allowed_token_ids=range(1, 4)), wanted(given, range(1, 4))
    )


def test_traced_in_a_callers_jit():
    def traced(given, allowed):
        settings = xj.SamplingConfig(
            logit_bias=given, allowed_token_ids=allowed, forbidden_token_ids=np.array([2])
        )
        return settings_per_row(settings, 2, V).logit_bias

    for given in (GIVEN, np.stack([GIVEN, GIVEN]), BIASES["dict"]):
        for allowed in (np.array([0, 2, 5]), [0, 2, 5]):
            np.testing.assert_array_equal(jax.jit(traced)(given, allowed), wanted(given, [0, 5]))
    with pytest.raises(xj.InputError, match=r"logit_bias must be .* got numbers of the shape \[3\]"):
        jax.jit(traced)(np.zeros(3), [1])


def test_rows_with_different_kinds_of_settings():
    rows = [
        xj.SamplingConfig(logit_bias=jnp.asarray(GIVEN), forbidden_token_ids={0}),
        xj.SamplingConfig(allowed_token_ids=np.array([1, 2])),
        xj.SamplingConfig(),
    ]
    got = np.asarray(settings_per_row(rows, 3, V).logit_bias)
    want = [wanted(GIVEN, None, [0])[0], wanted(None, [1, 2])[0], np.zeros(V)]
    np.testing.assert_array_equal(got, want)
    mixed = jax.jit(lambda b: settings_per_row([xj.SamplingConfig(logit_bias=b), *rows[1:]], 3, V).logit_bias)
    np.testing.assert_array_equal(mixed(GIVEN), [GIVEN, *want[1:]])


BAD = {
    "shape": (dict(logit_bias=np.zeros(V + 1)), r"got numbers of the shape \[9\]"),
    "rows": (dict(logit_bias=np.zeros((3, V))), r"numbers of the shape \[8\] or \[2, 8\]"),
    "number": (dict(logit_bias=2.0), "logit_bias must be"),
    "text": (dict(logit_bias="5:1"), "logit_bias must be"),
    "ragged": (dict(logit_bias=[[1.0], [1.0, 2.0]]), "logit_bias must be"),
    "complex": (dict(logit_bias=np.zeros(V, complex)), "logit_bias must be"),
    "nan": (dict(logit_bias=[np.nan] * V), "must be finite or -inf"),
    "inf": (dict(logit_bias={1: INF}), "must be finite or -inf"),
    "above float32": (dict(logit_bias={1: 1e39}), "must be finite or -inf"),
    "list for a number": (dict(logit_bias={1: [2.0]}), "must be finite or -inf"),
    "text for an id": (dict(logit_bias={"1": 2.0}), "logit_bias must be a list of token ids"),
    "id outside": (dict(logit_bias={V: 2.0}), "logit_bias holds token id 8"),
    "ids an int": (dict(allowed_token_ids=3), "allowed_token_ids must be a list of token ids, got 3"),
    "ids a text": (dict(forbidden_token_ids="3"), "forbidden_token_ids must be a list of token ids, got '3'"),
    "ids bools": (dict(forbidden_token_ids=[True]), "forbidden_token_ids must be"),
    "ids a mask": (dict(allowed_token_ids=np.ones(V, bool)), "allowed_token_ids must be"),
    "ids floats": (dict(allowed_token_ids=[1.0]), "allowed_token_ids must be"),
    "ids nested": (dict(allowed_token_ids=[[1]]), "allowed_token_ids must be"),
    "ids negative": (dict(forbidden_token_ids=np.array([-1])), "forbidden_token_ids holds token id -1"),
    "ids none": (dict(allowed_token_ids=np.array([], int)), "allowed_token_ids is empty"),
    "ids both": (dict(allowed_token_ids={1, 2}, forbidden_token_ids=jnp.array([2])), "token id 2 is both"),
    "nothing left": (dict(allowed_token_ids=[1], logit_bias={1: -INF}), "leave no token"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_biases_raise(name):
    given, said = BAD[name]
    with pytest.raises(xj.InputError, match=said):
        bias(**given)
