"""Writes tests/golden: logits and greedy ids of Hugging Face transformers for every case of
tests/support/parity_cases.py.

Needs torch and transformers: `pip install -e '.[parity]'`, then `python scripts/make_golden.py`. One NAME.npz
per case:
  about      JSON: the config.json, the seed of the weights, versions, smallest gap of the two best logits
  prompt_I   token ids of prompt I
  at_I       positions of that prompt whose logits are stored
  logits_I   float32 [len(at_I), V]
  greedy_I   ids that follow (absent where the case does not continue this prompt)
"""

from launcher import InputError, start

# isort: split
import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
from absl import flags

_TESTS = Path(__file__).resolve().parents[1] / "tests"
_OUT = flags.DEFINE_string("out", str(_TESTS / "golden"), "Directory to write to.")
_CASES = flags.DEFINE_list(
    "cases",
    [],
    "Names of the cases to write. Default: all; files of cases that no longer exist are then deleted.",
)
POSITIONS = 6  # of each prompt whose logits are stored, with the first and the last
GAP = 0.01  # by which the best logit exceeds the second one at every token, else another seed is tried
DISTINCT = 5  # ids that every answer has at least
SEEDS = 100  # that are tried


def golden(cases, name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of one file, from the first seed whose greedy ids are unambiguous."""
    case = cases.CASES[name]
    config = case.config
    prompts = cases.prompts(case)
    for seed in range(SEEDS):
        model = cases.hf_model(case.hf, cases.random_tensors(config, seed))
        answers = {}
        for i in case.continued_prompts:
            ids, gaps = cases.hf_greedy(model, prompts[i])
            if gaps.min() < GAP or len(set(ids)) < DISTINCT:
                break
            answers[i] = (ids, float(gaps.min()))
        else:
            break
    else:
        raise InputError(f"{name}: none of {SEEDS} seeds will do: choose a smaller GAP or fewer DISTINCT ids")
    versions = {
        package: importlib.metadata.version(package) for package in ("transformers", "torch", "numpy")
    }
    about = dict(
        config=case.hf, seed=seed, versions=versions, gap=min((x for _, x in answers.values()), default=0.0)
    )
    arrays = {"about": np.array(json.dumps(about))}
    for i, prompt in enumerate(prompts):
        at = np.unique(np.linspace(0, len(prompt) - 1, POSITIONS).astype(np.int16))
        arrays |= {
            f"prompt_{i}": np.array(prompt, np.uint8),
            f"at_{i}": at,
            f"logits_{i}": cases.hf_logits(model, prompt)[at],
        }
        if i in answers:
            arrays[f"greedy_{i}"] = np.array(answers[i][0], np.uint8)
    return arrays


def main(argv: list[str]) -> None:
    sys.path.insert(0, str(_TESTS / "support"))
    import parity_cases as cases
    import transformers

    transformers.logging.set_verbosity_error()
    if unknown := set(_CASES.value) - cases.CASES.keys():
        raise InputError(f"unknown cases: {', '.join(sorted(unknown))}")
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    for name in _CASES.value or cases.CASES:
        arrays = golden(cases, name)
        np.savez_compressed(out / f"{name}.npz", **arrays)
        about = json.loads(str(arrays["about"]))
        print(f"{name:32} seed {about['seed']:2}  gap {about['gap']:.3f}", flush=True)
    if not _CASES.value:
        for stale in {path.stem for path in out.glob("*.npz")} - cases.CASES.keys():
            (out / f"{stale}.npz").unlink()
    files = list(out.glob("*.npz"))
    print(f"{len(files)} files, {sum(file.stat().st_size for file in files) / 1024:.0f} KiB in {out}")


if __name__ == "__main__":
    start(main)
