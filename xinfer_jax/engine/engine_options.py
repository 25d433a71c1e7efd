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
    from ..draft_heads.draft import Draft
    from ..sampling.caller_processors import LogitsProcessor

    Device: TypeAlias = int | jax.Device | Sequence[int | jax.Device]

from ..old_names import keyword_options


def _option(default: Any, flag: bool = True, recorded: bool = True, **limits: Any) -> Any:
    """Returns a field.

    Args:
        default: the value if none is given.
        flag: commands have a flag of this name and meaning.
        recorded: answers depend on the value.
        limits: `least` and `most` of a number, and the `words` that may stand in its place, or the `choices`
            of its flag.
    """
    return dataclasses.field(default=default, metadata=dict(flag=flag, recorded=recorded, **limits))


@keyword_options(routes="routed_experts")
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an `Engine`.

    You can pass them as keyword arguments: `Engine(model, rows=4)` is `Engine(model, EngineOptions(rows=4))`.
    The engine checks them.

    Attributes:
        rows: the number of slots of an engine, which is the number of answers that are decoded together
            (vLLM: max_num_seqs).
        data_parallel: the number of engines behind one queue. Each has a copy of the parameters on its own
            devices, and `rows` slots. If the model lies on several devices, each engine gets an equal number
            of them.
        capacity: the most tokens of a prompt and its answer together. Default: 4096, or the model's context
            length if that is less.
        pages: the number of KV cache pages of 64 tokens each, for all rows and the prefix cache. Default:
            half of the memory that the weights leave (on a CPU: this engine's devices' part of it), and at
            most twice as many pages as all rows can fill.
        chunk: the tokens of a prompt that are prefilled between decode steps. A multiple of 64.
        prefix_cache: compute the common beginning of prompts only once.
        time_slice: the time, in seconds, after which a row can lose its slot to another client. While a
            client without a slot waits, the row that has had its slot for the longest time, and at least for
            this time, is preempted. It continues with the same bits when a slot is free, or in place of a row
            that has had its slot for `rows` time slices. A smaller value swaps more pages out and in. 0: no
            row is preempted for this reason.
        draft: the source of draft tokens for speculative decoding. "lookup" finds them earlier in the text,
            "mtp" is the head of the model's files (`load_model(path, draft_head=True)`), and `load_draft`
            returns other heads.
        draft_tokens: the number of draft tokens in each forward pass. "auto": from 0 to 4. The engine
            measures acceptance rates and the time of a pass, and takes the number with the most tokens per
            second. This number depends on other requests and on the machine, so an answer may have other bits
            than alone. Its tokens are the same, except at a position whose two best scores are as close as
            rounding.
        cache_dtype: the dtype of keys and values, as for `GenerateOptions`. "gear" raises `InputError`, since
            it needs whole rows.
        impl: the implementation of the operations, as for `GenerateOptions`.
        warm_up: compile all programs before the engine is ready. Use it for measurements and long runs.
        host_pages: the number of pages in host memory, next to `pages`. The prefix cache saves there the
            pages that it evicts from the device, and copies them back for a prompt that begins with them. If
            the model has recurrent states, host memory also has one snapshot of them for each four chunks in
            these pages, and at least as many snapshots as the device.
        page_directory: a directory for files of such pages, which later engines of this model find. It must
            belong to the user and have the mode 0700.
        page_directory_bytes: the most bytes of all files in that directory. If there are more, the least
            recently used files are deleted.
        prefill_devices: the devices that prefill prompts, while other devices decode (disaggregated prefill).
            The list has numbers of local devices, or devices. If an entry is a list of devices, the model is
            sharded over them. Each entry has an engine of this shape. If the meshes on both sides are equal,
            a request has the same bits that one such engine gives. The engines that prefill have the prefix
            cache. For requests with `share_answers`, pages that decoding wrote go back there.
        decode_devices: the devices that decode answers, in the form of `prefill_devices`.
        role: "prefill" or "decode": the part that this engine does for a `Dispatcher`.
        adapters: LoRA adapters that the engine has from the start: a dict from names to adapters, as
            `add_adapter` takes them.
        max_adapters: the most adapters at a time. Default: the number of given adapters.
        max_rank: the largest rank of an adapter. Every adapter takes the memory of this rank on every matrix
            of the layers. Default: the largest rank of the given adapters, or 16.
        routed_experts: record in pages which experts of a mixture the tokens use, for `return_routed_experts`
            of `submit` and of a request's body.
        support: also record, in each step, the ids from which each token could be sampled, for
            `return_support` of `submit`. It takes ceil(V/32) words per token.
        processors: logits processors that you wrote, as a dict from names to pairs of a `LogitsProcessor` and
            its default arguments, without rows. A request names them with
            `GenerateOptions(processors={name: arguments})`. They are applied in the order of this dict.
            Requests that name none keep their bits.
        taps: vectors for steering, as a dict from names to {layer: float [D]}. A request names them with
            `GenerateOptions(taps={name: factor})`, and the engine then adds factor times the vector to the
            hidden states after these layers. Pages of such a request are never shared.
    """

    rows: int = _option(8, least=1)
    data_parallel: int = _option(1, recorded=False, least=1)
    capacity: int | None = _option(None, least=2)
    pages: int | None = _option(None, recorded=False, least=2)
    chunk: int = _option(256, least=64)
    prefix_cache: bool = _option(True)
    time_slice: float = _option(0.5, least=0.0, most=1e9)
    draft: "Draft | Literal['lookup', 'mtp'] | None" = _option(None)
    draft_tokens: int | Literal["auto"] = _option(3, least=1, most=16, words=("auto",))
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
    draft: "Draft | Literal['lookup', 'mtp'] | None"
    draft_tokens: int | Literal["auto"]
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


def option_texts(options: type = EngineOptions) -> dict[str, str]:
    """Returns the text of each option, from the docstring of its class. Flags of commands show it."""
    attributes = inspect.getdoc(options) or ""
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
