"""`xinfer-jax-serve`: the OpenAI HTTP API over an engine. Nothing imports this package.
`xinfer_jax/api/fields.py` lists the fields that are served.

Reading order, connections and limits:

- `server_settings` are the arguments of a server.
- `http_responses` sends responses, errors too. `metrics` are Prometheus metrics.
- `page` makes the chat page of page.html, page.css and four scripts.
- `ip_addresses` finds the client behind a proxy.
- `framing` limits how much the event loop parses.
- `connections` limits open and idle connections, and `http_server` accepts them.
- `arrivals` limits bodies that arrive, and `admission` limits the requests that clients have in flight.

Bodies and answers:

- `request_body` receives and checks a body. `worker_pool` runs slow work in threads.
- `json_encoding` encodes a response in slices, `chunks` makes the chunks of a stream, and `responses_api`
  makes answers of /v1/responses.
- `peer_worker` is a process that only prefills or only decodes. `peer_front` has a dispatcher over such
  processes, and `peer_messages` are the messages between them.
- `served_request` is one request to the engine, and `checked_body` is its body.

Endpoints:

- `service` handles completions. `text_endpoints` handles requests that need no engine.
- `admin_jobs` runs the jobs of admins, and `served_paths` checks their paths. `adapter_endpoints` is for
  LoRA, `rollout_endpoints` for pauses and new weights.
- `app` has the routes and checks the key.
- `command` is the process.

Decisions:

- A request without a seed gets one, which the response and the log have. An answer has the same tokens with
  the same seed, next to any other requests.
- A client that disconnects, or that sends or reads nothing for half a minute, frees its slots. At a limit of
  connections a new connection closes one that waits for its client, so idle clients lock nobody out.
- Limits count answers, tokens and bytes, in total and per client: a key, or an address if there are no keys.
  A body counts when it is complete. Bodies that arrive have their own limits, so slow bodies lock nobody out.
- A client makes the event loop parse little at once: the rest of its chunks and reads waits for its turn.
- Work that takes longer than a few milliseconds runs in threads. Work that holds Python's GIL is cut into
  slices.
- Clients with different keys share no prefix pages: `cached_tokens` would reveal the text of another client.
- The data of a client is checked before objects are built of it, and never becomes a control token. A server
  of this machine alone accepts only its own names as Host, so no web page reaches it by DNS rebinding.
"""
