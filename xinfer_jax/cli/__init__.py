"""The commands of `xinfer-jax`, except `serve`. The library does their work; no other package except `serve`
imports this one.

In the order to read: `commands` (the table), `terminal` (writes the answer, log lines and the status line),
`process` (Ctrl-C, closed streams, exit codes), `flag_parser` (flags with ranges, help and version),
`process_group` (the processes that run one model, and the settings that they must share), `startup` (the work
before the first token). A command is two modules, for its work and its flags: `answer` and `answer_flags` for
`generate`, `chat` and `chat_flags`, `batch` and `batch_flags`, `quantize` and `quantize_flags`, `plan` and
`plan_flags`, `perplexity` and `perplexity_flags`, `bench` and `bench_flags` (with `machine_limits`).

- Flags are parsed and checked before jax is imported, so errors are printed at once.
- The work runs in a second thread, and a process ends by `os._exit`: a Ctrl-C need not wait for XLA
  (`process`).
- Exit codes: 0; 2 with one line on standard error where the input is wrong; 1 where the reader of the answer
  has gone, or where lines of a file have an error in place of an answer; 130 at Ctrl-C. A traceback is a bug.
- The answer goes to standard output, everything about it to standard error.
- Several processes (`--coordinator`): each command is a parent without jax, which starts itself again as its
  child once all parents have compared flags, versions and checkpoints (`process_group`, and `processes`).
"""
