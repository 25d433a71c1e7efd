"""Speculative decoding: one pass verifies several draft tokens. The tokens equal the tokens of plain decoding
with the same key, greedy or sampled. Only the time differs.

Here the draft tokens come from prompt lookup: they are the tokens that followed the last tokens at an earlier
position. `draft=xj.load_model(...)` uses a draft model. `draft` may also be your own function, which is
traced: (history_BS, length_B, count) -> int32 [B, count].

    python scripts/examples/speculative_decoding.py
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
    options = xj.GenerateOptions(max_tokens=32, sampling=sampling, eos_token_ids=())
    speculative = dataclasses.replace(options, draft="lookup", draft_tokens=2)
    plain, drafted = (
        xj.generate(model.params, model.config, [prompt], options, key=jax.random.key(0))
        for options in (options, speculative)
    )
    print("the same tokens:", plain.tokens == drafted.tokens)
    print(f"passes: {plain.stats.decode_steps}, and {drafted.stats.passes[0]} with draft tokens")
    print(f"acceptance rate: {drafted.stats.acceptance[0]:.0%}")


if __name__ == "__main__":
    start(main)
