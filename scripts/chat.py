"""Talk to a model, from a checkout: the installed command `xinfer-jax-chat`. See --help."""

import launcher  # noqa: F401  (finds the package where it is not installed)

from xinfer_jax.__main__ import chat

if __name__ == "__main__":
    chat()
