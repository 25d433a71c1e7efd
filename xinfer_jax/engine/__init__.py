"""Continuous batching: requests join and leave while others decode and share pages of the KV cache. Each
request gets the same bits whatever other requests run.

In the order to read:

- `clients`: whose row goes first · `pages`: the page pool · `row`: one answer, for the scheduler ·
  `host_tier`: pages beyond the device · `prefix_cache`: which pages a prompt begins with · `scheduler`: what
  prefills, what decodes and in which pages · `pacing`: how much of both is in a step; all in plain Python
- `shape`: the sizes of an engine · `device_programs`, `states`, `host_pages`, `device`: the model, its pages,
  recurrent states and rows ·
  `layerwise_device`: the same on a CPU · `warm_up`: when which programs are compiled
- `messages`, `controller`: other processes repeat the device calls of process 0 · `page_transfer`: arrays
  from one process to another
- `requests`: what callers get · `statistics`: counters · `page_files`: pages in files · `page_tiers`: moves
  pages between device, host memory and files · `core`: one step · `request_queue`: what callers want before
  the next step · `submission`: checks of prompts and options · `engine`: the thread that takes the steps
- `prefilled_row`: a row between two engines · `role_cores`: the steps of an engine that only prefills, or
  only decodes · `routing`: what several engines need · `disaggregated`: engines that
  prefill, and engines that decode · `engines`: several engines behind one queue

Decisions:

- A page is shared only if its keys have the bits that the row would compute itself. The hash of a page
  covers the salt, all tokens up to its end, and the program that prefilled each page. The length of the
  prompt alone decides which program computes a token, so the prefix cache reuses whole chunks only.
  Prompts with log-probabilities have a program, and pages, of their own. Requests with `share_answers` also
  share pages that decoding wrote, by hashes of the tokens alone.
- Rows of models with linear attention have a state in their slot, beside pages. Programs of prompts take it
  out of the slot and put it back. A preempted row's state goes to host memory with its pages, and to another
  engine with them. Cached pages are reused only up to a snapshot of the state, which is taken at the end of
  a full prefill chunk, so at a multiple of 64 tokens counted from position 0. There are as many snapshots as
  slots, at least four; the least recently used is replaced. So a prompt takes few: at its last full chunk,
  where it leaves the cached pages of earlier prompts (others will too), and before at distances that grow by
  a factor. Decoding takes none, also with `share_answers`.
- Pages are allocated when they are needed, and older rows win: the youngest row is swapped out to host
  memory and back as it was, so nothing is computed twice. A row gets a slot only if its whole prompt and
  one more page for every other row fit, and preempts no row for it: few rows are preempted soon after they
  began.
- With `host_pages` a page that the prefix cache evicts is copied to host memory before it is written again,
  eight in a program. The scheduler numbers these pages as it numbers those of the device; so over several
  processes each keeps its own parts. A row that begins with such pages gets device pages for them as for a
  prompt, which preempts no row, and loads eight of them in the place of a prefill chunk, so no decoding row
  waits longer for it than for a chunk. They are the same bits, so hits count as on the device: whole chunks,
  never the last.
- With `page_directory` saved pages are also written to files by a thread, eight at a time; those that are
  evicted before are not written. A row whose next pages are in files waits apart while a thread reads them
  into host memory, and other rows go on. It waits no longer than prefilling these tokens would take at the
  last prompt's rate; what comes later is there for others. Only as many rows as there are slots wait so.
- A page file's name is a digest of the salt, the tokens, the programs, and all else that its bits depend on:
  weights (64 numbers of each array), versions, device kind or CPU features and threads, cache dtype and form,
  capacity, impl, XLA's flags. Its HMAC, which is its checksum too, covers name and bytes. A file that does
  not verify is a miss, is reported once, and is written anew. Files are complete before they get their name.
  If writing fails, as on a full disk, none is written for a minute. The salt is an HMAC with the directory's
  secret, so names reveal no prompt.
- Several engines have each their own host pages: a request goes to the engine that knows its prefix, and one
  memory for all would need locks in every step. Files they share, as other runs do; new files of others are
  found within a minute.
- No later row overtakes a row that waits for pages, or small requests would starve large ones.
- Clients (`submit(client=…)`) share the slots equally. While a client with less than its share waits, rows
  of clients with more are preempted, the youngest first, and continue later with the same bits. Within the
  shares, the client with the fewest computed tokens goes first, so the age of a client's backlog does not
  count. Of a request's answers, those beyond the first few (as many as there are slots) go after the first
  answers of its client's other requests.
- A step prefills at most one chunk before new requests, cancels and deadlines are handled, and decodes
  for at most a second.
- The text of an answer costs the same for each token, whatever its stop strings are.
- If the numbers of a row are not finite, none of its pages is found again in any tier, also those that it
  found: one of them may be the cause, and the next request computes it anew.
- Settings, keys, limits, biases and EOS ids of a row are arrays of fixed sizes, with all sampling settings,
  so after the warm-up no request compiles anything. A row's bits do not depend on the number of decode
  steps in a call, because its whole state is kept between two calls.
- An engine is ready once the programs of a short greedy request are compiled. The others follow in the
  background, in stages: sampling, full chunks, preemption, log-probabilities of prompts, alternatives. An
  answer waits in the queue for the stages that it needs; these come next, and other rows go on (not where a
  row must be preempted: those programs are small). Stages that nobody waits for begin when the engine is
  idle, or after five seconds.
- On a CPU an engine without drafts decodes layer by layer, during the warm-up and after it. A loop over the
  whole model compiles four times as long. It would be 2 to 6% faster for 0.5B's shape, and 20% for the
  bundled model, but the last bits of its log-probabilities are others: a switch after the warm-up would
  break the promise above.
- Over a mesh all programs compile before the engine is ready: only running them shows their output shardings.
- With `submit(live=True)` a step decodes for a tenth of a second, and for a hundredth while other rows wait
  or prefill. Without (as in `generate`) free slots are filled first, and a step decodes for at most a
  second. A call of the device decodes up to 128 tokens of a row, or until a row ends while another waits.
- All layers share one block table, so a layer with a sliding window keeps pages that its window has left.
- Of several engines, each has a copy of the parameters on a device of its own (or on as many devices as the
  given model lies on), its own pages and a thread. A request goes to the engine that was given most of its
  prompt's pages before, unless that has more requests than another by half its rows; else to the one with
  the fewest. The given pages are kept as hashes, as many as an engine has pages. An engine that fails
  raises the error for its own requests, and then for all new ones; the other engines finish theirs.
- Several engines are created in parallel, which was faster: two on two cores with programs in jax's cache
  took 2.0-2.2 s, one after the other 3.0-4.4; with compilation, which differs by device on a CPU, 19-34 and
  23-30.
- Prefill and decode apart: a row that was prefilled comes to the engine that decodes as a preempted row does.
  The scheduler there gives it a slot by the same rules (priorities, shares of clients, pages), and only then
  are its pages pulled. Until they have arrived the row keeps its slot and pages on the prefilling side, so a
  full decoding side stops the prefill. If that side preempts such a row, it saves the pages in host memory,
  and they are pulled from there.
- Calls from one engine to the other run on the other's thread between two of its steps, so that only one
  thread calls a device. All engines share one lock, under which requests move; a request ends once, where its
  last answer ends.
- A prompt goes to the engine that will have prefilled it first: with the fewest queued tokens plus those of
  the prompt that it was not given before. A rule by the longest known prefix alone would send every prompt
  with a common beginning to one engine.
- Each of several answers of a prompt moves its own copy of the pages. Pages are not moved while later chunks
  are computed: a row gets pages on the decoding side only when it can decode, so they would hold pages there
  that no row uses yet, and the copy is short beside the prefill: 3,000 tokens of a random model of 12 layers
  and width 512 took 0.08 s, once 0.66, after 11 to 16 s (float32, CPU devices of two busy cores).
- The prefix cache is on the prefilling side. If numbers are not finite while decoding, it forgets the pages.
- Over several processes, process 0 takes every decision, as they depend on clocks and callers. It sends
  each call of its device, with the arguments from the host, to the others, which repeat it. Results that
  stay on the devices are referred to by the number of their call; swapped-out pages stay with each process.
- jax's coordination service, which carries these messages, does not authenticate anyone. So a message is
  JSON of a closed set of types, and its signature is checked before it is parsed.
- The host gets output arrays apart from the rows: if it had a view of an array of the rows, donation would
  copy that array.
"""
