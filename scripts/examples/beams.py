"""Beam search and beam sampling: the best of many continuations, with their scores.

python scripts/examples/beams.py
"""

from checkout import start

# isort: split
import dataclasses

import jax

import xinfer_jax as xj


def main(argv: list[str]) -> None:
    model = xj.load_model()
    params = model.params
    config = model.config
    tok = model.tokenizer
    prompt = xj.encode_prompt(model, "What is the capital of Spain?")
    # Processors act on each beam's own tokens. The most likely answer, Madrid, is forbidden here.
    others = xj.SamplingConfig(forbidden_token_ids=tok.encode(" Madrid"))
    sampled = dataclasses.replace(others, temperature=2.0)
    for name, sampling in (("search", others), ("sampling", sampled)):
        out = xj.beam_search(
            params, config, prompt, num_beams=4, max_tokens=16, sampling=sampling, key=jax.random.key(0)
        )
        print(f"beam {name}:")
        for score, ids in zip(out.scores[0], out.sequences[0], strict=True):
            print(f"{score:7.3f} {tok.decode(ids)!r}")


if __name__ == "__main__":
    start(main)
