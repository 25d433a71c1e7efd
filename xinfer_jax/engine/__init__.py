"""Requests that join and leave while others decode, share pages of keys and values, and get the same bits in
any company.

In the order to read: `clients` says whose row goes first; `scheduler` decides who reads, who decodes and in
which pages, in plain Python; `device` runs it; `messages` are what process 0 tells other processes, and
`lockstep` has them do the same; `requests` are what callers hold; `statistics` says what it did;
`submission` checks what comes in; `engine` takes the
turns; `engines` are several behind one queue.

- A page is shared only where its keys have the bits that the row would have made: the digest under which it
  is found holds the salt, all tokens up to its end, and the program that read each page. Which one reads a
  token follows from the prompt's length alone, so hits cover whole pieces of that cut; prompts whose tokens'
  log-probabilities are asked have a program, and pages, of their own. Those who ask share pages that decoding
  wrote too, in a second chain of digests without the programs.
- Pages come as needed, and the older row wins: the youngest goes to host memory and comes back as it was, so
  nothing is computed again. A row enters only where there is room for its whole prompt and a page more for
  every other, and sends nobody away: few are thrown out soon after they came.
- Nobody overtakes who waits for pages, or small requests would starve large ones.
- Clients (`submit(client=…)`) share the slots equally: where one has less than its share and a row that
  waits, rows of those that have more are preempted, the youngest first, and go on later with the same bits.
  Within their shares the client for which the model computed fewer tokens goes first, so the age of a
  backlog moves no row ahead of another client's. Of one request's answers those beyond the first few (as
  many as there are slots) wait behind the first answers of its client's other requests.
- A turn prefills one chunk at most before new requests, cancels and deadlines are looked at, and decodes for
  a second at most.
- The text of an answer costs the same for each token, whatever its stop strings are.
- Where a row's numbers are not finite, no page that it holds is found again, also those that it found: should
  one of them be bad, the next to ask reads it anew.
- What a row is (settings, keys, limits, biases, ids that end it) are arrays of fixed sizes, in the full tier
  of settings: whoever comes, nothing is compiled. A row's bits do not depend on how long windows are, since
  the state between two of them is all that there is.
- Windows of decoding end after a tenth of a second where requests may come (`submit`), a quarter of that
  while a prompt is being read; where all are there (`generate`) free slots are filled first, and a window is
  up to 128 steps, or until a row ends while another waits.
- All layers share one table of pages, so a sliding layer keeps pages that its window no longer sees.
- Of several engines each has a copy of the parameters on a device of its own (or on as many as the model
  given lies on), its own pages and a thread. A request stays where it was dealt to: where the most pages of
  its beginning were dealt before, unless that engine has more requests than another by half its rows; else
  where there are the fewest. What was dealt is remembered as digests, as many as an engine has pages. One
  that breaks down fails its own requests, and then all that come; the others end theirs.
- They are made side by side, as that was faster: two on two cores with programs in jax's cache 2.0-2.2 s, one
  after the other 3.0-4.4; compiling, which differs by device on a CPU, 19-34 and 23-30.
- Over several processes every decision, which hangs on clocks and callers, is process 0's: each call of its
  device, with its arguments from the host, is said to the others, who do it on theirs. What stays on the
  devices goes by the number of the call that gave it; pages of rows that made way stay with each process.
- jax's coordination service, over which it is said, asks nobody who they are. So a message is JSON of a
  closed set of values, and its signature is checked before it is parsed.
- What the host gets are arrays of their own: a view of what the next call donates would make it a copy.
"""
