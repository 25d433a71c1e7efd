"""Continuous batching: requests join and leave while others decode, and share pages of the KV cache. A
request gets the same bits whatever other requests run.

In the order to read: plain Python are `clients` (whose row goes first), `pages` (the page pool), `row` (one
answer, for the scheduler), `host_tier` (pages beyond the device), `prefix_cache`, `scheduler` (what prefills,
what decodes, in which pages) and `pacing` (how much of both is in a step). On the device: `engine_options`
(the arguments of an engine), `shape` (sizes), `device_programs`, `held_table` (what requests name),
`held_processors` and `held_vectors` (of callers), `host_pages`, `adapter_stack`, `engine_device`, `warm_up`
(when which programs are compiled); `messages` and `controller` let other processes repeat the calls of
process 0. An engine: `request_options`, `answers`, `requests`, `statistics`, `page_files`, `page_tiers`
(moves pages between device, host memory and files), `weight_switch` and `core` (one step), `async_sampling`,
`weight_updates`, `weight_receiver` (from trainers in other processes), `replay` (what came from which
weights), `held_adapters`, `pausing`, `part_method` (methods of these parts), `submission` (checks),
`engine_loop` (the queue, and the thread that takes the steps), `engine`. Several: `routing` (makes them);
`endpoint` (an engine that only prefills, or only decodes), `dispatcher` (which gets what; `serve` has them in
other processes too) and `engines`.

- A page is shared only if it has the bits that the row would compute itself (`prefix_cache`).
- Pages are allocated when they are needed. If none is left, the youngest row is preempted: it is swapped out
  to host memory and back as it was, so nothing is computed twice (`scheduler`).
- A step prefills at most one chunk and decodes for at most a second; then new requests, cancels and deadlines
  are handled (`pacing`, `core`).
- All settings of a row are arrays of fixed sizes, so no request compiles anything after the warm-up. An
  engine answers short greedy requests before the other programs are compiled (`warm_up`).
- The scheduler numbers pages and holds no array. So process 0 decides for several processes, and an engine
  that only decodes treats a row that another prefilled as a preempted one (`controller`, `endpoint`).
"""
