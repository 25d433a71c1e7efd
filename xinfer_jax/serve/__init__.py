"""`xinfer-jax-serve`: the OpenAI HTTP API over an engine. Nothing imports this package.

In the order to read: `server_settings` are the arguments of a server; `http_responses` sends responses,
errors too; `metrics` are Prometheus'; `page` makes the chat page of page.html, page.css and four scripts;
`ip_addresses` finds the client behind a proxy; `framing` limits what the event loop parses; `connections`
limits open and idle connections, and `http_server` accepts them; `arrivals` limits bodies that arrive, and
`admission` what clients have in flight; `request_body` receives and checks a body; `worker_pool` runs slow
work in threads; `json_encoding` encodes a response in slices, `chunks` makes those of a stream, and
`responses_api` makes answers of /v1/responses; `peer_worker` is a process that only prefills or only decodes,
`peer_front` has a dispatcher over them, `peer_messages` is what they tell each other; `served_request` is one
request to the engine, and `checked_body` its body; `service` handles completions, `text_endpoints` what needs
no engine; `admin_jobs` runs what admins ask for, and `served_paths` checks their paths: `adapter_endpoints`
for LoRA, `rollout_endpoints` for pauses and new weights; `app` has the routes and checks the key; `command`
is the process. `xinfer_jax/api/fields.py` lists the fields that are served.

- A request without a seed gets one, which the response and the log have. An answer has the same tokens with
  the same seed, beside any other requests.
- A client that disconnects, or that sends or reads nothing for half a minute, frees its slots. At a limit of
  connections a new one closes one that waits for its client, so idle clients lock nobody out.
- Limits count answers, tokens and bytes, in all and per client: a key, or an address where there are no keys.
  A body counts when it is complete. Bodies that arrive have their own limits, so slow ones lock nobody out.
- A client makes the event loop parse little at once: the rest of its chunks and reads waits for its turn.
- What takes longer than a few milliseconds runs in threads; what holds Python's GIL is cut into slices.
- Clients with different keys share no prefix pages: `cached_tokens` would reveal the text of another.
- What a client sends is checked before objects are built of it, and never becomes a control token. A server
  of this machine alone accepts only its own names as Host, so no web page reaches it by DNS rebinding.
"""
