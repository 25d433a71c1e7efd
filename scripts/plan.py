"""Estimates on how many devices a model fits, from a checkout: `xinfer-jax plan`. See --help.

python scripts/plan.py --model=qwen2.5-72b --devices=8xh200 --context=32768 --rows=64 --weights=int8
"""

import launcher  # noqa: F401  (finds the package where it is not installed)

from xinfer_jax.__main__ import run_subcommand

if __name__ == "__main__":
    run_subcommand("plan")
