"""The commands of `xinfer-jax`, except `serve`. The library does their work. No other package except `serve`
imports this one.

Reading order:

- `commands` is the table of the commands.
- `terminal` writes the answer, log lines and the status line.
- `process` handles Ctrl-C, closed streams and exit codes.
- `flag_parser` has flags with ranges, help and version.
- `process_group` has the processes that run one model, and the settings that they must share.
- `startup` does the work before the first token.

A command is two modules, one for its work and one for its flags:

- `answer` and `answer_flags` are `generate`. `chat` and `chat_flags` are `chat`.
- `batch` and `batch_flags` are `batch`. `quantize` and `quantize_flags` are `quantize`.
- `plan` and `plan_flags` are `plan`. `perplexity` and `perplexity_flags` are `perplexity`.
- `bench` and `bench_flags` (with `machine_limits`) are `bench`.

Decisions:

- Flags are parsed and checked before jax is imported, so errors are printed at once.
- The work runs in a second thread, and a process ends by `os._exit`: a Ctrl-C need not wait for XLA
  (`process`).
- The exit code is 0, or one of these. 2: the input is wrong, and standard error has one line. 1: the reader
  of the answer has gone, or lines of a file have an error in place of an answer. 130: Ctrl-C. A traceback is
  a bug.
- The answer goes to standard output, and everything about it goes to standard error.
- With several processes (`--coordinator`), each command is a parent without jax. It starts itself again as
  its child once all parents have compared flags, versions and checkpoints (`process_group`, and `processes`).
"""
