"""The comparison of programs of two commits (scripts/compare_programs.py)."""

import jax
import pytest
import run_script
import tiny
from bench import program_costs

import xinfer_jax as xj

pytestmark = pytest.mark.oldest

STEP = dict(name="step", flops=8, temporaries=4)


@pytest.mark.parametrize(
    "after, different",
    [
        ([STEP], False),
        ([STEP | dict(name="decode_step")], False),
        ([STEP | dict(temporaries=5)], True),
        ([STEP, STEP], True),
        ([], True),
    ],
)
def test_a_program_differs_by_its_numbers_not_its_name(after, different, capsys):
    report = run_script.functions("compare_programs").report
    assert report({"llama": [STEP]}, {"llama": after}) == different
    assert ("DIFFERS" in capsys.readouterr().out) == different


def test_costs_are_those_of_the_compiled_program(tmp_path):
    model = xj.load_model(tiny.write(tmp_path))
    (found,) = program_costs.programs_of(program_costs.calls(model)["decode_step"])
    bytes_of_params = sum(x.nbytes for x in jax.tree.leaves(model.params))
    assert bytes_of_params < found["arguments"] < 2 * bytes_of_params
    assert found["flops"] > bytes_of_params // 4 and found["instructions"] > 100
