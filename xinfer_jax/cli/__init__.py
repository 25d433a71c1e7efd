"""The commands `xinfer-jax`, `xinfer-jax-chat` and `xinfer-jax-batch`. The library does their work; no other
package but `serve` imports this one.

Read the files in this order: `terminal` (writes the answer, log lines and the status line), `process`
(Ctrl-C, closed streams, exit codes), `flag_parser` (flags with ranges, help and version), `process_group`
(the processes that run one model, and the settings that they must share), `channel` (the connection between
two of them), `coordinator` (starts and ends all of them), `supervisor` (the parent of each of them),
`startup` (the work before the first token); `answer`, `chat` and `batch` do the work of the commands;
`answer_flags`, `chat_flags` and `batch_flags` parse their flags.

- Flags are parsed and checked before jax is imported: 0.2 s instead of seconds. The names of the package load
  when they are used, and `answer` or `chat` is imported only with the work.
- The work runs in a second thread. Python runs signal handlers in the main thread alone, and not while XLA
  compiles there: a Ctrl-C waited 19.6 s. The handler ends the process by `os._exit(130)`, so no exception
  passes through jax and there is no traceback. Called from Python, the work stays in the caller's thread,
  where its jax contexts apply. A process that ends in order also leaves by `os._exit`, once running
  compilations are in the cache: the shutdown of jax took up to 0.7 s.
- Exit codes: 0; 2 with one line on standard error where the input is wrong; 1 where the reader of the answer
  has gone, or where lines of a file have an error in place of an answer; 130 at Ctrl-C. A traceback is a bug.
- The answer goes to standard output, everything about it to standard error.
- Several processes (`--coordinator`): each command is a parent without jax, which starts itself again as its
  child. The parents connect to the coordinator's address and compare flags, versions and checkpoints (digests
  of the small files, of headers and of samples of the numbers). Only then they start their children, which
  jax connects at a free port of the same address. Each connection begins with a proof that both ends know the
  run's secret, and each line is signed. The child gets the secret through a pipe.
- The coordinator, in process 0's parent, receives why each child ended (a signal, an exit code, jax's last
  log line) or that a parent is gone. It waits two seconds for other reports and sends the most likely cause
  to all: a kill before an exit, since the remaining processes end by errors of their own. jax's heartbeat
  finds a process that hangs. When process 0's child ends in order, all end with its exit code. Signals go to
  it, whichever process received them.
- What C++ writes (gloo prints a greeting on standard output) and tracebacks go to a child's log: its streams
  are replaced. jax's own handler of SIGTERM is disabled, since it would replace ours.
"""
