"""Generates text with a checkpoint, from a checkout: the installed command `xinfer-jax`. See --help.

python scripts/generate.py --prompt "What is the capital of France?"
"""

import launcher  # noqa: F401  (finds the package where it is not installed)

from xinfer_jax.__main__ import main

if __name__ == "__main__":
    main()
