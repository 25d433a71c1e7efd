"""What scripts/compare_behaviour.py records of a checkout; `records.py` is the process that it starts."""
