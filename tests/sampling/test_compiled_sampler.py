"""The sampler compiled for a GPU that is not present: what it launches, and what the host waits for."""

import importlib.util

import compiled_programs
import pytest


@pytest.mark.full
@pytest.mark.newest
@pytest.mark.skipif(not importlib.util.find_spec("jax_plugins"), reason="jax's CUDA plug-in is not installed")
def test_the_sampler_has_one_branch_and_sorts_few_numbers():
    """Counted for jax 0.12; another compiler may need a few operations more."""
    found = compiled_programs.run_support("sampler_on_h200")
    most = {"1 plain": 18, "64 all": 21}
    assert found.keys() == most.keys()
    for name, counts in found.items():
        print(name, counts)
        assert counts["launched"] <= most[name], (name, counts)
        assert counts["branches"] == 1 and counts["loops"] == 0, (name, counts)
        # Of repeated n-grams and of DRY.
        assert counts["loops_of_unknown_count"] == (2 if "all" in name else 0), (name, counts)
        assert counts["sorts_of_the_vocabulary"] == 0, (name, counts)
