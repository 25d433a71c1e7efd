"""What an engine runs on its device: few programs, of fixed shapes, in which no row feels another.

piece of a prompt ─ read ─► pages, and behind the last one: first ─► row ─ place ─► rows ─ window ─► tokens
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..cache.kv_cache import KVCache, truncate
from ..cache.paged import PAGE, Paged, empty_pools
from ..config.model_config import ModelConfig
from ..generation.loop import admit, choose_behind, until_ended
from ..generation.options import Call, GenerateOptions, checked
from ..generation.programs import NOW, Do
from ..generation.rows import road
from ..generation.speculation import Speculation, check, look_up, to_check
from ..generation.state import DecodeState, new_state
from ..model.decoder import hidden_states, unembed
from ..sampling.context import start
from ..sampling.logprobs import Alternatives, no_alternatives
from ..sampling.settings import only, per_row
from ..sharding import lies_over, top_k
from ..weights.params import Params
from ..weights.processor import compiler_options

WINDOW = 128  # tokens that a row chooses between two looks of the host, at most
MOST_LOGPROBS = 20
MOST_EOS = 8
MOST_STOPS = 16  # alternatives of a token; ids that end a row
_MOVED = 8  # pages that are moved to host memory, or back, at a time
_SCORED = 16  # tokens of a prompt whose logits exist at one time


class Window(NamedTuple):
    """What the rows chose since the host last looked, and what of it was noted; B rows, T columns."""

    tokens_BT: Any
    logprobs_BT: Any
    count_B: Any  # int32: columns of each row
    finished_B: Any
    alternatives: Any
    passes_B: Any  # int32: passes of the model that each row took part in
    accepted_B: Any  # int32: guesses that were right


class Device:
    """Pages and rows on the device.

    Attributes:
        params, config: the model, with longrope's factors fixed.
        pools: (k, v) of each layer.
        rows: B of them, in the full tier, without what they chose: that goes to the host.
    """

    def __init__(  # noqa: PLR0913  what decides on the programs
        self, params: Params, config: ModelConfig, rows: int, pages: int, capacity: int, chunk: int,
        dtype: Any, impl: str | None, guesses: int, do: Do = NOW,
    ):  # fmt: skip
        self.config = config
        self.guesses = guesses
        self.params = params
        self._rows = rows
        self._capacity = capacity
        self._chunk = chunk
        self._impl = impl
        self._do = do
        self._road = road(params)(do, impl)
        mesh = lies_over(params)
        norm = params["final_norm"]
        self._place = norm.device if norm.committed and mesh is None else None
        self.pools: Any = do.make(lambda: empty_pools(config, pages, dtype, mesh), self._place)
        blank = self._row(*self._nothing, answers=False)
        self.rows: Any = self._put(jax.tree.map(lambda x: x[np.zeros(rows, int)], blank))

    def row(self, call: Call, key_1: Any) -> DecodeState:
        """A row before its first choice."""
        return self._put(self._row(call, key_1))

    def _put(self, tree: Any) -> Any:
        """To the device that a caller has put the parameters on."""
        return tree if self._place is None else jax.device_put(tree, self._place)

    def _row(self, call: Call, key_1: Any, answers: bool = True) -> DecodeState:
        """In new arrays: the host changes none of them later. answers: False for one that has ended."""
        (ids,) = call.prompts
        options = call.options
        V = self.config.vocab_size
        seen_1V = np.zeros((1, V), bool)
        history_1S = np.zeros((1, self._capacity), np.int32)
        seen_1V[0, ids] = True
        history_1S[0, : len(ids)] = ids
        eos_1E = np.full((1, MOST_EOS + MOST_STOPS), -1, np.int32)
        eos_1E[0, : len(call.ending)] = call.ending
        sampling_1 = jax.tree.map(np.array, per_row(options.sampling, 1, V, full=True))
        context = start(sampling_1, np.full(1, len(ids), np.int32), eos_1E, seen_1V, history_1S)
        limit_1 = np.full(1, options.max_new_tokens if answers else 0, np.int32)
        noted = no_alternatives(1, 0, min(MOST_LOGPROBS, V), V, False)
        noted = dataclasses.replace(noted, asked_B=np.full(1, options.logprobs > 0))
        state = new_state(key_1, sampling_1, limit_1, context, 0)
        return dataclasses.replace(state, alternatives=noted, noted_B=np.zeros(1, np.int32))

    def read(self, pages: list[int], ids: Sequence[int], first: int, whole: bool) -> Any:
        """Reads ids at position `first` and on into these pages of their row: by the form [1, chunk], or by
        [1, 64]. What `first_choice` takes, behind the last of them.
        """
        piece = self._piece(ids, whole)
        width = piece[0].shape[1]
        behind, cache = self._road.read(self._model, piece, self._cache(pages, first), True, width)
        self.pools = _pools(cache)
        return behind

    def score(self, pages: list[int], ids: Sequence[int], first: int, targets: Sequence[int]) -> Any:
        """The same for 64 at most; of each what the model says of the token behind it, `targets`:
        `Alternatives` whose numbers before any processor are those after all of them.
        """
        target_T = np.zeros(PAGE, np.int32)
        target_T[: len(targets)] = targets
        args = *self._piece(ids, False), self._cache(pages, first), target_T, self._impl
        noted, cache = self._do(_SCORE, *self._model, *args)
        self.pools = _pools(cache)
        return noted

    def first_choice(self, behind: Any, row: DecodeState) -> tuple[DecodeState, Window]:
        """The row with its first token."""
        state = self._road.choose(self._model, behind, self._do(_WITH_ROOM, row, 1))
        return self._do(_WITHOUT_ROOM, state)

    def place(self, slot: int, row: DecodeState) -> None:
        """Puts a row into a slot."""
        self.rows = self._do(_PLACE, self.rows, np.array([slot], np.int32), row)

    def window(self, pages: dict[int, list[int]], steps: int, until_one_ends: bool) -> Window:
        """Decodes the rows in these slots, with these pages: so many steps, or fewer where all have ended, or
        one; with guesses each step may choose several tokens.
        """
        table_BP = np.zeros((self._rows, self._width), np.int32)
        for slot, of_row in pages.items():
            table_BP[slot, : len(of_row)] = of_row
        among_B = np.isin(np.arange(self._rows), [*pages])
        args = self.rows, self.pools, table_BP, among_B, np.int32(steps), np.bool_(until_one_ends)
        self.rows, self.pools, out = self._do(
            _WINDOW, *self._model, *args, self._capacity, self.guesses, self._impl
        )
        return out

    def take_pages(self, pages: list[int]) -> list[Any]:
        """What they hold, in host memory."""
        parts = (self._do(_TAKE_PAGES, self.pools, part) for part in _parts(pages))
        return [jax.tree.map(_on_host, part) for part in parts]

    def put_pages(self, pages: list[int], held: list[Any]) -> None:
        """Writes what `take_pages` gave."""
        for part, arrays in zip(_parts(pages), held, strict=True):
            arrays = jax.tree.map(lambda x: x.array() if isinstance(x, _Shards) else x, arrays)
            self.pools = self._do(_PUT_PAGES, self.pools, part, arrays)

    def take_row(self, slot: int) -> DecodeState:
        """The row of a slot, which `place` takes."""
        return self._do(_TAKE_ROW, self.rows, np.int32(slot))

    def rehearse(self) -> None:
        """Runs every program once but those that move pages, on the page that nobody reads."""
        row = self.row(*self._nothing)
        pages = [0] * self._width
        self.read(pages, [0] * self._chunk, 0, True)
        self.score(pages, [0], 0, [0])
        row, _ = self.first_choice(self.read(pages, [0], 0, False), row)
        self.place(0, row)
        self.window({0: pages}, 1, False)

    @property
    def _model(self) -> tuple[Params, ModelConfig]:
        return self.params, self.config

    @property
    def _nothing(self) -> tuple[Call, Any]:
        """A call that asks for nothing, and its key."""
        call = checked(self.params, self.config, [[0]], GenerateOptions(1, eos_token_ids=()), None)
        return call, call.key

    @property
    def _width(self) -> int:
        return -(-self._capacity // PAGE)

    def _piece(self, ids: Sequence[int], whole: bool) -> tuple[np.ndarray, np.ndarray]:
        tokens_1T = np.zeros((1, self._chunk if whole else PAGE), np.int32)
        tokens_1T[0, : len(ids)] = ids
        return tokens_1T, np.array([len(ids)], np.int32)

    def _cache(self, pages: list[int], length: int) -> KVCache:
        """Of a row that holds so many tokens."""
        table_1P = np.zeros((1, self._width), np.int32)
        table_1P[0, : len(pages)] = pages
        return _cache(self.config, self.pools, table_1P, self._capacity, np.array([length], np.int32))


def _cache(config: ModelConfig, pools: Any, table_BP: Any, capacity: int, length_B: Any) -> KVCache:
    pairs = zip(pools, config.layer_windows, strict=True)
    layers = tuple(Paged(k, v, window, capacity, table_BP) for (k, v), window in pairs)
    overflow_B: Any = np.zeros(len(table_BP), bool)
    return KVCache(layers, length_B, overflow_B, None)


def _pools(cache: KVCache) -> tuple[tuple[Any, Any], ...]:
    return tuple((layer.k, layer.v) for layer in cache.layers)


class _Shards:
    """On the host, what this process's devices hold of an array that lies on those of several."""

    def __init__(self, x: jax.Array):
        self._where = x.shape, x.sharding
        self._parts = [(np.array(shard.data), shard.device) for shard in x.addressable_shards]

    def array(self) -> jax.Array:
        parts = [jax.device_put(*part) for part in self._parts]
        return jax.make_array_from_single_device_arrays(*self._where, parts)


