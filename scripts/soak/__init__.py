"""Requests, attacks, schemas and processes of the soak_*.py programs."""
