"""The settings that the answers of a run depend on: a resumed run must have the same."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax

from .. import __version__
from ..adapters.adapter import adapter_digest
from ..backends.cpu import cpu_features
from ..cache.fingerprint import draft_fingerprint, fingerprint, tree_fingerprint
from ..checkpoint.loading import Model
from ..checks import is_sequence
from ..draft_heads.draft import Draft
from ..engine.engine_options import EngineOptions
from ..engine.shape import max_request_tokens
from ..sharding import MODEL, concrete_mesh_of
from .input_lines import json_default, sha256_int
from .line_request import LineDefaults


def run_settings(
    model: Model,
    defaults: LineDefaults,
    options: EngineOptions,
    shard: tuple[int, int] | None,
    in_order: bool,
) -> dict[str, Any]:
    """Returns the settings by dotted name, such as options.sampling.top_k. The number of pages is not among
    them: it changes no answer, only the number of tokens that fit in a row (`room`). Nor are devices, except
    the sizes of meshes.
    """
    recorded = [field.name for field in dataclasses.fields(options) if field.metadata["recorded"]]
    engine = {name: getattr(options, name) for name in recorded}
    engine["room"] = max_request_tokens(model.config, options.capacity, options.pages)
    adapters: Any = options.adapters  # which `with_adapters_read` has read
    if adapters:
        digests = {name: adapter_digest(adapter).hex() for name, adapter in adapters.items()}
        engine |= dict(adapters=digests, max_adapters=options.max_adapters, max_rank=options.max_rank)
    if isinstance(options.draft, Draft):
        engine["draft"] = (
            f"{options.draft.head.kind} {draft_fingerprint(options.draft.head, options.draft.params)}"
        )
    elif options.draft == "mtp" and "draft_head" in model.params:
        engine["draft"] = f"mtp {tree_fingerprint(model.params['draft_head'])}"
    tokenizer = model.tokenizer
    text = f"{tokenizer.backend.to_str()}{tokenizer.chat_template}" if tokenizer else ""
    text += tokenizer and tokenizer.tool_template or ""
    settings = dict(
        model=fingerprint(model.params, model.config), tokenizer=sha256_int(text.encode()), engine=engine,
        shard=shard, in_order=in_order, machine=_machine(), mesh=_mesh_sizes(model, options),
        **dataclasses.asdict(defaults),
    )  # fmt: skip
    return dict(_flatten("", json.loads(json.dumps(settings, default=json_default))))


def _mesh_sizes(model: Model, options: EngineOptions) -> int | list[int]:
    """Returns the number of devices that the model is divided over, or several numbers if engines differ in
    it.
    """
    mesh = concrete_mesh_of(model.params)
    own = mesh.shape[MODEL] if mesh else 1
    sides: Any = (side or [0] for side in (options.prefill_devices, options.decode_devices))
    sizes = [len(group) if is_sequence(group) else own for side in sides for group in side]
    return own if {*sizes} == {own} else sizes


def _machine() -> dict[str, Any]:
    """Returns the other things on which the last bits of results depend. A run may continue on a machine that
    differs in them.
    """
    device = jax.devices()[0]
    features = " ".join(cpu_features.numerics_features()) if device.platform == "cpu" else None
    return dict(xinfer_jax=__version__, jax=jax.__version__, device=device.device_kind, cpu=features)


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of each leaf of nested objects."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}".lstrip("."), inner)
    else:
        yield name, value
