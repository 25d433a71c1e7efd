"""Best of n: sample several answers, then score them with a model. Here the same model scores them. Another
model with the same tokenizer works too.

If the same model scores, `GenerateOptions(n=1, best_of=8)` does all of this.

    python scripts/examples/best_of_n.py
"""

from checkout import start

# isort: split
import jax
import numpy as np

import xinfer_jax as xj


def main(argv: list[str]) -> None:
    model = xj.load_model()
    params = model.params
    config = model.config
    tok = model.tokenizer
    prompt = xj.encode_prompt(model, "What is the capital of Spain?")
    options = xj.GenerateOptions(max_tokens=24, sampling=xj.SamplingConfig(temperature=1.5), n=8)
    out = xj.generate(params, config, [prompt], options, key=jax.random.key(0))
    candidates = [ids for ids in out.tokens if ids]
    scores = xj.score_completions(params, config, [prompt] * len(candidates), candidates)
    means = [np.mean(score) for score in scores]  # one list per answer, one number per token
    for mean, ids in zip(means, candidates, strict=True):
        print(f"{mean:7.3f} nats per token: {tok.decode(ids)!r}")
    print("best:", tok.decode(candidates[np.argmax(means)]))


if __name__ == "__main__":
    start(main)
