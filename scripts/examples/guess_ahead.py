"""Speculation: several tokens are guessed and checked in one pass. The tokens are those of plain decoding
with the same key, greedy or drawn; only the time differs.

Here what followed the last tokens where they came before is guessed. `draft=xj.load_model(...)` has a small
model guess, and a function of yours may too: (history_BS, length_B, count) -> int32 [B, count], traced.

    python scripts/examples/guess_ahead.py
"""

from checkout import start

# isort: split
import dataclasses

import jax

import xinfer_jax as xj


def main(argv: list[str]) -> None:
    model = xj.load_model()
    prompt = model.tokenizer.encode("The capital of Spain is Madrid. ")
    sampling = xj.SamplingConfig(temperature=0.7)
    options = xj.GenerateOptions(max_new_tokens=32, sampling=sampling, eos_token_ids=())
    guessing = dataclasses.replace(options, draft="lookup", draft_tokens=2)
    plain, guessed = (
        xj.generate(model.params, model.config, [prompt], options, key=jax.random.key(0))
        for options in (options, guessing)
    )
    print("the same tokens:", plain.tokens == guessed.tokens)
    print(f"passes: {plain.stats.decode_steps}, and {guessed.stats.passes[0]} with guesses")
    print(f"guesses that were right: {guessed.stats.acceptance[0]:.0%}")


if __name__ == "__main__":
    start(main)
