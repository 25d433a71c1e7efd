"""A server that clients of the OpenAI API use as it is: `xinfer-jax-serve`. Nothing imports this room.

In the order to read: `settings` is what a server is told; `metrics` counts; `streams` sends answers as they
come; `service` takes requests to the engine; `app` says which addresses there are and who may ask; `command`
is the process. `page.html` is the page at `/`.

Served: /v1/models, /v1/completions, /v1/chat/completions (streamed or not), /health, /metrics, /tokenize,
/detokenize, /tokenizer_info, and the page. Not served, and refused by name: /v1/responses, tools, response
formats, suffix, images and sound.

- An answer is the engine's: with the same seed it has the same tokens in any company. Without one it draws
  with fold_in(key(server seed), number of the request); both stand in the log line of the request.
- Who goes away is noticed, streamed or not, and the row is free within a window of decoding; who does not
  send or read for half a minute is cut off. Nothing but the tokens of one answer waits for a slow reader.
- The engine may queue no more than it is told to; beyond that clients get 429, which the openai client obeys.
  Who has many requests under way stands behind who has few.
- What messages spell never becomes a control token (`encode_prompt(escape_control_tokens=True)`).
- A server on this machine alone answers only to names of this machine, so that no web page reaches it by
  another name (DNS rebinding). Keys are compared in constant time, and never stand on the command line.
- The page runs only its own script, by hash, and puts a model's text into the page as text.
"""
