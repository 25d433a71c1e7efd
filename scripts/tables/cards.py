"""The tables of the memory that published models take, and of the cards on which they fit."""

import dataclasses
import functools
from typing import NamedTuple

from xinfer_jax.config.model_config import ModelConfig
from xinfer_jax.estimates import plan_estimates as estimates
from xinfer_jax.estimates.card_specs import CARDS, TPUS, Card, Tpu
from xinfer_jax.estimates.model_shapes import SHAPES
from xinfer_jax.families.reading import from_hf

from .markdown import code, table

ROWS = 4
CONTEXT = 8192  # tokens of a row, or the context length of the model if that is less
CHUNK = 256  # the default of `xinfer-jax plan`
FORMATS = ("bfloat16", "int8", "int4")  # from the widest
# By format of the weights the flag of `xinfer-jax serve` on a GPU.
FLAGS = {
    "bfloat16": "none",
    "int8": "`--quantize=int8`",
    "int4": "`--quantize=int4`",
    "mxfp4": "none: the files have it",
}
_GIB = 2**30
# GPUs of the same memory are one column. An A100 of 40 GB has no data sheet here: plan takes --memory_gib.
A100_40 = dataclasses.replace(CARDS["a100"], name="NVIDIA A100-SXM4-40GB", memory_gib=39.4)
DEVICES: dict[str, tuple[str, Card | Tpu]] = {
    "L4 24 GB": ("l4", CARDS["l4"]),
    "RTX 4090 24 GB": ("rtx4090", CARDS["rtx4090"]),
    "A100 40 GB": ("a100 --memory_gib=39.4", A100_40),
    "L40S 48 GB": ("l40s", CARDS["l40s"]),
    "A100, H100 80 GB": ("h100", CARDS["h100"]),
    "H200 141 GB": ("h200", CARDS["h200"]),
    "B200 180 GB": ("b200", CARDS["b200"]),
    "TPU v5e 16 GB": ("v5e", TPUS["v5e"]),
    "TPU v6e 32 GB": ("v6e", TPUS["v6e"]),
    "TPU v5p 95 GB": ("v5p", TPUS["v5p"]),
    "TPU7x 96 GB": ("tpu7x", TPUS["tpu7x"]),
}


class Published(NamedTuple):
    """A published model with its shape, and the formats that the table has of its weights."""

    name: str  # of the built-in shape
    config: ModelConfig
    formats: tuple[str, ...]

    @property
    def context(self) -> int:
        """Tokens of a row."""
        return min(CONTEXT, self.config.context_length)

    @functools.cache  # noqa: B019  (a program of seconds)
    def gib(self, weights: str, devices: int = 1) -> float:
        """Returns the GiB on each of several devices."""
        return estimates.mesh_plan(self.job(weights), devices).total / _GIB

    def job(self, weights: str) -> estimates.EngineLoad:
        """Returns the model in an engine with full rows."""
        return estimates.EngineLoad(self.config, weights, "bfloat16", ROWS, self.context, CHUNK)


@functools.cache
def published() -> list[Published]:
    """Returns all built-in shapes of published models."""
    found = []
    for name, hf in SHAPES.items():
        config = from_hf(hf)
        if name != "tiny":
            formats = ("bfloat16", "mxfp4") if config.model_type == "gpt_oss" else FORMATS
            found.append(Published(name, config, formats))
    return found


def usable_bytes(card: Card | Tpu) -> float:
    """Returns the bytes of a device that jax allocates by default."""
    return card.memory_gib * _GIB * card.memory_fraction


def cards() -> list[str]:
    """Returns the devices of the table, and the memory that counts."""
    rows = [
        [
            name,
            code(f"1x{kind}"),
            f"{card.memory_gib:g}",
            f"{card.memory_fraction:.0%}",
            f"{usable_bytes(card) / _GIB:.1f}",
        ]
        for name, (kind, card) in DEVICES.items()
    ]
    return table(["device", "`--devices`", "GiB", "jax allocates", "GiB that count"], rows)


def memory() -> list[str]:
    """Returns the GiB that each model takes on one device, by the format of its weights."""
    rows = []
    for model in published():
        cells = [f"{model.gib(x):.1f}" if x in model.formats else "—" for x in (*FORMATS, "mxfp4")]
        billions = f"{estimates.num_weights(model.config) / 1e9:.2f}"
        row = estimates.row_bytes(model.job("bfloat16"), 1) / _GIB
        rows.append([code(model.name), billions, *cells, f"{row:.2f}", f"{model.context:,}"])
    head = ["model", "billion weights", "bfloat16", "int8", "int4", "MXFP4", "each row", "tokens of a row"]
    return table(head, rows)


def fits() -> list[str]:
    """Returns the widest format in which each model fits on one device. If it fits in none, returns the
    number of devices that it takes in the narrowest format.
    """
    rows = [
        [code(model.name), *(_widest(model, card) for _, card in DEVICES.values())] for model in published()
    ]
    return table(["model", *DEVICES], rows)


def fit_24_gb() -> list[str]:
    """Returns by format the models that fit on one card of 24 GB, with the flags that give this format."""
    small = [card for title, (_, card) in DEVICES.items() if "24 GB" in title]
    rows = []
    for weights, flag in FLAGS.items():
        names = [
            code(model.name) for model in published() if {weights} == {_widest(model, card) for card in small}
        ]
        rows.append([weights, flag, ", ".join(names)])
    return table(["format", "flag", "models"], rows)


def _widest(model: Published, card: Card | Tpu) -> str:
    most = usable_bytes(card) / _GIB
    for weights in model.formats:
        if model.gib(weights) <= most:
            return weights
    weights = model.formats[-1]
    sizes = estimates.valid_mesh_sizes(model.job(weights))
    devices = next((n for n in sizes if model.gib(weights, n) <= most), None)
    return f"{weights} on {devices}" if devices else "—"
