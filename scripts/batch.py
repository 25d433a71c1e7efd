"""Answer a file of prompts, from a checkout: the installed command `xinfer-jax-batch`. See --help."""

import launcher  # noqa: F401  (finds the package where it is not installed)

from xinfer_jax.__main__ import batch

if __name__ == "__main__":
    batch()
