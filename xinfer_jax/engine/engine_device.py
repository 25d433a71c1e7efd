"""The arrays of an engine on its device (parameters, pages and rows), and the programs that change them. No
row affects another.

prefill chunk ─ prefill ─► pages; the last chunk's outputs ─ put_first, sample_first ─► rows, SampledTokens
rows, pages ─ decode ─► rows, pages, SampledTokens

On one CPU the host calls the programs of each step (`LayerwiseExecutor`). So the number of compiled programs
does not grow with the layers, greedy rows need no sampler, and another model width compiles nothing.

Every token of a row comes from the same programs, whatever is compiled already. The loop over the whole model
has faster steps once it is compiled, but an engine never switches to it: the last bits of log-probabilities
would change. Only draft tokens need that loop.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from ..cache.kv_cache import KVCache
from ..cache.layer_cache import LayerCache
from ..cache.paged import PAGE_SIZE
from ..config.model_config import ModelConfig
from ..config.run_config import RunConfig
from ..generation.batch_arrays import StateSizes, settings_of_rows, state_of_rows, token_matrix
from ..generation.executor import Executor, PaddedTokens, Run, RunnableModel, without_model_layers
from ..generation.executor_choice import executor_class
from ..generation.loop import TracedExecutor
from ..generation.options import GenerateOptions
from ..generation.proposers import FunctionProposer, HeadProposer, prompt_lookup
from ..generation.speculation import Speculative
from ..generation.state import DecodeState, SampledTokens, UnreadFeatures
from ..generation.strategies import Plain
from ..generation.validation import ValidatedCall, validate_call
from ..grammar.automaton import Dfa
from ..layerwise.precompile import with_sharding
from ..model.extras import NO_EXTRAS
from ..sampling.caller_processors import start_rows
from ..sampling.context import ALL_BITS
from ..sharding import REPLICATED, concrete_mesh_of
from ..weights.params import Params, activation_dtype
from . import device_programs as programs
from .adapter_stack import AdapterStack
from .device_programs import CacheArrays, RowsCall, RowSteps, cache_pools, cache_states, paged_cache
from .head_programs import prefill_chunk_with_head, read_unread
from .held_processors import repeated
from .host_pages import HostPages
from .host_tier import COPIED_PAGES
from .pages import num_pages_for
from .row import PLAIN, Variant
from .shape import EngineShape, head_params

MAX_EOS_IDS = 8
MAX_STOP_IDS = 16  # further ids that end a row
MAX_NEW_ROWS = 8  # that one program puts into their slots
_READ_TOKENS = 8  # of a row that a head reads at a time, if it has passed over some


class NewRow(NamedTuple):
    """A row before its first token."""

    call: ValidatedCall  # of one prompt
    answer: int = 0  # its number among the answers to the prompt
    masks_QW: Any = None  # uint32: the tokens that its grammar allows; None: all
    tables: Any = None  # the arrays of its grammar's `Dfa`
    callers: Sequence[np.ndarray] = ()  # the leaves of its processors


class Device:
    """Pages and rows on the device.

    Attributes:
        params, config: the model.
        next_params: the parameters that `adopt_params` sets. Over several processes each process sets its
            own.
        pools: (k, v) of each mixer with keys.
        states: the recurrent states of all slots, the cache of each mixer without keys.
        rows: the state of all slots, with all settings and without output.
        host, host_snapshots: pages, and snapshots of recurrent states, in host memory. None: there are none,
            or this is a dry run.
        adapters: the adapters. None: it has none.
    """

    def __init__(
        self, params: Params, config: ModelConfig, shape: EngineShape, run: Run, dry_run: bool = False
    ):
        """Makes the arrays and programs. dry_run: True: pages and states are shapes."""
        self.config = config
        self.adapters: AdapterStack | None = None
        self.params = params
        self.next_params: Any = None
        self._shape = shape
        self._run = run
        self._dry_run = dry_run
        self._executor_class = executor_class(params)
        self._head_params = head_params(params, shape)
        self._strategies = {width: _strategy_of(config, shape, width) for width in shape.draft_widths}
        self._first_width = shape.draft_widths[0]
        self._most_unread = [shape.num_unread] * shape.rows  # of each slot: tokens that its head has not read
        norm = params["final_norm"]
        self._mesh = concrete_mesh_of(params)
        self._device = norm.device if self._mesh is None and getattr(norm, "committed", False) else None
        self.pools, self.states, self._snapshots = self._empty_cache()
        self._num_own_pools = len(self.pools) - shape.num_head_pools
        self.adapters = self.empty_adapters() if shape.max_adapters else None
        has_host = shape.host_pages and not dry_run
        self.host = HostPages(shape.host_pages, self.pools) if has_host else None
        has_host = shape.host_snapshots and not dry_run
        self.host_snapshots = HostPages(shape.host_snapshots, self._snapshots) if has_host else None
        row = self._initial_rows([NewRow(self._empty_call)])
        rows: Any = jax.tree.map(lambda x: repeated(x, shape.rows), row)
        rows = dataclasses.replace(rows, limit_B=np.zeros(shape.rows, np.int32))
        self.rows: Any = self._put(shape.processors.with_rows(rows) if shape.processors else rows)
        self._first_outputs: Any = None  # of all slots, for the next `sample_first`
        self._proposed_BT: Any = None  # draft tokens of a head, for the next step
        self._has_masks = False  # the last call of `decode` had masks

    def adopt_params(self) -> None:
        self.params, self.next_params = self.next_params, None
        self._head_params = head_params(self.params, self._shape)

    def release_cache(self) -> None:
        """Frees the device memory of pages, recurrent states and snapshots."""
        for host in filter(None, (self.host, self.host_snapshots)):
            host.finish()
        caches = self.pools, self.states, self._snapshots
        self._shardings = jax.tree.map(lambda x: x.sharding, caches)
        for x in jax.tree.leaves(caches):
            x.delete()

    def restore_cache(self) -> None:
        """Allocates the arrays that `release_cache` freed, with their earlier shardings."""
        cache = self._empty_cache()
        placed = cache if self._mesh is None else jax.device_put(cache, self._shardings)
        self.pools, self.states, self._snapshots = placed

    def new_rows(self, new: Sequence[NewRow]) -> DecodeState:
        """Returns rows before their first token."""
        rows = self._put(self._initial_rows(new))
        held = self._shape.processors
        if not held:
            return rows
        callers = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(held.of_row(row[-1]) for row in new))
        return start_rows(callers, np.arange(len(new)), rows, self._run)

    def draft_tokens(self, pages: dict[int, list[int]], width: int | None = None) -> np.ndarray:
        """Returns, int32 [B, width], the draft tokens that the next step of `decode` verifies. Call it only
        if there are draft tokens, with the width of that step, and after `read_unread`. pages: the pages of
        the running rows by their slots.
        """
        executor = self._decoder(True)
        steps, call = self._rows_call(executor, [*pages], {}, width)
        table_BP = self._put(self._block_table(pages, self._shape.rows))
        caches = self._caches(self.states)
        model = self._model_of_slots(None)
        call = call._replace(tables=(table_BP,))
        args = self.rows, caches._replace(head=()), model.params, model.extras, self._head_params, call
        head, draft_BT = executor.run_steps(programs.propose_rows, steps, caches.head, args)
        self.pools = (*caches.pools, *head)
        self._proposed_BT = None if self._dry_run else draft_BT
        return np.asarray(draft_BT)

    def read_unread(self, pages: dict[int, list[int]], width: int, steps: int) -> bool:
        """Lets the head read the tokens that it has not read, if the next `decode` needs it. Returns True if
        it read. pages, width, steps: the arguments of that call.
        """
        shape = self._shape
        if not shape.num_head_pools:
            return False
        most = 1 + width if width else shape.num_unread - steps
        if all(self._most_unread[slot] <= most for slot in pages):
            return False
        static = shape.head, shape.capacity, _READ_TOKENS
        running_B = np.isin(np.arange(shape.rows), [*pages])
        table_BP = self._put(self._block_table(pages, shape.rows))
        caches = self._caches(self.states)
        args = self._head_params, self.params, self.rows, running_B, table_BP
        run_steps = self._decoder(True).run_steps
        head, unread = run_steps(read_unread, static, caches.head, args)
        self.pools = (*caches.pools, *head)
        self.rows = dataclasses.replace(self.rows, unread=unread)
        for slot in pages:
            self._most_unread[slot] = 1
        if not self._dry_run:
            jax.block_until_ready(unread)
        return True

    def finish_pages(self, slot: int, pages: list[int]) -> None:
        """Lets the head read all tokens of a row that ends, because other rows will share its pages."""
        self.read_unread({slot: pages}, 0, self._shape.num_unread - 1)

    def prefill(
        self,
        slot: int,
        pages: list[int],
        ids: Sequence[int],
        start: int,
        longest: int,
        is_full: bool,
        is_final: bool = True,
        variant: Variant = PLAIN,
    ) -> Any:
        """Prefills ids into these pages of the row in a slot. Returns the outputs of the last id, for
        `sample_first`.

        Args:
            start: the position of the first id.
            longest: the number of tokens of its prompt and answer.
            is_full: True: the program of a full chunk runs, otherwise the program of a page.
            is_final: False: `prefill_with_logprobs` prefills the same ids next, from the same state.
            variant: the variant of the row.
        """
        chunk = self._padded(ids, self._shape.chunk if is_full else PAGE_SIZE)
        width = chunk[0].shape[1]
        cache = self._cache(slot, pages, start, longest)
        if self._shape.head:
            return self._prefill_with_head(slot, pages, chunk, cache, variant, is_final)
        out = self._executor().prefill(self._model_of([variant]), chunk, cache, width)
        self._store(slot, out.cache, is_final)
        return out.hidden

    def prefill_with_logprobs(
        self,
        slot: int,
        pages: list[int],
        ids: Sequence[int],
        start: int,
        longest: int,
        targets: Sequence[int],
        variant: Variant = PLAIN,
    ) -> Any:
        """Prefills at most a page, as `prefill` does. Returns `Alternatives` of the tokens after the ids,
        which are `targets`. No processor is applied.
        """
        (target_T,) = token_matrix([targets], 1, PAGE_SIZE)
        cache = self._cache(slot, pages, start, longest)
        chunk = self._padded(ids, PAGE_SIZE)
        outer = without_model_layers(self._model)
        if self._shape.head:
            hidden_1TD, _ = self._prefill_with_head(slot, pages, chunk, cache, variant, whole=True)
            return self._run(programs.TARGET_LOGPROBS, *outer, hidden_1TD, target_T)
        out = self._executor().hidden(self._model_of([variant]), chunk, cache)
        self._store(slot, out.cache)
        return self._run(programs.TARGET_LOGPROBS, *outer, out.hidden, target_T)

    def _prefill_with_head(
        self,
        slot: int,
        pages: list[int],
        chunk: PaddedTokens,
        cache: KVCache,
        variant: Variant,
        is_final: bool = True,
        whole: bool = False,
    ) -> tuple[Any, Any]:
        """Runs `head_programs.prefill_chunk_with_head`, and keeps what it wrote. Returns the outputs and the
        features of the last token.
        """
        shape = self._shape
        model = self._model_of([variant])
        static = shape.head, self.config, shape.capacity, whole
        caches = cache, self._caches(()).head
        args = model.params, model.extras, self._head_params, self._block_table({0: pages}, 1), chunk
        run_steps = self._executor().run_steps
        outputs, features_1X, cache, head = run_steps(prefill_chunk_with_head, static, caches, args)
        self._store(slot, cache, is_final, head)
        return outputs, features_1X

    def put_first(self, slot: int, outputs: Any) -> None:
        """Keeps the result of the last `prefill` of the row in a slot, for `sample_first`."""
        logits = outputs if self._shape.head else self._executor().logits(self._model, outputs)
        if self._first_outputs is None:
            self._first_outputs = self._run(programs.REPEAT_ROW, logits, self._shape.rows)
        else:
            args = self._first_outputs, np.int32(slot), logits
            self._first_outputs = self._run(programs.SET_ROW, *args)

    def sample_first(
        self, new: Mapping[int, NewRow], together: bool, greedy: bool, recorded: Mapping[int, int]
    ) -> SampledTokens:
        """Puts new rows into these slots, after `put_first` of each, and samples their first tokens.

        Args:
            new: the rows by their slots.
            together: several rows are put by one program, which the stage "several" compiles.
            greedy: the rows use no sampling setting.
            recorded: `Request.recorded` of the slots, if it is not 0.
        """
        size = MAX_NEW_ROWS if together else 1
        for at in range(0, len(new), size):
            self._put_rows([*new][at : at + size], [*new.values()][at : at + size])
        executor = self._executor(greedy)
        outputs, self._first_outputs = self._first_outputs, None
        outputs, features_BX = outputs if self._shape.head else (outputs, None)
        steps, call = self._rows_call(executor, [*new], recorded)
        args = outputs, features_BX, call
        self.rows, out = executor.run_steps(programs.sample_one_token, steps, self.rows, args)
        for slot in new:
            self._most_unread[slot] = 1
        return _wanted(out, recorded)

    def decode(
        self, pages: dict[int, list[int]], steps: int, until_one_ends: bool, greedy: bool,
        recorded: Mapping[int, int], masks_BQW: Any = None, variants: Mapping[int, Variant] | None = None,
        width: int | None = None,
    ) -> SampledTokens:  # fmt: skip
        """Decodes the rows in these slots, whose pages are given. It takes up to `steps` steps, fewer if all
        rows have ended, or if one has. With draft tokens a step may append several tokens.

        Args:
            greedy, recorded: see `sample_first`.
            masks_BQW: uint32, the tokens that each row may sample in one step. None: all.
            variants: the variants of the slots that have one.
            width: the draft tokens of each step, one of `EngineShape.draft_widths`. None: the first one.
                Call `read_unread` before.
        """
        width = self._first_width if width is None else width
        self._set_masks(masks_BQW)
        executor = self._decoder(greedy)
        row_steps, call = self._rows_call(executor, [*pages], recorded, width)
        table_BP = self._block_table(pages, self._shape.rows)
        call = call._replace(
            tables=tuple(self._put(table_BP) for _ in (self.pools if executor.host_steps else [None])),
            steps=np.int32(steps),
            watched_B=call.running_B & until_one_ends,
        )
        if self._shape.head:
            call = call._replace(proposed_BT=self._take_proposed(width, masks_BQW is not None))
        model = self._model_of_slots(variants)
        arrays = self.rows, self._caches(self.states)
        args = model.params, model.extras, self._head_params, call
        self.rows, caches, out = executor.run_steps(programs.decode_rows, row_steps, arrays, args)
        self.pools, self.states = (*caches.pools, *caches.head), caches.states
        for slot in pages:
            unread = 1 + width if width else self._most_unread[slot] + steps
            self._most_unread[slot] = min(unread, self._shape.num_unread)
        return _wanted(out, recorded)

    def _take_proposed(self, width: int, is_needed: bool) -> Any:
        """Returns the draft tokens of the last `draft_tokens`, to which the masks of this step belong, or -1
        for each if there are no masks.
        """
        proposed_BT, self._proposed_BT = self._proposed_BT, None
        if proposed_BT is None or not is_needed or proposed_BT.shape[1] != width:
            return np.full((self._shape.rows, width), -1, np.int32)
        return np.array(proposed_BT)

    def _caches(self, states: Any) -> CacheArrays:
        """Returns the pools, those of the draft head apart, and these recurrent states."""
        own = self._num_own_pools
        return CacheArrays(self.pools[:own], states, self.pools[own:])

    def _rows_call(
        self, executor: Executor, slots: Sequence[int], recorded: Mapping[int, int], width: int | None = None
    ) -> tuple[RowSteps, RowsCall]:
        """Returns the settings and arguments with which the rows in these slots sample. A program of the
        whole model itself decides what it records.
        """
        every_B = np.arange(self._shape.rows)
        most = 3 if self._shape.support else 2
        most = max(recorded.values(), default=0) if executor.host_steps else most
        strategy = self._strategies[self._first_width if width is None else width]
        steps = RowSteps(strategy, self._shape.capacity, most)
        return steps, RowsCall(np.isin(every_B, slots), np.isin(every_B, [*recorded]))

    def _executor(self, greedy: bool = False) -> Executor:
        """Returns the executor that prefills prompts and samples first tokens. A draft head needs programs of
        the whole model. greedy: the rows use no sampling setting.
        """
        chosen = TracedExecutor if self._shape.head else self._executor_class
        executor: Executor = chosen(RunConfig(self._shape.impl), self._run, greedy)
        return executor

    def _decoder(self, greedy: bool) -> Executor:
        """Returns the executor that decodes. Draft tokens need the loop over the whole model."""
        if self._shape.num_draft_tokens:
            return TracedExecutor(RunConfig(self._shape.impl), self._run)
        return self._executor(greedy)

    def _set_masks(self, masks_BQW: Any) -> None:
        """Sets the masks of rows. Rows keep them until the next call."""
        if (has_masks := masks_BQW is not None) or self._has_masks:
            old = self.rows.context.allowed_bits
            masks_BQW = np.full(old.shape, ALL_BITS) if masks_BQW is None else masks_BQW
            if isinstance(getattr(old, "sharding", None), NamedSharding) and old.is_fully_addressable:
                masks_BQW = jax.device_put(masks_BQW, old.sharding)  # else another program is compiled
            self.rows = self.rows.with_masks(self._put(masks_BQW))
        self._has_masks = has_masks

    def copy_pages(self, pages: list[int]) -> list[Any]:
        """Returns the contents of these pages, in arrays of their own on the device."""
        return [self._run(programs.GET_PAGES, self.pools, part) for part in _parts(pages)]

    def copy_pages_out(self, pages: list[int]) -> list[Any]:
        """Returns the contents of these pages, in host memory."""
        parts = (self._run(programs.GET_PAGES, self.pools, part) for part in _parts(pages))
        return [jax.tree.map(_on_host, part) for part in parts]

    def copy_pages_in(self, pages: list[int], contents: list[Any]) -> None:
        """Writes contents from `copy_pages` or `copy_pages_out` into these pages."""
        for part, arrays in zip(_parts(pages), contents, strict=True):
            arrays = jax.tree.map(_on_device, arrays)
            self.pools = self._run(programs.SET_PAGES, self.pools, part, arrays)

    def copy_routes(self, pages: list[int]) -> list[Any]:
        """Returns the routes of the tokens in these pages, arrays of int16 [pages, 1, 64, L U]."""
        routes = self._caches(()).pools[-1][0]
        return [self._run(programs.GET_PAGES, routes, part) for part in _parts(pages)]

    def save_pages(self, pages: list[int], host_pages: list[int]) -> None:
        """Copies these pages to places in host memory. The device makes the last copies meanwhile."""
        assert self.host is not None
        for part, places in zip(_parts(pages), _parts(host_pages), strict=True):
            self.host.save(places, self._run(programs.GET_PAGES, self.pools, part))

    def load_pages(self, pages: list[int], host_pages: list[int]) -> None:
        """Copies the contents that `save_pages` saved in these places, or that a file had, into these
        pages.
        """
        assert self.host is not None
        for part, places in zip(_parts(pages), _parts(host_pages), strict=True):
            self.pools = self._run(programs.SET_PAGES, self.pools, part, self.host.load(places, self.pools))

    def save_state(self, slot: int, snapshot: int) -> None:
        """Copies the recurrent states of a slot into a snapshot, of which the first is 1."""
        states = self._states_of(slot)
        self._snapshots = self._run(programs.SET_ROW, self._snapshots, np.int32(snapshot - 1), states)

    def save_snapshot(self, snapshot: int, host_snapshot: int) -> None:
        """Copies a snapshot to a place in host memory. The device makes the copy meanwhile."""
        assert self.host_snapshots is not None
        states = self._run(programs.GET_ROW, self._snapshots, np.int32(snapshot - 1))
        self.host_snapshots.save(np.array([host_snapshot]), states)

    def load_state(self, slot: int, snapshot: int, on_host: bool = False) -> None:
        """Copies a snapshot into the recurrent states of a slot. on_host: the snapshot is in host memory."""
        if on_host:
            assert self.host_snapshots is not None
            states = self.host_snapshots.load(np.array([snapshot]), self._snapshots)
        else:
            states = self._run(programs.GET_ROW, self._snapshots, np.int32(snapshot - 1))
        self._set_states(slot, states)

    def get_row(self, slot: int, on_host: bool = False) -> tuple[DecodeState, Any]:
        """Returns the row of a slot, and its recurrent states. on_host: these in host memory."""
        states = self._states_of(slot)
        row = self._run(programs.GET_ROW, self.rows, np.int32(slot))
        return row, jax.tree.map(_on_host, states) if on_host else states

    def set_row(self, slot: int, contents: tuple[DecodeState, Any], with_states: bool = True) -> None:
        """Puts the result of `get_row` into a slot. with_states: False: the recurrent states are left out."""
        row, states = contents
        self._put_row(slot, row)
        self._most_unread[slot] = self._shape.num_unread
        if with_states:
            self._set_states(slot, jax.tree.map(_on_device, states))

    def _put_rows(self, slots: list[int], new: list[NewRow]) -> None:
        """Puts at most `MAX_NEW_ROWS` new rows into these slots: one by the program of `set_row`, several by
        one for that most, which writes the first row again and again.
        """
        if len(new) == 1:
            self._put_row(slots[0], self.new_rows(new))
            return
        padding = MAX_NEW_ROWS - len(new)
        slot_F = np.array(slots + slots[:1] * padding, np.int32)
        self.rows = self._run(programs.SET_ROWS, self.rows, slot_F, self.new_rows(new + new[:1] * padding))

    def _put_row(self, slot: int, row: DecodeState) -> None:
        self.rows = self._run(programs.SET_ROW, self.rows, np.int32(slot), row)

    def empty_adapters(self) -> AdapterStack:
        """Returns adapters that change nothing."""
        sizes = self._shape.max_adapters, self._shape.max_rank
        return AdapterStack(self.params, self.config, *sizes, self._mesh, self._create)

    def set_adapter(self, index: int, path: str, a: Any, b: Any, scale: float) -> None:
        """Replaces one matrix of an adapter (`AdapterStack.set`)."""
        assert self.adapters is not None
        self.adapters.set(self._run, index, path, a, b, scale)

    def stages(self) -> dict[str, Callable[[], Any]]:
        """Returns calls that together run every program, by the names that `EngineCore` has for them, the
        most likely first. The first call runs the programs of a short greedy request. No program of the other
        role is among them.
        """
        stages: dict[str, Callable[[], Any]] = {"greedy": partial(self._run_short_request, True)}
        host_steps = self._executor().host_steps
        if host_steps:  # which have other programs for sampled rows, and for what is recorded
            stages["sampled"] = partial(self._run_short_request, False)
        stages["rare"] = self._run_rare_calls
        if self._shape.rows > 1 and self._shape.role != "decode":
            stages["several"] = lambda: self._put_rows([0, 0], [NewRow(self._empty_call)] * 2)
        for width in self._shape.draft_widths[1:] if self._shape.role != "prefill" else ():
            stages[draft_stage(width)] = partial(self._run_width, width)
        if self.adapters:
            stages["adapters"] = self._run_set_adapter
        if self._shape.num_routes:
            stages["routed_experts"] = lambda: self.copy_routes([0])
        if self._shape.role != "decode":
            chunk = [0] * self._shape.chunk
            stages["chunk"] = lambda: self.prefill(0, self._all_pages, chunk, 0, 1, True)
            args = 0, self._all_pages, [0], 0, 1, [0]
            stages["prompt_logprobs"] = lambda: self.prefill_with_logprobs(*args)
        if host_steps:
            stages["processed"] = partial(self._run_recorded, 1)
            stages["logprobs"] = partial(self._run_recorded, 2)
        if host_steps and self._shape.support:
            stages["support"] = partial(self._run_recorded, 3)
        return stages

    def _run_recorded(self, level: int) -> None:
        for greedy in (True, False):
            self._run_short_request(greedy, {0: level})

    def _run_short_request(self, greedy: bool, recorded: Mapping[int, int] | None = None) -> None:
        role = self._shape.role
        recorded = recorded or {}
        if role != "prefill":  # first: it compiles longest
            self._run_step(greedy, recorded, self._first_width)
        if role != "decode":
            outputs = self.prefill(0, self._all_pages, [0], 0, 1, False)
            for _ in range(2):  # the second one of a step runs another program
                self.put_first(0, outputs)
            self.sample_first({0: NewRow(self._empty_call)}, False, greedy, recorded)
        if role is not None:
            self._run_moves()

    def _run_moves(self) -> None:
        """Runs the programs that a row needs when it moves between engines."""
        self.copy_pages_in([0], self.copy_pages([0]))
        self.set_row(0, self.get_row(0))

    def _run_set_adapter(self) -> None:
        for path in self.adapters.paths if self.adapters else ():
            self.set_adapter(0, path, None, None, 0.0)

    def _run_rare_calls(self) -> None:
        """Runs the programs that preempted rows need."""
        self.copy_pages_in([0], self.copy_pages_out([0]))
        self.set_row(0, self.get_row(0))
        if self.states:
            self.set_row(0, self.get_row(0, on_host=True))
        if self._shape.snapshots:
            self.save_state(0, 1)
            self.load_state(0, 1)
        if self._first_width:
            self.draft_tokens({0: self._all_pages})
        if self._shape.num_head_pools:
            self._most_unread[0] = self._shape.num_unread
            self.finish_pages(0, self._all_pages)

    def _run_width(self, width: int) -> None:
        """Runs the programs of steps with this number of draft tokens."""
        self._run_step(True, {}, width)
        self.draft_tokens({0: self._all_pages}, width)

    def _run_step(self, greedy: bool, recorded: Mapping[int, int], width: int) -> None:
        """Runs the program of a decode step, after that of tokens that the head has not read."""
        pages = {0: self._all_pages}
        if self._shape.head_waits:
            self._most_unread[0] = self._shape.num_unread
            self.read_unread(pages, width, 1)
        self.decode(pages, 1, False, greedy, recorded, None, None, width)

    @property
    def _all_pages(self) -> list[int]:
        """Page 0, which no row uses, as often as a full row has pages."""
        return [0] * num_pages_for(self._shape.capacity)

    @property
    def _feature_dtype(self) -> Any:
        """The dtype of the features of a draft head."""
        return activation_dtype(self.params)

    @property
    def _model(self) -> RunnableModel:
        return RunnableModel(self.params, self.config)

    def _model_of(self, variants: Sequence[Variant]) -> RunnableModel:
        """Returns the model for rows with these variants."""
        extras = NO_EXTRAS
        if self.adapters:
            adapter_B = self.adapters.of_rows(np.array([adapter for adapter, _ in variants], np.int32))
            extras = extras._replace(adapters=self.adapters.adapters, adapter_B=adapter_B)
        if held := self._shape.vectors:
            place = self._device if self._mesh is None else NamedSharding(self._mesh, REPLICATED)
            vectors, factor_BN = held.of_rows([factors for _, factors in variants], place)
            extras = extras._replace(vectors=vectors, factor_BN=factor_BN)
        return self._model._replace(extras=extras)

    def _model_of_slots(self, variants: Mapping[int, Variant] | None) -> RunnableModel:
        """Returns the model for all slots. variants: the variants of the slots that have one."""
        return self._model_of([(variants or {}).get(slot, PLAIN) for slot in range(self._shape.rows)])

    @property
    def _empty_call(self) -> ValidatedCall:
        """A call with default settings."""
        return validate_call(
            self.params, self.config, [[0]], GenerateOptions(max_tokens=1, eos_token_ids=()), None
        )

    def _initial_rows(self, new: Sequence[NewRow]) -> DecodeState:
        """Returns `new_rows` without processors, in host memory."""
        shape = self._shape
        V = self.config.vocab_size
        zeros_1 = np.zeros(1, np.int32)
        num_masks = 1 + shape.num_draft_tokens
        sizes = StateSizes(shape.capacity, 0, num_masks, MAX_EOS_IDS + MAX_STOP_IDS)
        of_rows = []
        for row in new:
            answer_1 = np.array([row.answer % row.call.answers], np.int32)
            sampling_B = row.call.all_settings_B
            of_rows.append(settings_of_rows(row.call, sampling_B, zeros_1, answer_1, sizes.end_ids))
        settings = jax.tree.map(lambda *parts: np.concatenate(parts), *of_rows)
        dfas = [row.tables and Dfa(*row.tables) for row in new]
        automata = Dfa.automata_of_rows(dfas, V, settings.eos_BE[:, :MAX_EOS_IDS], equal_sizes=True)
        rows = state_of_rows([row.call.prompts[0] for row in new], V, settings, sizes, automata)
        if shape.head:
            unread_BTX = np.zeros((len(new), shape.num_unread, shape.head.feature_size), np.float32)
            unread = UnreadFeatures(unread_BTX.astype(self._feature_dtype), np.ones(len(new), np.int32))
            rows = dataclasses.replace(rows, unread=unread)
        masks_BQW: Any = rows.context.allowed_bits
        for row, masks_QW in zip(new, masks_BQW, strict=True):
            if row.masks_QW is not None:
                masks_QW[:] = row.masks_QW
        return rows

    def _empty_cache(self) -> tuple[Any, Any, Any]:
        """Returns pages, recurrent states and snapshots."""
        shape = self._shape
        parts = (
            lambda: shape.empty_pools(self.config, self._feature_dtype, self._mesh),
            lambda: shape.empty_states(self.config, shape.rows, self._mesh),
            lambda: shape.empty_states(self.config, shape.snapshots, self._mesh),
        )
        pools, states, snapshots = map(self._create, parts)
        return pools, states, snapshots

    def _create(self, function: Callable[[], Any]) -> Any:
        """Returns function(), committed to the device to which a caller committed the parameters."""
        device = self._device
        if self._dry_run:
            return with_sharding(jax.eval_shape(function), device and SingleDeviceSharding(device))
        if device is None:
            return function()
        with jax.default_device(device):  # another one may have too little memory
            return jax.device_put(function(), device)

    def _put(self, tree: Any) -> Any:
        """Returns the arrays on the device to which a caller committed the parameters."""
        return tree if self._device is None else jax.device_put(tree, self._device)

    def _padded(self, ids: Sequence[int], width: int) -> PaddedTokens:
        """Returns the ids with padding, int32 [1, width], and the number of real ids [1]."""
        return token_matrix([ids], 1, width), np.array([len(ids)], np.int32)

    def _cache(self, slot: int, pages: list[int], length: int, longest: int) -> KVCache:
        """Returns the cache of the row in a slot that holds `length` tokens."""
        caches = self._caches(self._states_of(slot))
        lengths = *(np.array([count], np.int32) for count in (length, longest)), np.zeros(1, bool)
        tables = [self._block_table({0: pages}, 1)]
        return paged_cache(self.config, caches, tables, self._shape.capacity, lengths)

    def _store(self, slot: int, cache: KVCache, with_states: bool = True, head: Any = ()) -> None:
        """Keeps the arrays that a program wrote into a cache of `_cache`, and into the pools of a head."""
        self.pools = (*cache_pools(cache), *head)
        if with_states:
            self._set_states(slot, cache_states(cache))

    def _states_of(self, slot: int) -> tuple[LayerCache, ...]:
        """Returns the recurrent states of a slot, as caches of one row."""
        return self._run(programs.GET_ROW, self.states, np.int32(slot)) if self.states else ()

    def _set_states(self, slot: int, states: tuple[LayerCache, ...]) -> None:
        if self.states:
            self.states = self._run(programs.SET_ROW, self.states, np.int32(slot), states)

    def _block_table(self, pages: dict[int, list[int]], rows: int) -> np.ndarray:
        """Returns int32 [rows, pages of a full row]: the pages of each row, then page 0, which no row
        uses.
        """
        table_BP = np.zeros((rows, num_pages_for(self._shape.capacity)), np.int32)
        for row, of_row in pages.items():
            table_BP[row, : len(of_row)] = of_row
        return table_BP


def draft_stage(width: int) -> str:
    """Returns the name of the stage that compiles steps with this number of draft tokens."""
    return f"draft_tokens_{width}"


def _strategy_of(config: ModelConfig, shape: EngineShape, width: int) -> Plain | Speculative:
    """Returns the strategy of an engine for steps with this number of draft tokens."""
    if not shape.num_draft_tokens:
        return Plain(config)
    proposer = HeadProposer(shape.head) if shape.head else FunctionProposer(prompt_lookup)
    return Speculative(config, proposer, width)


def _wanted(out: SampledTokens, recorded: Mapping[int, int]) -> SampledTokens:
    """Returns the output without the fields that no row asked for. They are not copied to the host."""
    most = max(recorded.values(), default=0)
    if most == 0:
        return out._replace(alternatives=None)
    return (
        out
        if most > 2
        else out._replace(alternatives=dataclasses.replace(out.alternatives, support_BTW=None))
    )


class _Shards:
    """This process's part, in host memory, of an array on devices of several processes."""

    def __init__(self, x: jax.Array):
        self._layout = x.shape, x.sharding
        self._parts = [(np.array(shard.data), shard.device) for shard in x.addressable_shards]

    def array(self) -> jax.Array:
        parts = [jax.device_put(*part) for part in self._parts]
        return jax.make_array_from_single_device_arrays(*self._layout, parts)


def _on_host(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):  # of a dry run
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return np.array(x) if x.is_fully_addressable else _Shards(x)


def _on_device(x: Any) -> Any:
    return x.array() if isinstance(x, _Shards) else x


def _parts(pages: list[int]) -> list[np.ndarray]:
    """Returns pages in groups of one size. Page 0, which no row uses, fills the last group."""
    parts = [pages[at : at + COPIED_PAGES] for at in range(0, len(pages), COPIED_PAGES)]
    return [np.array(part + [0] * (COPIED_PAGES - len(part)), np.int32) for part in parts]
