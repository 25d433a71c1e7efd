"""Forms of operations for CPUs: `attention` attends row by row."""
