"""Continuous batching: requests join and leave while others decode, and share pages of the KV cache. A
request gets the same bits whatever other requests run.

Reading order, plain Python on the host:

- `clients` decides whose row goes first.
- `pages` is the page pool, `row` is one answer as the scheduler sees it, and `host_tier` has pages beyond the
  device.
- `prefix_cache` finds pages of prompts that begin alike.
- `scheduler` decides which rows prefill, which rows decode, and in which pages.
- `pacing` decides how much of both is in a step, and `draft_pacing` how many draft tokens.

On the device:

- `engine_options` has the arguments of an engine, and `shape` has its sizes.
- `device_programs` has the programs, and `head_programs` those of a draft head.
- `held_table` has the things that requests name. `held_processors` and `held_vectors` have
  the functions and vectors of callers.
- `host_pages` and `adapter_stack` are arrays of pages and of adapters.
- `engine_device` has all arrays of an engine. `warm_up` decides when which programs are compiled.
- `messages` and `controller` let other processes repeat the calls of process 0.

An engine:

- `request_options`, `answers`, `requests` and `statistics` are the objects that callers see.
- `page_files` and `page_tiers` move pages between device, host memory and files.
- `weight_switch` and `core` take one step.
- `async_sampling` gives answers as arrays, in event loops, for rollouts.
- `weight_updates` replaces weights, `weight_receiver` takes them from trainers in other processes, and
  `replay` computes again which tokens came from which weights.
- `held_adapters` has the adapters, and `pausing` pauses. `part_method` has the methods of these parts.
- `submission` checks requests. `engine_loop` has the queue, and the thread that takes the steps.
- `engine` is an engine on one set of devices.

Several engines:

- `routing` makes them.
- `endpoint` is an engine that only prefills, or only decodes.
- `dispatcher` decides which engine gets which job. `serve` has engines in other processes too.
- `engines` is the public `Engine`.

Decisions:

- A page is shared only if it has the bits that the row would compute itself (`prefix_cache`).
- Pages are allocated when they are needed. If none is left, the youngest row is preempted: it is swapped out
  to host memory and later swapped in as it was, so nothing is computed twice (`scheduler`).
- A step prefills at most one chunk and decodes for at most a second. Then new requests, cancels and deadlines
  are handled (`pacing`, `core`).
- All settings of a row are arrays of fixed sizes, so no request compiles anything after the warm-up. An
  engine answers short greedy requests before the other programs are compiled (`warm_up`).
- The scheduler numbers pages and holds no array. So process 0 decides for several processes, and an engine
  that only decodes treats a row that another engine prefilled as a preempted row (`controller`, `endpoint`).
"""
