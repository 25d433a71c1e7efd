"""A server that clients of the OpenAI API use as it is: `xinfer-jax-serve`. Nothing imports this room.

In the order to read: `settings` is what a server is told; `metrics` counts; `page` joins page.html, page.css
and the scripts markdown.js, client.js and page.js to the page at `/`; `addresses` says who is behind a proxy;
`connections` bounds what is open and unread; `admission` limits what clients have under way; `body_scan`
bounds a body before it is parsed; `offload` runs what is heavy in threads; `formatting` makes a response's
JSON in slices; `thoughts` splits an answer as it comes; `streams` sends answers; `embeddings` reads and
serves /v1/embeddings; `under_way` is a call that the engine answers; `service` takes requests to the engine;
`texts` has the addresses that need none; `app` says which addresses there are and who may ask; `command` is
the process.

Served: /v1/models, /v1/models/ID, /version, /v1/completions, /v1/chat/completions (streamed or not),
/v1/embeddings, /health, /metrics, /tokenize, /detokenize, /tokenizer_info, and the page. Not served, and
refused by name: /v1/responses, tools, response formats, suffix, images and sound; `xinfer_jax/api/fields.py`
has the list of fields.

- An answer is the engine's: with the same seed it has the same tokens beside any other requests. A request
  without one gets a seed of 53 bits, drawn from the server's seed and the number of the request; the response
  and the log say it.
- Who goes away is noticed, streamed or not, and the row is free within a window of decoding; who does not
  send or read for half a minute is cut off. Nothing but the tokens of one answer waits for a slow reader.
- At a limit of connections, of all or of one address, the one that has waited longest for its client is
  closed for the new one: idle connections keep nobody out. A client that does not read a response, of any
  kind, is cut off where bytes are written. X-Forwarded-For is believed only where a proxy is named.
- The engine may queue no more than it is told to; beyond that clients get 429, which the openai client obeys.
  Limits count answers and tokens, in all and for each client: a key, or without keys an address. The engine
  is fair to clients.
- A body has at most 64 bytes for each token of the context and each of its prompts, at most 4 MiB without a
  flag, at most 64 levels; a scan finds that without building objects. What takes longer than a few
  milliseconds runs in threads, one job of a client at a time: tokenizing releases the interpreter's lock, and
  what holds it is cut into slices. Work for a client that has left goes no further.
- Clients with different keys share no pages of prompts (`cached_tokens` would confirm another's text) unless
  --share_prefixes says so. Without keys all share them: there is one class of clients.
- What messages spell never becomes a control token (`encode_prompt(escape_control_tokens=True)`).
- A server on this machine alone answers only to names of this machine, so that no web page reaches it by
  another name (DNS rebinding). Keys are compared in constant time, and never stand on the command line.
- The page runs only its own script, by hash. An answer's Markdown becomes text nodes, never HTML. The tab
  keeps the conversation, but not the key.
"""
