"""`python -m xinfer_jax`: the same as the installed command `xinfer-jax`."""

from .cli import main

main()
