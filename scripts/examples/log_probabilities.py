"""Prints the probability of each token of an answer, and the most likely alternatives.

python scripts/examples/log_probabilities.py
"""

from checkout import start

# isort: split
import xinfer_jax as xj


def main(argv: list[str]) -> None:
    model = xj.load_model()
    prompt = xj.encode_prompt(model, "What is the capital of Spain?")
    out = xj.generate(model.params, model.config, [prompt], xj.GenerateOptions(logprobs=3))
    for chosen, *alternatives in xj.alternatives_text(model, out):
        others = ", ".join(f"{token.text!r} {token.probability:.3f}" for token in alternatives)
        print(f"{chosen.text!r:12} {chosen.probability:.3f}  of {others}")


if __name__ == "__main__":
    start(main)
