"""Batch inference: a file of prompts in, a file of answers out.

Reading order:

- `input_lines` parses the input.
- `resumable_output` writes the output and its progress file.
- `line_request` turns one line into engine requests and one output line.
- `run_settings` lists the settings on which answers depend.
- `run_batch` keeps the engine busy.
- `dataset` answers batches of columns.

Decisions:

- A run may be killed at any moment. Started again, it ends with the same bytes: the engine gives a line the
  same bits next to any other requests, and the random key of a line depends only on the seed and the line's
  custom_id, or its number.
- Once a second the run syncs the output to disk, then appends a record for each line that is safe. The next
  start truncates lines without a record and answers them again.
- If only a version or the machine differs from the earlier run, the run continues with a warning: the user
  may prefer slightly different last bits to a new run.
- A line that cannot be served gets an output line with the reason, which depends on the line alone. If there
  are such lines, also of an earlier run, the command exits with code 1. The run is complete all the same.
- Output lines have no times and no cached_tokens, which differ between runs. The report has them.
"""
