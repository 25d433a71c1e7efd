"""Rollouts for training: `xj.rollouts`. Use it between `decode_loop` and your loss.

- `pack_rollout` puts prompts and answers into one array, with a mask, as a `PackedRollout`.
- `continue_rows` appends tokens after answers, for example the result of a tool.
- `map_logits` applies your function to the logits of a long batch in parts.
- A trainer calls `send_weights` to send new weights to an engine in another process. That process calls
  `receive_weights`, which returns a `WeightReceiver`.

To get several answers to a prompt, call `KVCache.repeat_rows`. The code is in `generation/`, and
`TRAINING.md` has examples.
"""

from ..lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
