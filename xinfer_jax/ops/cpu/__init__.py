"""Forms of operations for CPUs: `attention_by_row` attends row by row."""
