"""The tables of the documentation, which scripts/make_tables.py writes: each function returns a table's lines."""
