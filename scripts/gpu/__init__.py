"""Counts the operations and bytes of compiled GPU programs, and checks cards."""
