"""The commands `xinfer-jax`, `xinfer-jax-chat` and `xinfer-jax-batch`. Everything they do is the library's;
no other room imports this one.

In the order to read: `terminal` writes the answer, lines about it, and the status line; `process` minds
Ctrl-C, closed streams and exit codes; `program` defines flags with their ranges, help and version; `group`
says which processes run one model, and what must be alike in them; `channel` is the connection between two of
them; `watch` is the parent of such a process;
`startup` is what they do before the first token; `answer`, `chat` and `batch` do the work of the commands;
`answer_flags`, `chat_flags` and `batch_flags` read their flags.

- Flags are read and refused before jax is imported, in 0.2 s instead of seconds: the package's names load
  when they are used, and `answer` or `chat` is imported with the work.
- The work runs in a second thread. Python's signal handlers run in the main thread alone, and not while XLA
  compiles there: a Ctrl-C waited 19.6 s. The handler ends the process by `os._exit(130)`, so no exception
  travels through jax and there is no traceback. Called from Python the work stays in the caller's thread,
  whose jax contexts hold. At its end too the process leaves by `os._exit`, once compilations under way are in
  the cache: taking jax down took up to 0.7 s.
- Exit codes: 0; 2 with one line on standard error where the input is at fault; 1 where nobody reads the
  answer, or lines of a file have an error in place of one; 130 at Ctrl-C. A traceback is a fault of ours.
- The answer goes to standard output, everything about it to standard error.
- Several processes (`--coordinator`): each command is a parent without jax, which starts itself again as its
  child. The parents meet at the coordinator's address, compare flags, versions and checkpoints (digests of
  the small files, the headers and samples of the numbers), and only then start their children, which jax
  joins at a free port of the same address. Each connection begins with a proof of the run's secret, and each
  of its lines is signed; the child gets the secret through a pipe.
- Process 0's parent hears why each child ended (a kill, an exit, what jax said) or that a parent is gone,
  waits two seconds for other reasons, and tells all which came first in rank: a kill before an exit,
  since what is left ends by errors of its own. A process that hangs is found by jax's heartbeat. As process
  0's child ends in order, so do all, with its exit code; signals go to it, wherever they came in.
- What C++ writes (gloo greets on standard output) and tracebacks go to a child's log: its streams are moved.
  jax's own handler of SIGTERM is switched off, which would take the place of ours.
"""
