"""Counts what compiled TPU programs do: bytes of HBM, copies, times."""
