"""Measures the perplexity of a checkpoint on a text, from a checkout: `xinfer-jax perplexity`. See --help.

python scripts/perplexity.py --text=TEXT.txt --window=2048 --stride=512 --quantize=int8
"""

import launcher  # noqa: F401  (finds the package where it is not installed)

from xinfer_jax.__main__ import run_subcommand

if __name__ == "__main__":
    run_subcommand("perplexity")
