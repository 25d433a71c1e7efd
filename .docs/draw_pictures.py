"""Draws the pictures of the documentation: `python .docs/draw_pictures.py` writes .docs/pictures/*.svg.

The charts show the figures of .docs/pictures/figures.json, which names the command, the machine and the date
of each. An SVG follows the reader's setting of the browser, light or dark. A test compares the files with
this script.
"""

import json
from html import escape
from pathlib import Path

PICTURES = Path(__file__).resolve().parent / "pictures"
STYLE = """
svg { --back: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #b8c0c9; --card: #f4f6f8;
      --blue: #2f6fde; --orange: #d9730d; --green: #2c8a4b; --pale: #dbe7fb; }
@media (prefers-color-scheme: dark) {
  svg { --back: #15181d; --ink: #e6e9ed; --soft: #9aa4af; --line: #4a535d; --card: #20252c;
        --blue: #6ea2ff; --orange: #f0a35a; --green: #62c383; --pale: #243b61; } }
text { font-family: system-ui, -apple-system, 'Segoe UI', sans-serif; fill: var(--ink); font-size: 14px; }
.title { font-weight: 600; } .soft { fill: var(--soft); font-size: 12.5px; }
.middle { text-anchor: middle; }
.code { font-family: ui-monospace, 'DejaVu Sans Mono', monospace; font-size: 12.5px; }
.card { fill: var(--card); stroke: var(--line); }
.main { fill: var(--pale); stroke: var(--blue); stroke-width: 1.5; }
.blue { fill: var(--blue); } .orange { fill: var(--orange); }
.green { fill: var(--green); } .grey { fill: var(--line); }
.arrow { stroke: var(--soft); stroke-width: 1.5; fill: none; marker-end: url(#head); }
.head { fill: var(--soft); }
"""


