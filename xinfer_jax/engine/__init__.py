"""Requests that join and leave while others decode, share pages of keys and values, and get the same bits in
any company.

In the order to read: `scheduler` decides who reads, who decodes and in which pages, in plain Python; `device`
runs it; `lockstep` has other processes do the same; `requests` are what callers hold; `submission` checks
what comes in; `statistics` says what it did; `engine` takes the turns.

- A page is shared only where its keys have the bits that the row would have made: the digest under which it
  is found holds the salt, all tokens up to its end, and the program that read each page. Which one reads a
  token follows from the prompt's length alone, so hits cover whole pieces of that cut; prompts whose tokens'
  log-probabilities are asked have a program, and pages, of their own. Those who ask share pages that decoding
  wrote too, in a second chain of digests without the programs.
- Pages come as needed, and the older row wins: the youngest goes to host memory and comes back as it was, so
  nothing is computed again. A row enters only where there is room for its whole prompt and a page more for
  every other, and sends nobody away: few are thrown out soon after they came.
- Nobody overtakes who waits for pages, or small requests would starve large ones.
- Where a row's numbers are not finite, no page that it holds is found again, also those that it found: should
  one of them be bad, the next to ask reads it anew.
- What a row is (settings, keys, limits, biases, ids that end it) are arrays of fixed sizes, in the full tier
  of settings: whoever comes, nothing is compiled. A row's bits do not depend on how long windows are, since
  the state between two of them is all that there is.
- Windows of decoding end after a tenth of a second where requests may come (`submit`), a quarter of that
  while a prompt is being read; where all are there (`generate`) free slots are filled first, and a window is
  up to 128 steps, or until a row ends while another waits.
- All layers share one table of pages, so a sliding layer keeps pages that its window no longer sees.
- Over several processes every decision, which hangs on clocks and callers, is process 0's: each call of its
  device, with its arguments from the host, is said to the others, who do it on theirs. What stays on the
  devices goes by the number of the call that gave it; pages of rows that made way stay with each process.
- What the host gets are arrays of their own: a view of what the next call donates would make it a copy.
"""
