"""The records of scripts/compare_behaviour.py. It starts `records.py` as a process for each checkout."""
