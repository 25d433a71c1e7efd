"""`Engine.replay`: an answer is computed again by the same programs in the same order, with the tokens that
the engine sampled, and with the parameters and keys that it had.

The chunks of a prompt follow from its length, and a row's bits depend on no other row. So an answer keeps of
its past only the points at which its parameters were replaced, and whether its keys were computed again
(`Switch`).
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from ..adapters.adapter import Adapter
from ..errors import InputError, format_names, format_value
from ..generation.state import SampledTokens
from ..ops.operation import without_mesh_context
from ..sampling.sampling_config import SamplingConfig
from ..weights.params import Params
from .answers import Answer
from .async_sampling import SampleOutput
from .core import EngineCore
from .engine_device import NewRow
from .held_adapters import own_adapter, row_values
from .pausing import RELEASED
from .requests import Request
from .row import HeldAdapter, Row

AdapterVersions: TypeAlias = Mapping[int, Adapter | str | Path]


@without_mesh_context
def replay_answer(
    engine: Any,
    core: EngineCore,
    given: Answer | Request | SampleOutput,
    params: Mapping[int, Params],
    adapters: AdapterVersions,
) -> list[float]:
    """Runs `Engine.replay`."""
    answer = given.answer if isinstance(given, SampleOutput) else given
    if isinstance(answer, Request):
        answer = answer.single_answer
    if not isinstance(answer, Answer):
        raise InputError(
            "replay needs a request, one of its answers, or what sample returned in this process, got"
            f" {format_value(given)}"
        )
    engine.check_open()
    _check(engine, answer, params, adapters)
    trees = {switch.version: params[switch.version] for switch in answer.switches}
    trees = {version: engine.weights.fit(tree) for version, tree in trees.items()}
    matrices = {}
    model = dataclasses.replace(engine.model, params=trees[answer.switches[0].version])
    for version in _adapter_versions(answer):
        matrices[version] = row_values(own_adapter(model, engine.shape, adapters[version]))
    with engine.updating, engine.without_steps():
        engine.check_open()
        return _Replay(core, answer).run(trees, matrices)


def _adapter_versions(answer: Answer) -> set[int]:
    return {switch.adapter_version for switch in answer.switches if answer.request.adapter}


def _check(engine: Any, answer: Answer, params: Mapping[int, Params], adapters: AdapterVersions) -> None:
    if answer.ended_by is None or not answer.logprobs:
        raise InputError("replay needs an answer that has ended, with at least one token")
    if missing := sorted({switch.version for switch in answer.switches} - {*params}):
        raise InputError(f"the answer needs parameters of version {format_names(missing)}: give them too")
    if missing := sorted(_adapter_versions(answer) - {*adapters}):
        raise InputError(f"the answer needs its adapter of version {format_names(missing)}: give it too")
    if engine.pausing.phase == RELEASED:
        raise InputError("an engine without pages cannot replay: call restore_cache() first")
    row = answer.row
    if row.share_answers and (engine.role or not row.exact or len(row.ids) != len(answer.request.ids)):
        raise InputError("with share_answers it may have pages of other answers: submit without it to replay")
    if row.longest > engine.usable_capacity:
        raise InputError(f"the answer needs a row of {row.longest} tokens: take an engine of its shape")


class _Replay:
    """One answer on the device of an engine that takes no step meanwhile, in a borrowed slot."""

    def __init__(self, core: EngineCore, answer: Answer):
        request = answer.request
        plain: Any = dict(sampling=SamplingConfig(), grammar=None, logprobs=0)
        options = dataclasses.replace(request.call.options, **plain)
        checked: Any = dict(sampling_B=None, grammars=(), callers=None)
        self._call = dataclasses.replace(request.call, options=options, **checked)
        self._core = core
        self._device: Any = core.device
        self._answer = answer
        self._ids = answer.tokens
        self._logprobs: list[float] = []
        scored = request.request_options.prompt_logprobs is not None and answer is request.answers[0]
        adapter = HeldAdapter("", 0, b"") if request.adapter else None
        self._row = Row(
            request.ids,
            options.max_tokens,
            logprobs_from=0 if scored else None,
            adapter=adapter,
            factors=request.factors,
        )
        self._slot = core.scheduler.slots.index(None) if None in core.scheduler.slots else 0

    def run(self, params: Mapping[int, Params], matrices: Mapping[int, Any]) -> list[float]:
        """Computes the answer again. matrices: `row_values` of each version of its adapter, if it has one."""
        core = self._core
        row = self._row
        device = self._device
        own = device.params, device.adapters
        if matrices:
            device.adapters = device.empty_adapters()
        core.sample_firsts()
        core.lend_pages(row)
        contents = device.get_row(self._slot)
        try:
            switches = self._answer.switches
            ends: list[tuple[float, int]] = [(switch.computed, switch.sampled) for switch in switches[1:]]
            ends.append((math.inf, len(self._ids)))
            for switch, (computed, sampled) in zip(switches, ends, strict=True):
                device.params = params[switch.version]
                if matrices:
                    core.weights.set_adapter(0, matrices[switch.adapter_version])
                if switch.recomputed:
                    self._restart()
                self._prefill(computed)
                while len(self._logprobs) < sampled:
                    self._decode()
        finally:
            device.params, device.adapters = own
            device.set_row(self._slot, contents)
            core.scheduler.pool.release(row.pages)
        return self._logprobs[: len(self._ids)]

    def _restart(self) -> None:
        row = self._row
        row.restart([*self._answer.request.ids, *self._ids[: max(0, len(self._logprobs) - 1)]])

    def _prefill(self, end: float) -> None:
        """Prefills the row up to this token. After the prompt it has its first token."""
        row = self._row
        while row.num_computed < min(len(row.ids), end):
            chunk = self._core.scheduler.next_chunk(row)
            outputs = self._core.prefill_chunk(chunk, self._slot)[0]
            row.num_computed = int(min(chunk.start + chunk.count, end))  # found pages may end earlier
            if chunk.is_last and not self._logprobs:
                self._device.put_first(self._slot, outputs)
                new = {self._slot: NewRow(self._call, self._answer.number, self._masks()[0])}
                self._append(self._device.sample_first(new, False, False, {}))

    def _decode(self) -> None:
        pages = {self._slot: self._row.pages}
        variants = {self._slot: self._row.variant}
        out = self._device.decode(pages, 1, False, False, {}, self._masks(), variants)
        if not (count := self._append(out)):
            raise InputError("these parameters give numbers that are not finite")
        self._row.num_computed += count

    def _append(self, out: SampledTokens) -> int:
        logprobs_BT, count_B = jax.device_get((out.logprobs_BT, out.count_B))
        count = int(count_B[self._slot])
        self._logprobs += logprobs_BT[self._slot, :count].tolist()
        return count

    def _masks(self) -> np.ndarray:
        """Returns uint32 [slots, 1 + draft tokens, words] that allow the answer's next tokens alone, in all
        slots.
        """
        shape = self._core.shape
        words = -(-self._call.config.vocab_size // 32)
        masks_BQW = np.zeros((shape.rows, 1 + shape.num_draft_tokens, words), np.uint32)
        ids = self._ids[len(self._logprobs) :]
        for q in range(masks_BQW.shape[1]):
            token = ids[min(q, len(ids) - 1)]
            masks_BQW[:, q, token // 32] = 1 << token % 32
        return masks_BQW
