"""`xinfer-jax-serve`: the OpenAI HTTP API over an engine. Nothing imports this package.

Read the files in this order:
- `server_settings`: the arguments of a server; `api_errors`: errors as responses; `metrics`: Prometheus.
- `page` joins page.html, page.css, markdown.js, client.js, history.js and page.js to the chat page at `/`.
- `ip_addresses` finds the client behind a proxy; `connections` limits open and idle connections.
- `admission` limits what clients have in flight; `request_body` receives a body and checks its size before
  it is parsed; `worker_pool` runs slow work in threads.
- `json_encoding` encodes a response in slices; `chunks` makes the chunks of a stream; `http_responses`
  sends them.
- `peer_worker` is a process that only prefills or only decodes; `peer_dispatch` decides which of them gets a
  row; `peer_front` has the engines of all behind one queue.
- `embedding_requests` serves /v1/embeddings; `served_request` is one request to the engine; `service` handles
  completions; `text_endpoints` handles what needs no engine; `app` has the routes and checks the key;
  `command` is the process.

Served: /v1/models, /v1/models/ID, /version, /v1/completions, /v1/chat/completions (streamed or not),
/v1/embeddings, /health, /metrics, /tokenize, /detokenize, /tokenizer_info, and the page. Not served, and
rejected by name: /v1/responses, suffix, images and audio; `xinfer_jax/api/fields.py`
has the list of fields.

- An answer has the same tokens with the same seed, beside any other requests. A request without a seed gets
  one of 53 bits, derived from the server's seed and the request's number; the response and the log have it.
- A disconnect, streamed or not, frees the slot after the decode steps that are running. A client that sends
  or reads nothing for half a minute is disconnected. Only the tokens of its own answer wait for a slow
  reader.
- At a limit of connections, in all or per address, a new connection closes one that waits for its
  client, so idle connections lock nobody out. X-Forwarded-For counts only from a trusted proxy.
- The queue of the engine is limited; excess requests get 429, and the openai client retries them. Limits
  count answers and tokens, in all and per client (a key, or without keys an address). The engine is fair to
  clients.
- A body has at most 64 bytes for each token of the context and each of its prompts, by default at most 4 MiB,
  and at most 64 levels; a scan checks this without building objects. What takes longer than a few
  milliseconds runs in threads, one small and one large job of a client at a time. Tokenizing releases
  Python's GIL; work that holds the GIL is cut into slices. Work for a client that has disconnected stops.
- Clients with different keys share no prefix pages (`cached_tokens` would reveal another client's text)
  unless --share_prefixes is set. Without keys all clients share them.
- The text of a message never becomes a control token (`encode_prompt(escape_control_tokens=True)`).
- A server that listens on this machine alone accepts only the machine's own names as Host, so that no web
  page reaches it by DNS rebinding. Keys are compared in constant time, and are never command-line arguments.
- Prefill and decode processes (`--role`) are independent jax processes, because the members of one
  `jax.distributed` run end together. All messages go through the front process, which knows who is there;
  only pages go from process to process. Messages are of the types of `engine.messages` alone, over a
  connection that proves and signs as those of several processes do (`cli.channel`).
- A row at a process has a ticket, a number that is used once, so a late message about a row that was given to
  another process is ignored. Tokens are sent with their position: after a prompt was prefilled again
  elsewhere its first token, which has the same bits, is not counted twice.
- Arrays that are offered to another process stay until it has acknowledged them, or for a minute. A pull that
  never ends would block all programs of a decode process, so the row is used only once its pages are there.
- Pages that decoding wrote do not go back between processes: `share_answers` finds pages of prompts only.
- The page runs only its own script, by hash. An answer's Markdown becomes text nodes, never HTML. The browser
  stores the conversations, but not the key. Each has an entry of its own, so that tabs do not overwrite
  another's; a turn that is changed begins another conversation.
- Waits are bounded by `asyncio.timeout`: `asyncio.wait_for` may swallow a cancellation on Python 3.11, and
  then the answer of a client that has disconnected runs on.
"""