def _on_host(x: jax.Array) -> Any:
    return np.array(x) if x.is_fully_addressable else _Shards(x)


def _parts(pages: list[int]) -> list[np.ndarray]:
    """Pages in equal numbers; page 0, which nobody reads, fills the last."""
    parts = [pages[at : at + _MOVED] for at in range(0, len(pages), _MOVED)]
    return [np.array(part + [0] * (_MOVED - len(part)), np.int32) for part in parts]


def _window(  # noqa: PLR0913
    params, config, rows, pools, table_BP, among_B, steps, until_one_ends, capacity, guesses, impl
):
    """`loop.advance`, or `speculate` by look-up, over pages, for the rows among those that run."""
    sampling_B = only(rows.sampling_B, among_B)
    limit_B = jnp.where(among_B, rows.limit_B, 0)
    state = _with_room(dataclasses.replace(rows, sampling_B=sampling_B, limit_B=limit_B), WINDOW)
    began_B = state.active_B
    zeros_B = jnp.zeros(len(among_B), jnp.int32)
    length_B = jnp.where(began_B, state.position_B - 1, 0)
    cache = _cache(config, pools, table_BP, capacity, length_B)

    def step(state, cache, counts):
        token_BT = state.token_B[:, None]
        num_tokens_B = state.active_B.astype(jnp.int32)
        if guesses:
            guess_BT = look_up(state.context.history_BS, state.position_B, guesses)
            token_BT, num_tokens_B = to_check(state.turn, guess_BT)
        hidden_BTD, cache = hidden_states(params, config, token_BT, cache, num_tokens_B, impl=impl)
        if not guesses:
            passes_B = counts.passes_B + state.active_B
            state = choose_behind(params, config, hidden_BTD[:, 0], state, impl)
            return state, cache, dataclasses.replace(counts, passes_B=passes_B)
        state, counts = check(unembed(params, config, hidden_BTD), state, guess_BT, counts, impl)
        return state, truncate(cache, jnp.where(state.active_B, state.position_B - 1, 0)), counts

    def enough(state):
        return until_one_ends & jnp.any(began_B & ~state.active_B)

    counts = Speculation(None, zeros_B, zeros_B)
    state, cache, counts = until_ended(step, steps, state, cache, counts, enough=enough)
    rows, out = _without_room(state)
    return rows, _pools(cache), out._replace(passes_B=counts.passes_B, accepted_B=counts.accepted_B)


