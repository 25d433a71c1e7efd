"""Lines of input files for soak_batch.py and tests."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train import tiny_data


def mixed_lines(rng: random.Random, count: int) -> Iterator[Any]:
    """Yields random lines of all forms, some of them wrong."""
    for i in range(count):
        question = tiny_data.question(
            rng.choice(tiny_data.PHRASINGS), rng.choice(list(tiny_data.NAMED_CAPITALS))
        )
        settings: dict[str, Any] = dict(max_tokens=rng.randint(1, 24))
        settings |= rng.choice(
            [{}, {}, dict(temperature=0.9), dict(temperature=1.5, top_k=40, top_p=0.9, n=2)]
        )
        settings |= rng.choice([{}, {}, dict(logprobs=2), dict(frequency_penalty=0.5), dict(stop=["is"])])
        chat = dict(messages=[dict(role="user", content=question)])
        chat_body = dict(chat, **settings)
        if "logprobs" in settings:
            chat_body["logprobs"] = True
        yield rng.choice([
            dict(prompt=question, **settings),
            dict(chat, **settings),
            dict(custom_id=f"c{i}", method="POST", url="/v1/chat/completions", body=chat_body),
            dict(custom_id=f"c{i}", url="/v1/completions", body=dict(prompt=question, **settings)),
            dict(prompt=question, custom_id=f"own {i}", seed=i, **settings),
            dict(prompt=[rng.randrange(300) for _ in range(rng.randint(1, 200))], **settings),
            dict(prompt=question, top_p=7), "not an object",
        ])  # fmt: skip


def write_lines(path: Path, lines: Any) -> Path:
    """Writes the lines as JSON and returns the path."""
    with path.open("w") as file:
        for line in lines:
            file.write(f"{json.dumps(line)}\n")
    return path
