"""Helpers of bench_pairs.py and the scripts that compare commits. README.md has figures."""
