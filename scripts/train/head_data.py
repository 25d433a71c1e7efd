"""Data for the draft head of the bundled checkpoint: prompts, and the answers that the model itself gives."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import xinfer_jax as xj

from . import tiny_data

MOST_PROMPT_TOKENS = 72  # longer prompts are dropped
MOST_ANSWER_TOKENS = 24


class Answers(NamedTuple):
    """Prompts with greedy answers of the model, padded on the right."""

    tokens_BT: np.ndarray  # int32
    prompt_B: np.ndarray  # int32: the tokens of each prompt
    length_B: np.ndarray  # int32: the tokens of each prompt with its answer

    def rows(self, chosen: np.ndarray) -> "Answers":
        """Returns some of the rows."""
        return Answers(*(array[chosen] for array in self))


def _chat(tokenizer: xj.Tokenizer, messages: list[tiny_data.Message]) -> list[int]:
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def training_prompts(tokenizer: xj.Tokenizer, seed: int, count: int) -> list[list[int]]:
    """Returns the ids of different prompts: beginnings of the conversations that trained the model, and one
    time in twenty the beginning of a sentence without the template.
    """
    rng = random.Random(seed)
    prompts: dict[tuple[int, ...], None] = {}
    for messages in tiny_data.conversations(rng):
        if rng.random() < 0.05:
            ids = tokenizer.encode(tiny_data.raw_sentence(rng.choice(list(tiny_data.CAPITALS)))[0])
        else:
            ids = _chat(tokenizer, messages[:-1])
        if len(ids) <= MOST_PROMPT_TOKENS:
            prompts[tuple(ids)] = None
        if len(prompts) == count:
            return [list(prompt) for prompt in prompts]
    raise AssertionError("the stream of conversations has no end")


def measured_prompts(tokenizer: xj.Tokenizer, most: int | None = None) -> dict[str, list[list[int]]]:
    """Returns the ids of prompts to measure a head on, by the names of their groups. Neither the model nor
    the head was trained on the phrasing and the system message of the first groups.

    most: the most prompts of a group. None: all.
    """

    def chats(phrasing: str, system: str | None = None) -> list[list[int]]:
        before = [] if system is None else [{"role": "system", "content": system}]
        turns = tiny_data.evaluation_set(phrasing)[:most]
        return [_chat(tokenizer, [*before, {"role": "user", "content": text}]) for text, _ in turns]

    first = tiny_data.PHRASINGS[0]
    talk = [text for questions in tiny_data.SMALL_TALK.values() for text in questions]
    sentences = [tiny_data.raw_sentence(name)[0] for name in tiny_data.CAPITALS]
    return {
        f"{tiny_data.HELD_OUT} (phrasing never trained)": chats(tiny_data.HELD_OUT),
        f"{first}, system message never trained": chats(first, tiny_data.HELD_OUT_SYSTEM),
        first: chats(first),
        "small talk": [_chat(tokenizer, [{"role": "user", "content": text}]) for text in talk[:most]],
        "The capital of {c} is, without the chat template": [tokenizer.encode(x) for x in sentences[:most]],
    }


def answers(model: xj.Model, prompts: Sequence[list[int]], batch: int = 256) -> Answers:
    """Returns the prompts with the model's greedy answers, which end with the end-of-sequence token."""
    options = xj.GenerateOptions(max_tokens=MOST_ANSWER_TOKENS, eos_token_ids=model.tokenizer.eos_token_ids)
    rows = []
    for first in range(0, len(prompts), batch):
        part = list(prompts[first : first + batch])
        out = xj.generate(model.params, model.config, part, options)
        rows += [prompt + list(ids) for prompt, ids in zip(part, out.tokens, strict=True)]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens_BT = np.zeros((len(rows), MOST_PROMPT_TOKENS + MOST_ANSWER_TOKENS), np.int32)
    for row, ids in enumerate(rows):
        tokens_BT[row, : len(ids)] = ids
    return Answers(tokens_BT, np.array([len(ids) for ids in prompts], np.int32), lengths)
