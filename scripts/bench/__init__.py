"""Helpers of bench.py, bench_pairs.py, compare_programs.py and compare_behaviour.py; README.md has figures."""
