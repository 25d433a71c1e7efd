"""Counts what compiled GPU programs do, and checks cards."""