class Picture:
    """An SVG of shapes that are added one after the other. All lengths are pixels."""

    def __init__(self, width: int, height: int, about: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
            f"<title>{escape(about)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"',
            'orient="auto"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" style="fill: var(--back)"/>',
        ]

    def text(self, x: float, y: float, text: str, look: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{look}">{escape(text)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, look: str, radius: float = 2) -> None:
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self.parts.append(f'<rect {shape} class="{look}"/>')

    def box(
        self, x: float, y: float, width: float, height: float, title: str, *lines: str, look: str = "card"
    ) -> None:
        """A box with a title in its first line, and more lines below it."""
        self.bar(x, y, width, height, look, 8)
        top = y + (height - 18 * len(lines)) / 2 + 5
        self.text(x + width / 2, top, title, "title middle")
        for number, line in enumerate(lines, 1):
            self.text(x + width / 2, top + 18 * number, line, "soft middle")

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="arrow" d="M{path}"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def stack() -> str:
    """Returns the picture of the layers between a program and the devices."""
    picture = Picture(760, 430, "xinfer_jax between your program and JAX")
    picture.box(
        20, 18, 720, 50, "Your program", "evaluation, reinforcement learning, a service, a notebook, a shell"
    )
    picture.bar(20, 84, 720, 206, "main", 10)
    picture.text(36, 107, "xinfer_jax", "title")
    picture.box(36, 118, 216, 54, "Commands and server", "xinfer-jax, the OpenAI API")
    picture.box(272, 118, 216, 54, "Engine", "many requests, pages, updates")
    picture.box(508, 118, 216, 54, "Text in, text out", "generate_text, stream_text")
    picture.box(
        36, 184, 688, 46, "Pure functions", "forward · prefill · decode_step · decode_loop · score · generate"
    )
    picture.box(36, 240, 452, 40, "One tree of parameters, one KV cache per layer")
    picture.box(508, 240, 216, 40, "Pallas kernels")
    picture.box(20, 306, 720, 46, "JAX", "jit, grad, vmap, shard_map; XLA and Pallas compile the programs")
    for number, device in enumerate(("CPU", "NVIDIA GPU", "TPU", "a mesh of devices")):
        picture.box(20 + 182 * number, 368, 174, 40, device)
    return picture.svg()


def request() -> str:
    """Returns the picture of a request in an engine: queue, slot, pages, answer."""
    picture = Picture(760, 420, "The life of a request in an engine")
    picture.box(20, 20, 130, 60, "Request", "prompt, options")
    picture.box(190, 20, 130, 60, "Queue", "priority, deadline")
    picture.box(360, 20, 170, 60, "Scheduler", "gives a slot and pages")
    picture.box(590, 20, 150, 60, "Answer", "streamed tokens")
    picture.arrow((150, 50), (188, 50))
    picture.arrow((320, 50), (358, 50))
    picture.arrow((445, 80), (445, 108))
    picture.text(20, 128, "Slots (rows = 4), step by step", "title")
    lanes = [
        [("prefill", 2), ("decode", 9)],
        [("decode", 5), ("free", 1), ("prefill", 1), ("decode", 4)],
        [("free", 2), ("prefill", 3), ("decode", 6)],
        [("decode", 11)],
    ]
    look = {"prefill": "orange", "decode": "blue", "free": "card"}
    for row, lane in enumerate(lanes):
        y, x = 142 + 26 * row, 60
        picture.text(20, y + 15, str(row), "soft")
        for work, steps in lane:
            for _ in range(steps):
                picture.bar(x, y, 46, 20, look[work], 3)
                x += 50
    picture.arrow((612, 152), (665, 152), (665, 82))
    for x, name, colour in (
        (60, "prefill chunk", "orange"),
        (200, "decode step", "blue"),
        (330, "free slot", "card"),
    ):
        picture.bar(x, 252, 14, 14, colour, 3)
        picture.text(x + 20, 264, name, "soft")
    picture.text(20, 306, "Pages of keys and values", "title")
    picture.text(20, 326, "Each slot has a block table: the pages of its tokens, in order.", "soft")
    for page in range(13):
        shared, free = page < 2, page > 9
        picture.bar(20 + 55 * page, 340, 48, 30, "green" if shared else "card" if free else "blue", 4)
    for x, name, colour in ((20, "shared: prompts that begin alike are prefilled once", "green"),
                            (370, "pages of one request", "blue"), (560, "free", "card")):  # fmt: skip
        picture.bar(x, 386, 14, 14, colour, 3)
        picture.text(x + 20, 398, name, "soft")
    return picture.svg()


def tree() -> str:
    """Returns the picture of one tree of parameters, which generates, scores and trains."""
    picture = Picture(760, 300, "One tree of parameters generates, scores and trains")
    picture.box(20, 110, 170, 70, "Checkpoint", "Hugging Face names,", "safetensors or GGUF")
    picture.box(270, 100, 180, 90, "params", "a pytree of arrays", "or quantized leaves", look="main")
    picture.box(540, 20, 200, 64, "Generate", "decode_loop, Engine")
    picture.box(540, 113, 200, 64, "Score", "score: log-probabilities")
    picture.box(540, 206, 200, 64, "Train", "jax.grad of score, optax")
    picture.arrow((190, 132), (268, 132))
    picture.text(229, 122, "load_model", "code middle")
    picture.arrow((270, 162), (192, 162))
    picture.text(229, 182, "save_model", "code middle")
    picture.arrow((450, 128), (538, 60))
    picture.arrow((450, 145), (538, 145))
    picture.arrow((450, 166), (538, 228))
    picture.arrow((538, 254), (360, 254), (360, 192))
    picture.text(449, 272, "the next step's params", "soft middle")
    return picture.svg()


def speeds(figures: dict) -> str:
    """Returns the chart of tokens per second next to other engines."""
    engines, looks = list(figures["engines"]), ["blue", "orange", "green"]
    picture = Picture(760, 430, figures["title"])
    picture.text(20, 32, figures["title"], "title")
    picture.text(20, 52, figures["setting"], "soft")
    for number, engine in enumerate(engines):
        picture.bar(20 + 210 * number, 66, 14, 14, looks[number], 3)
        picture.text(40 + 210 * number, 78, engine, "soft")
    for panel, task in enumerate(figures["tasks"]):
        x = 20 + 248 * panel
        picture.text(x, 112, task, "title")
        most = max(figures["engines"][engine][precision][panel]
                   for engine in engines for precision in figures["engines"][engine])  # fmt: skip
        y = 126
        for precision in figures["precisions"]:
            picture.text(x, y + 12, precision, "soft")
            y += 20
            for number, engine in enumerate(engines):
                values = figures["engines"][engine].get(precision)
                if values is None:
                    picture.text(x, y + 13, "not measured", "soft")
                else:
                    width = 170 * values[panel] / most
                    picture.bar(x, y, width, 18, looks[number])
                    picture.text(x + width + 6, y + 14, f"{values[panel]:g}", "soft")
                y += 22
            y += 8
    return picture.svg()


def decode_bytes(figures: dict) -> str:
    """Returns the chart of the bytes that a decode step moves, by device."""
    devices = figures["devices"]
    picture = Picture(760, 116 + 54 * len(devices), figures["title"])
    picture.text(20, 32, figures["title"], "title")
    picture.text(20, 52, figures["setting"], "soft")
    for x, name, look in ((20, "the program moves", "blue"), (200, "it has to move", "grey")):
        picture.bar(x, 66, 14, 14, look, 3)
        picture.text(x + 20, 78, name, "soft")
    most = max(device["moved"] for device in devices)
    for number, device in enumerate(devices):
        y = 98 + 54 * number
        picture.text(20, y + 23, device["name"])
        for line, (key, look) in enumerate((("moved", "blue"), ("least", "grey"))):
            width = 440 * device[key] / most
            picture.bar(170, y + 22 * line, width, 18, look)
            label = f"{device[key]:,.0f} MB" + (
                f" ({device['moved'] / device['least']:.2f} ×)" if key == "moved" else ""
            )
            picture.text(176 + width, y + 14 + 22 * line, label, "soft")
    return picture.svg()


def pictures() -> dict[str, str]:
    """Returns the text of each picture by its name."""
    figures = json.loads((PICTURES / "figures.json").read_text(encoding="utf-8"))
    return {
        "stack": stack(),
        "request": request(),
        "tree": tree(),
        "speeds": speeds(figures["speeds"]),
        "decode_bytes": decode_bytes(figures["decode_bytes"]),
    }


if __name__ == "__main__":
    for name, svg in pictures().items():
        (PICTURES / f"{name}.svg").write_text(svg, encoding="utf-8")
