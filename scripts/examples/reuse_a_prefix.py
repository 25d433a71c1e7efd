"""A common prefix of several calls is prefilled once and stored in a file. The next calls prefill only new
tokens.

    python scripts/examples/reuse_a_prefix.py
"""

from checkout import start

# isort: split
import dataclasses
import tempfile
from pathlib import Path

import xinfer_jax as xj

SYSTEM = "You are a helpful assistant."


def main(argv: list[str]) -> None:
    model = xj.load_model()
    params = model.params
    config = model.config
    tok = model.tokenizer

    def prompt(question: str) -> list[int]:
        return xj.encode_prompt(model, question, system=SYSTEM)

    # The capacity must suffice for the later calls, because a prefix keeps its capacity.
    options = xj.GenerateOptions(max_tokens=16, capacity=128, keep_prefix=True)
    first = xj.generate(params, config, [prompt("What is the capital of France?")], options)
    print(f"prefilled {first.stats.prompt_tokens} tokens: {tok.decode(first.tokens[0])!r}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "system.safetensors"
        xj.save_prefix(params, config, first.prefix, file)
        prefix = xj.load_prefix(params, config, file)  # raises for another model

    options = dataclasses.replace(options, prefix=prefix)
    for question in ("What is the capital of Spain?", "What is the capital of Japan?"):
        out = xj.generate(params, config, [prompt(question)], options)
        new = out.stats.prompt_tokens - out.stats.reused_tokens
        print(f"prefilled {new} of {out.stats.prompt_tokens} tokens: {tok.decode(out.tokens[0])!r}")


if __name__ == "__main__":
    start(main)
