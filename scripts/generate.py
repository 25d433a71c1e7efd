"""Generates text with a checkpoint: `python scripts/generate.py --prompt "What is the capital of France?"`.
See --help.
"""

from xinfer_jax.cli import main

if __name__ == "__main__":
    main()
