"""Serve a model over HTTP, from a checkout: the installed command `xinfer-jax-serve`. See --help."""

import launcher  # noqa: F401  (finds the package where it is not installed)

from xinfer_jax.__main__ import serve

if __name__ == "__main__":
    serve()
