"""Measures the speed and memory of a model, from a checkout: `xinfer-jax bench`. See --help.

python scripts/bench.py  # Qwen2.5-0.5B's shape, random weights
python scripts/bench.py --dtype=bfloat16 --quantize=int8
python scripts/bench.py --model=DIR --batch_sizes=1,8,32
"""

import launcher  # noqa: F401  (finds the package where it is not installed)

from xinfer_jax.__main__ import run_subcommand

if __name__ == "__main__":
    run_subcommand("bench")
