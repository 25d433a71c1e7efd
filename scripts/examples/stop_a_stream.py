"""A stream that is told to end: the text comes piece by piece, and whoever reads it decides when it is
enough.

The output is there once the stream has ended, whatever ended it. `xj.stream` is the same with token ids, one
per prompt. (For a fixed text, `GenerateOptions(stop_strings=[...])` ends it on its own.)

    python scripts/examples/stop_a_stream.py
"""

from checkout import start

# isort: split
import xinfer_jax as xj


def main(argv: list[str]) -> None:
    model = xj.load_model()
    stream = xj.stream_text(model, "What is the capital of Spain?")
    said = ""
    for piece in stream:
        said += piece
        print(piece, end="", flush=True)
        if len(said.split()) >= 3:
            stream.stop()
    out = stream.output
    print(f"\n{out.finish_reason[0]} after {len(out.tokens[0])} tokens")


if __name__ == "__main__":
    start(main)
