"""`EngineOptions`: the arguments of an engine. Its check and its flag follow from an entry. An entry also
says whether a batch run must be continued with the same value. It imports no jax, since commands check their
flags before they do.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    import jax

    from ..adapters.adapter import Adapter
    from ..annotations import AnyArray, Dtype
    from ..sampling.caller_processors import LogitsProcessor

    Device: TypeAlias = int | jax.Device | Sequence[int | jax.Device]

from ..old_names import keyword_options


def _option(default: Any, flag: bool = True, recorded: bool = True, **limits: Any) -> Any:
    """Returns a field.

    Args:
        default: the value if none is given.
        flag: commands have a flag of this name and meaning.
        recorded: answers depend on the value.
        limits: `least` and `most` of a number, or the `choices` of its flag.
    """
    return dataclasses.field(default=default, metadata=dict(flag=flag, recorded=recorded, **limits))


@keyword_options(routes="routed_experts")
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The arguments of an engine: `Engine(model, rows=4)` is `Engine(model, EngineOptions(rows=4))`, which
    checks them.

    Attributes:
        rows: slots of an engine: answers that are decoded together (vLLM: max_num_seqs).
        data_parallel: number of engines behind one queue, each with a copy of the parameters on devices of
            its own and with `rows` slots. If the model lies on several devices, each engine gets as many.
        capacity: maximum tokens of a prompt and its answer together. Default: 4096, or the model's context
            length if that is less.
        pages: KV cache pages of 64 tokens each, for all rows and the prefix cache. Default: half of the
            memory that the weights leave (on a CPU: this engine's devices' part of it), at most twice what
            all rows can fill.
        chunk: tokens of a prompt that are prefilled between decode steps; a multiple of 64.
        prefix_cache: the common beginning of prompts is computed once.
        time_slice: seconds. While a client without a slot waits, the row that has had its slot for the
            longest time, and for this long at least, is preempted. It continues with the same bits when a
            slot is free, or in place of a row that has had its slot for `rows` time slices. A smaller value
            swaps more pages out and in. 0: no row is preempted for this.
        draft: "lookup": speculative decoding with draft tokens found earlier in the text.
        draft_tokens: draft tokens of each pass.
        cache_dtype: of keys and values, as in `GenerateOptions`; "gear" is for whole rows only.
        impl: as in `GenerateOptions`.
        warm_up: all programs are compiled before the engine is ready, for measurements and long runs.
        host_pages: pages in host memory, next to `pages`: the prefix cache saves there what it evicts from
            the device, and copies it back for a prompt that begins with it.
        page_directory: such pages are also written to files, which later engines of this model find. A
            directory of the user's own, with mode 0700.
        page_directory_bytes: size of all files in it; the least recently used are deleted.
        prefill_devices: the devices that prefill prompts, while others decode (`Dispatcher`): numbers of
            local devices, or devices. A list in place of a device: the model is divided over these. Each
            device, or list, has an engine of this shape. With equal meshes on both sides a request has the
            bits of one such engine. The prefix cache is with the engines that prefill; pages that decoding
            wrote go back there for requests with `share_answers`.
        decode_devices: the same, of the devices that decode answers.
        role: "prefill" or "decode": what this engine does for a `Dispatcher`.
        adapters: LoRA adapters that it holds from the start, by name, as `add_adapter` takes them.
        max_adapters: adapters that it has place for. Default: the given ones.
        max_rank: of each adapter. All take the place of one of this rank on every matrix of the layers.
            Default: the largest of the given ones, or 16.
        routed_experts: pages also record which experts of a mixture their tokens use, for
            `return_routed_experts` of `submit` and for `return_routed_experts` of a request's body.
        support: each step can also record which ids its tokens could be sampled from, for `return_support` of
            `submit`: ceil(V/32) words of a token.
        processors: logits processors of yours (`LogitsProcessor`) by name, each with the arguments of a
            request that gives none, without rows. `GenerateOptions(processors={name: arguments})` of a
            request names them; they are applied in this order. Other requests keep their bits.
        taps: vectors by name, float [D] by layer, that `GenerateOptions(taps={name: factor})` of a request
            adds to the hidden states after these layers (steering). Pages of such a request are never shared.
    """

    rows: int = _option(8, least=1)
    data_parallel: int = _option(1, recorded=False, least=1)
    capacity: int | None = _option(None, least=2)
    pages: int | None = _option(None, recorded=False, least=2)
    chunk: int = _option(256, least=64)
    prefix_cache: bool = _option(True)
    time_slice: float = _option(0.5, least=0.0, most=1e9)
    draft: Literal["lookup", "none"] | None = _option(None, choices=("lookup", "none"))
    draft_tokens: int = _option(3, least=1, most=16)
    cache_dtype: "Dtype | None" = _option(None, flag=False)
    impl: str | None = _option(None, flag=False)
    warm_up: bool = _option(False, recorded=False)
    host_pages: int = _option(0, recorded=False, least=0)
    page_directory: str | PathLike[str] | None = _option(None, recorded=False)
    page_directory_bytes: int = _option(2**34, recorded=False, least=1, most=2**60)
    prefill_devices: "Sequence[Device] | None" = _option(None, flag=False, recorded=False)
    decode_devices: "Sequence[Device] | None" = _option(None, flag=False, recorded=False)
    role: Literal["prefill", "decode"] | None = _option(None, flag=False, recorded=False)
    adapters: "Mapping[str, Adapter | str | PathLike[str]] | None" = _option(None, flag=False, recorded=False)
    max_adapters: int | None = _option(None, recorded=False, least=0)
    max_rank: int | None = _option(None, recorded=False, least=1)
    routed_experts: bool = _option(False)
    support: bool = _option(False, flag=False)
    processors: "Mapping[str, tuple[LogitsProcessor, Any]] | None" = _option(None, flag=False)
    taps: "Mapping[str, Mapping[int, AnyArray]] | None" = _option(None, flag=False)


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineOptions` as keyword arguments: `Engine(model, rows=4)`. They have the
    types that they have there.
    """

    rows: int
    data_parallel: int
    capacity: int | None
    pages: int | None
    chunk: int
    prefix_cache: bool
    time_slice: float
    draft: Literal["lookup", "none"] | None
    draft_tokens: int
    cache_dtype: "Dtype | None"
    impl: str | None
    warm_up: bool
    host_pages: int
    page_directory: str | PathLike[str] | None
    page_directory_bytes: int
    prefill_devices: "Sequence[Device] | None"
    decode_devices: "Sequence[Device] | None"
    role: Literal["prefill", "decode"] | None
    adapters: "Mapping[str, Adapter | str | PathLike[str]] | None"
    max_adapters: int | None
    max_rank: int | None
    routed_experts: bool
    support: bool
    processors: "Mapping[str, tuple[LogitsProcessor, Any]] | None"
    taps: "Mapping[str, Mapping[int, AnyArray]] | None"


def option_texts() -> dict[str, str]:
    """Returns the text of each option, which is in the docstring of `EngineOptions`."""
    attributes = inspect.getdoc(EngineOptions) or ""
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
