"""A device that decodes layer by layer: on a CPU, where compiling takes most of the time to the first answer.

What it compiles does not grow with the layers. Greedy rows need no sampler, and another model width compiles
nothing. Every token of a row comes from the same programs, whatever is compiled already.

An engine never switches to the loop over the whole model, whose steps are faster once it is compiled: the
last bits of log-probabilities would change. Only draft tokens need that loop.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ..cache.kv_cache import KVCache, without_layers
from ..generation.batch_arrays import StateSizes
from ..generation.executor import PaddedTokens, RunnableModel
from ..generation.state import DecodeState
from ..layerwise.layerwise_executor import LayerwiseExecutor, without_model_layers
from ..sampling.logprobs import Alternatives
from . import device_programs as programs
from .device_programs import SampledTokens, cache_pools, cache_states, paged_cache, running_token
from .engine_device import Device
from .row import Variant

# A step's tokens, log-probabilities, rows that continue, rows that sampled an EOS token; and `Alternatives`.
_Step = tuple[tuple[Any, Any, Any, Any], Any]
_NO_ALTERNATIVES = Alternatives(*[None] * 6)  # type: ignore[arg-type]


class LayerwiseDevice(Device):
    """A `Device` whose steps the host calls, one after another."""

    _executor: LayerwiseExecutor

    def _prompt_logprobs(
        self, model: RunnableModel, chunk: PaddedTokens, cache: KVCache, target_T: np.ndarray
    ) -> Any:
        out = self._executor.prefill_hidden(model, chunk, cache)
        outer = without_model_layers(self._model)
        return self._run(programs.TARGET_LOGPROBS, *outer, out.hidden, target_T), out.cache

    def sample_first(self, slots: list[int], greedy: bool, recorded: int) -> list[SampledTokens]:
        """Samples the first tokens of rows by the programs of one decode step."""
        among_B = np.isin(np.arange(self._shape.rows), slots)
        out = _sampled_tokens([self._sample_first(slots, among_B, greedy, recorded)], among_B)
        return [jax.tree.map(lambda x_B, i=slot: x_B[i : i + 1], out) for slot in slots]

    def decode(
        self, pages: dict[int, list[int]], steps: int, until_one_ends: bool, greedy: bool,
        recorded: int, masks_BQW: Any = None, variants: Mapping[int, Variant] | None = None,
    ) -> SampledTokens:  # fmt: skip
        """Decodes rows by a program for each group of layers, until they end (`Device.decode`)."""
        self._set_masks(masks_BQW)
        running_B = np.isin(np.arange(self._shape.rows), [*pages])
        cache = self._decode_cache(pages)
        model = self._model_of_slots(variants)
        done: list[_Step] = []
        continues_B = running_B
        for _ in range(steps):
            cache, step = self._decode_step(cache, running_B, greedy, recorded, model)
            done.append(step)
            if len(done) == 1:
                continue
            # Of the step before: the device never waits for the host. A step of ended rows changes nothing.
            before_B = continues_B
            continues_B = np.asarray(done[-2][0][2])
            if not continues_B.any() or (until_one_ends and (before_B & ~continues_B).any()):
                break
        self.pools = cache_pools(cache)
        self.states = cache_states(cache)
        return _sampled_tokens(done, running_B)

    def stages(self) -> dict[str, Callable[[], Any]]:
        """Calls that together run every program, those of sampled rows apart from greedy ones."""
        stages = super().stages()
        sampled = dict(greedy=stages.pop("greedy"), sampled=lambda: self._run_short_request(greedy=False))
        recorded = dict(processed=lambda: self._run_recorded(1), logprobs=lambda: self._run_recorded(2))
        return sampled | stages | recorded

    def _run_recorded(self, recorded: int) -> None:
        for greedy in (True, False):
            self._run_short_request(greedy, recorded)

    def _run_decode(self, greedy: bool, recorded: int) -> None:
        cache = self._decode_cache({})
        self._decode_step(cache, self._no_rows_B, greedy, recorded, self._model_of_slots(None))

    def _run_first(self, outputs: Any, row: DecodeState, greedy: bool, recorded: int) -> None:
        self.put_first(0, outputs, row)
        self._sample_first([0], self._no_rows_B, greedy, recorded)

    @property
    def _no_rows_B(self) -> np.ndarray:
        return np.zeros(self._shape.rows, bool)

    @property
    def _state_sizes(self) -> StateSizes:
        return super()._state_sizes._replace(alternatives=None)

    def _decode_cache(self, pages: dict[int, list[int]]) -> KVCache:
        """The cache of all rows, committed as after a step; `running_token` sets their lengths."""
        rows = self._shape.rows
        table_BP = self._block_table(pages, rows)
        zeros_B = np.zeros(rows, np.int32)
        pools = self.pools, self.states
        cache = paged_cache(self.config, *pools, table_BP, self._shape.capacity, zeros_B, zeros_B)
        # A table for each layer and for routes: a step donates it.
        layers: Any = tuple(
            dataclasses.replace(layer, table_BP=self._put(table_BP)) if layer.has_keys else layer
            for layer in cache.layers
        )
        routes = cache.routes and dataclasses.replace(cache.routes, table_BP=self._put(table_BP))
        return dataclasses.replace(self._put(without_layers(cache)), layers=layers, routes=routes)

    def _decode_step(
        self, cache: KVCache, running_B: np.ndarray, greedy: bool, recorded: int, model: RunnableModel
    ) -> tuple[KVCache, _Step]:
        inputs = self.rows.progress, self.rows.position_B, running_B
        out = self._executor.forward(model, running_token, inputs, cache, 0)
        return out.cache, self._append_token(out.hidden, running_B, greedy, recorded)

    def _sample_first(self, slots: list[int], among_B: np.ndarray, greedy: bool, recorded: int) -> _Step:
        firsts, self._firsts = self._firsts, {}
        logits_B1V: Any = np.zeros((self._shape.rows, 1, self.config.vocab_size), np.float32)
        logits_B1V = self._put(logits_B1V)
        for slot in slots:
            outputs, row = firsts[slot]
            self._put_row(slot, row)
            args = *without_model_layers(self._model), outputs, logits_B1V, np.int32(slot)
            logits_B1V = self._run(programs.SET_LOGITS, *args)
        return self._append_token(logits_B1V, among_B, greedy, recorded)

    def _append_token(self, logits_B1V: Any, among_B: np.ndarray, greedy: bool, recorded: int) -> _Step:
        self.rows, sampled = self._executor.append_token(logits_B1V, self.rows, greedy, among_B, recorded > 0)
        alternatives: Any = None
        if recorded:
            taken = logits_B1V, sampled.taken_BV, sampled.token_B
            processed_B1 = self._run(programs.PROCESSED_LOGPROBS, *taken)
            others = self._run(programs.ALTERNATIVES, *taken) if recorded > 1 else _NO_ALTERNATIVES
            # By one program: another one's may have other bits.
            alternatives = dataclasses.replace(others, processed_BT=processed_B1)
        return (sampled.token_B, *sampled[2:]), alternatives


def _sampled_tokens(steps: list[_Step], among_B: np.ndarray) -> SampledTokens:
    """On the host: what the rows of `among_B`, all active before, sampled in these steps."""
    of_steps, alternatives = zip(*jax.device_get(steps), strict=True)
    stacked = [np.stack(xs, 1) for xs in zip(*of_steps, strict=True)]
    tokens_BT, logprobs_BT, continues_BT, finished_BT = stacked
    active_BT = np.concatenate([among_B[:, None], continues_BT[:, :-1]], 1)
    count_B = active_BT.sum(1, dtype=np.int32)
    joined: Any = None
    if alternatives[0] is not None:
        joined = jax.tree.map(lambda *xs: np.concatenate(xs, 1), *alternatives)
    none_B = np.zeros_like(count_B)
    return SampledTokens(tokens_BT, logprobs_BT, count_B, finished_BT[:, -1], joined, count_B, none_B)
