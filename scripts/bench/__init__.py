"""Helpers of bench.py, bench_pairs.py and compare_programs.py; README.md has figures."""
