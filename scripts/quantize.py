"""Writes a checkpoint with quantized weights, from a checkout: `xinfer-jax quantize`. See --help.

python scripts/quantize.py --output=DIR    # the bundled model, int4, by AWQ
python scripts/quantize.py --model=DIR --output=DIR --quantize=int8 --method=rtn --eval=TEXT.txt
python scripts/quantize.py --output=DIR --quantize=int8 --activations=int8 --method=rtn --eval=sampled
python scripts/quantize.py --model=DIR --output=DIR --format=compressed-tensors    # for transformers too
"""

import launcher  # noqa: F401  (finds the package where it is not installed)

from xinfer_jax.__main__ import run_subcommand

if __name__ == "__main__":
    run_subcommand("quantize")
