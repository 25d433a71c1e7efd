"""Stops a stream: the text arrives in chunks, and the caller decides when to stop.

The output is available once the stream has ended, for any reason. `xj.stream` does the same with token ids,
one per prompt. (For a fixed text use `GenerateOptions(stop_strings=[...])`.)

    python scripts/examples/stop_a_stream.py
"""

from checkout import start

# isort: split
import xinfer_jax as xj


def main(argv: list[str]) -> None:
    model = xj.load_model()
    stream = xj.stream_text(model, "What is the capital of Spain?")
    text = ""
    for chunk in stream:
        text += chunk
        print(chunk, end="", flush=True)
        if len(text.split()) >= 3:
            stream.stop()
    out = stream.output
    print(f"\n{out.finish_reason[0]} after {len(out.tokens[0])} tokens")


if __name__ == "__main__":
    start(main)
