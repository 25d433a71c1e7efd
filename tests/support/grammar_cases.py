"""A model for tests of grammars, and a slow reference of their masks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tiny

import xinfer_jax as xj
from xinfer_jax.families.reading import from_hf
from xinfer_jax.grammar.vocabulary import token_bytes

TEXTS = ("yes", "yesterday", "no", "né", "日本")
CAPACITY = 128


def random_model(**changes: Any) -> xj.Model:
    """A model of random weights whose tokenizer has 272 tokens. Its vocabulary has 288."""
    config = from_hf(tiny.CONFIG | dict(num_hidden_layers=1) | changes)
    config = dataclasses.replace(config, eos_token_ids=(tiny.IM_END, tiny.ENDOFTEXT))
    tokenizer = xj.Tokenizer(
        tiny.tokenizer(), chat_template=None, special_tokens={}, eos_token_ids=config.eos_token_ids
    )
    params = xj.init_params(config, jax.random.key(2), "float32")
    bundled = xj.load_model()
    return dataclasses.replace(
        bundled, params=params, config=config, tokenizer=tokenizer, generation_config={}, name="random"
    )


def allowed_in_choice(model: xj.Model, texts: Sequence[str], ids: Sequence[int]) -> np.ndarray:
    """bool [V]: the tokens that may come after these ids in one of the texts."""
    tokens, special = token_bytes(model.tokenizer, model.config.vocab_size)
    wanted = [text.encode() for text in texts]
    begun = b"".join(tokens[i] for i in ids)
    allowed = [bool(token) and any(w.startswith(begun + token) for w in wanted) for token in tokens]
    for i in (*special, *model.config.eos_token_ids):
        allowed[i] = i in model.config.eos_token_ids and begun in wanted
    return np.array(allowed)