def _with_room(rows, size):
    """The rows with room for so many tokens more."""
    state = new_state(rows.key_B, rows.sampling_B, rows.limit_B, rows.context, size)
    (B, V) = rows.context.seen_BV.shape
    old = rows.alternatives
    empty = no_alternatives(B, size, old.id_BTA.shape[-1], V, False)
    empty = dataclasses.replace(empty, asked_B=old.asked_B)
    return dataclasses.replace(
        state, token_B=rows.token_B, finished_B=rows.finished_B, alternatives=empty, noted_B=rows.length_B
    )


def _without_room(state):
    """The rows, and apart from them what they chose: of theirs no array is looked at, and so kept."""
    count_B = state.length_B - state.noted_B
    zeros_B = jnp.zeros_like(state.limit_B)
    columns = state.tokens_BT, state.logprobs_BT
    out = Window(*columns, count_B, state.finished_B, state.alternatives, zeros_B, zeros_B)
    return _with_room(state, 0), out


def _score(params, config, tokens_1T, num_tokens_1, cache, target_T, impl):
    hidden_1TD, cache = hidden_states(params, config, tokens_1T, cache, num_tokens_1, impl=impl)

    def part(pair):
        hidden_TD, target_T = pair
        logprobs_TV = jax.nn.log_softmax(unembed(params, config, hidden_TD), -1)
        top_TA, id_TA = top_k(logprobs_TV, min(MOST_LOGPROBS, config.vocab_size))
        return id_TA, top_TA, jnp.take_along_axis(logprobs_TV, target_T[:, None], 1)[:, 0]

    parts = hidden_1TD.reshape(-1, _SCORED, hidden_1TD.shape[-1]), target_T.reshape(-1, _SCORED)
    found = jax.lax.map(part, parts)
    id_1TA, top_1TA, logprob_1T = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), found)
    return Alternatives(id_1TA, top_1TA, id_1TA, top_1TA, logprob_1T, None), cache


def _take_row(rows, slot):
    return jax.tree.map(lambda x: x[slot][None], rows)


def _take_pages(pools, page_N):
    return jax.tree.map(lambda pool: pool[page_N], pools)


def _put_pages(pools, page_N, held):
    return jax.tree.map(lambda pool, pages: pool.at[page_N].set(pages), pools, held)


_STATIC = ("config", "capacity", "guesses", "impl")
_WINDOW = jax.jit(
    _window, static_argnames=_STATIC, donate_argnames=("rows", "pools"), compiler_options=compiler_options()
)
_SCORE = jax.jit(_score, static_argnames=("config", "impl"), donate_argnames="cache")
_WITH_ROOM = jax.jit(_with_room, static_argnames="size")
_WITHOUT_ROOM = jax.jit(_without_room)
_PLACE = jax.jit(admit, donate_argnames="state")
_TAKE_ROW = jax.jit(_take_row)
_TAKE_PAGES = jax.jit(_take_pages)
_PUT_PAGES = jax.jit(_put_pages, donate_argnames="pools")
