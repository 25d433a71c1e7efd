"""Simulates engines, and prefill and decode apart; README.md says in which order to read it."""
