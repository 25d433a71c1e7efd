"""Beam search and beam sampling: `num_beams` continuations of each prompt are followed side by side.

prompts ─ read, once each ─► W beams a prompt ─► loop: score → pick C candidates → set aside what ended →
write K/V → attend
"""

import copy
import dataclasses
import inspect
import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..brief import counted
from ..cache.kv_cache import KVCache, reorder, reorder_tail
from ..checks import in_order, numbers, whole
from ..config.model_config import ModelConfig
from ..errors import InputError, shown
from ..sampling.settings import SamplingConfig
from ..stats import GenerateStats, Stopwatch, peak_bytes
from ..weights.params import Params, tree_bytes
from .batches import check_room, empty_cache, first_state, padded, prompts_of_rows
from .beam_steps import Found, Kind, Request, following, found_in, goes_on, start
from .doors import decode_step
from .faults import check_cache
from .loop import bucket
from .options import Call, GenerateOptions, checked
from .programs import NOW, Ahead, Do, kinds, prepared, struct
from .roads import Whole, one_token
from .rows import road

_MOST_DIGITS = 30  # of a length to the power of the penalty: float32 has 38, and sums take some


@dataclasses.dataclass(repr=False)
class BeamOutput:
    """What `beam_search` returns: the best first; one list per prompt where it was given several.

    Attributes:
        sequences: new ids, EOS not included.
        scores: sum of log-probabilities / (new tokens, EOS included) ** length_penalty.
        stats: what the call cost. Rows are prompts, tokens those of each prompt's best sequence, none of
            which is known before the end.
    """

    sequences: list[list[int]] | list[list[list[int]]]
    scores: list[float] | list[list[float]]
    stats: GenerateStats = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        several = bool(self.scores) and isinstance(self.scores[0], list)
        prompts = [f"{len(self.scores)} prompts"] if several else []
        sequences = list(itertools.chain(*self.sequences)) if several else self.sequences
        return f"BeamOutput({', '.join([*prompts, counted(sequences, 'sequence')])})"


def beam_search(  # noqa: PLR0913  a door
    params: Params,
    config: ModelConfig,
    ids: Sequence[int] | Sequence[Sequence[int]],
    *,
    num_beams: int = 4,
    num_return_sequences: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    max_new_tokens: int = 32,
    eos_token_ids: Sequence[int] | None = None,
    sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    key: jax.Array | None = None,
    capacity: int | None = None,
    impl: str | None = None,
    cache_dtype: str | None = None,
) -> BeamOutput:
    """The likeliest continuations that a search `num_beams` wide finds; those of transformers 5. Each
    prompt's are what it gives alone.

    Args:
        params, config: the model.
        ids: one prompt as a list of token ids, or a list of prompts, of any lengths.
        num_beams: continuations followed side by side; 1: the greedy one, which ends at its first EOS
            whatever early_stopping says.
        num_return_sequences: how many of them to return, at most num_beams; None: all.
        length_penalty: the exponent of the length that scores are divided by; above 0 favours long sequences,
            below 0 short ones.
        early_stopping: True: stop at num_beams ended sequences; False: when the best beam, scored at its
            present length, is no better than the worst of them; "never": when it could not become better at
            any length.
        max_new_tokens: traced, like length_penalty: another number below the same power of two compiles
            nothing.
        eos_token_ids: any of them ends a sequence; None: the model's own; (): none.
        sampling: None: `SamplingConfig()`. Each beam's log-probabilities pass the processors, which look at
            the prompt and at what that beam chose; scores are sums of what comes out. A temperature above 0
            means beam sampling: candidates are drawn without replacement from the softmax of beam score +
            processed log-probability.
        key: one PRNG key (prompt i then uses `fold_in(key, i)`) or one per prompt; only sampling needs it.
        capacity, impl, cache_dtype: as in `GenerateOptions`.

    Returns:
        Sequences and scores, num_return_sequences a prompt (fewer where the settings leave no more, none
        where every beam ran out of tokens that it may choose).

    Raises:
        InputError: a prompt, a setting or a key that cannot be served, before anything is traced.

    Source: `GenerationMixin._beam_search` of transformers 5; drawing by Gumbel noise: Kool et al. 2019.
    """
    asked = dict(locals())
    with Stopwatch() as setup:
        search = _Search(**asked)
    call = search.call
    stats = GenerateStats(*search.sizes)
    with Stopwatch() as compiling:
        search.prepare().wait()
    with Stopwatch() as prefilling:
        behind = search.read().block_until_ready()
    with Stopwatch() as searching:
        found = jax.device_get(search.search(behind))
    check_cache(call, search.cache)  # the beams' own length is known: at most the prompt's and max_new_tokens
    sequences, scores, longest = _lists(call, found, search.returned)
    stats.prefill_seconds = prefilling.seconds
    stats.decode_seconds = searching.seconds
    stats.ttft_seconds = setup.seconds + prefilling.seconds + searching.seconds
    stats.generated_tokens = longest
    stats.decode_steps = int(found.step) - 1
    stats.compile_seconds = compiling.seconds
    stats.count(setup, compiling, prefilling, searching)
    stats.peak_bytes = peak_bytes()
    if search.single:
        return BeamOutput(sequences[0], scores[0], stats)
    return BeamOutput(sequences, scores, stats)


def planned(*args: Any, **asked: Any) -> "_Search":
    """A checked call of `beam_search`, to be prepared; its parameters may be shapes."""
    given = inspect.signature(beam_search).bind(*args, **asked)
    given.apply_defaults()
    return _Search(**given.arguments, do=Ahead())


class _Search:
    """A checked call of `beam_search` on its road."""

    def __init__(  # noqa: PLR0913  those of `beam_search`
        self, params, config, ids, *, num_beams, num_return_sequences, length_penalty, early_stopping,
        max_new_tokens, eos_token_ids, sampling, key, capacity, impl, cache_dtype, do: Do = NOW,
    ):  # fmt: skip
        self.single = in_order(ids) and len(ids) > 0 and np.ndim(ids[0]) == 0
        sampling = SamplingConfig() if sampling is None else sampling
        options = GenerateOptions(
            max_new_tokens, sampling, eos_token_ids, capacity, impl=impl, cache_dtype=cache_dtype
        )
        self.call = call = checked(params, config, [ids] if self.single else ids, options, key)
        beams = whole("num_beams", num_beams, 1)
        returned = beams if num_return_sequences is None else num_return_sequences
        self.returned = whole("num_return_sequences", returned, 1)
        _check(call, beams, self.returned, length_penalty, early_stopping)
        self._steps = call.options.max_new_tokens
        shortest = min(map(len, call.prompts))
        early_stopping = early_stopping if beams > 1 else True  # one beam ends at its first EOS
        moving = bucket(call.longest - shortest + self._steps)
        self._kind = Kind(beams, len(call.ending), early_stopping, bucket(self._steps), moving)
        check_room(call, beams * call.rows)
        rows = first_state(call, prompts_of_rows(call))
        self._request = Request(rows, np.int32(shortest), np.float32(length_penalty))
        self._to_read = padded(call.prompts, call.capacity, call.rows)
        make = partial(empty_cache, call, params, call.config, call.capacity, call.rows)
        self.cache: KVCache = do.make(make)
        self._do = do
        self._model = (params, call.config)
        self._road = road(params)(do, impl)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Prompts, their tokens, bytes of weights and of the beams' keys and values."""
        prompts = self.call.prompts
        params = self.call.params
        held = self._kind.beams * tree_bytes((self.cache.k, self.cache.v))
        return len(prompts), sum(map(len, prompts)), tree_bytes(params), held

    def prepare(self) -> Ahead:
        """Begins to compile what it runs, in threads."""
        arrays = self._model[0], self._to_read, self.cache, self._request

        def rehearse(ahead: Ahead) -> int:
            rehearsal = copy.copy(self)
            rehearsal._do = ahead
            rehearsal._road = type(self._road)(ahead, self.call.options.impl)
            rehearsal.cache = jax.tree.map(struct, self.cache)
            rehearsal._steps = 2
            rehearsal.search(rehearsal.read())
            return ahead.programs

        width = self._road.at_once(self.call.longest, self.call.rows)
        kind = self._kind, self._model[1], self.call.options.impl, width, kinds(arrays)
        return prepared(self.call.params, kind, rehearse)[0]

    def read(self) -> jax.Array:
        """What stands behind each prompt, as `Road.choose` takes it."""
        behind, self.cache = self._road.read(self._model, self._to_read, self.cache, True)
        return behind

    def search(self, behind: jax.Array) -> Found:
        """The sequences that ended, best first, and where the search stopped."""
        do = self._do
        model = self._model
        asked = (self._request, self._kind)
        if isinstance(self._road, Whole):
            return do(_SEARCH, *model, behind, self.cache, *asked, self.call.options.impl)
        moving = self._request.shortest, self._kind.moving
        row_R = np.repeat(np.arange(len(behind), dtype=np.int32), self._kind.beams)
        self.cache = self._road.share(self.cache, row_R)
        state, more = do(_START, self._road.logits(model, behind), *asked)
        for _ in range(self._steps - 1):
            if not do.holds(more):
                break
            moved = (do(_MOVE, keys, state.parent_R, *moving) for keys in self.cache.layers)
            cache = dataclasses.replace(self.cache, layers=tuple(moved))
            logits_R1V, self.cache = self._road.through(model, one_token, (state.token_R,), cache)
            state, more = do(_NEXT, logits_R1V, state, *asked)
        return found_in(state)


def _check(call: Call, num_beams: int, returned: int, length_penalty: Any, early_stopping: Any) -> None:
    """Raises InputError for what only a beam search can get wrong."""
    new = call.options.max_new_tokens
    vocab_size = call.config.vocab_size
    ends = len(call.ending)
    if returned > num_beams:
        remedy = "raise num_beams or ask for fewer sequences"
        raise InputError(f"num_return_sequences {returned} exceeds num_beams {num_beams}: {remedy}")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise InputError(f"early_stopping must be True, False or 'never', got {shown(early_stopping)}")
    penalty = numbers(length_penalty)
    if penalty is None or penalty.ndim or not np.isfinite(penalty):
        raise InputError(f"length_penalty must be a finite number, got {shown(length_penalty)}")
    if abs(penalty) * math.log10(new) > _MOST_DIGITS:
        power = f"length_penalty {length_penalty} of {new} tokens"
        raise InputError(f"{power} leaves float32: bring it nearer to 0")
    if num_beams == 1 and np.any(call.sampling_B.temperature > 0):
        raise InputError(
            "num_beams 1 with a temperature above 0 is plain sampling: use generate, or raise num_beams"
        )
    if num_beams * vocab_size >= 2**31:  # int32 numbers them
        raise InputError(
            f"num_beams {num_beams} with a vocabulary of {vocab_size} makes 2^31 candidates or more: lower"
            " num_beams"
        )
    possible = _possible(vocab_size, ends, new, num_beams)
    if possible < num_beams:
        asked_for = f"max_new_tokens {new} and a vocabulary of {vocab_size} with {ends} EOS ids"
        raise InputError(
            f"num_beams {num_beams} exceeds the {possible} different sequences that {asked_for} allow: lower"
            " num_beams or raise max_new_tokens"
        )


def _possible(vocab_size: int, ends: int, max_new_tokens: int, enough: int) -> int:
    """How many different sequences there are, or `enough` where there are more."""
    ended = 0
    running = 1
    for _ in range(max_new_tokens):
        if ended + running >= enough:
            return enough
        ended = ended + running * ends
        running = running * (vocab_size - ends)
    return ended + running


def _lists(call: Call, found: Found, returned: int) -> tuple[list, list, int]:
    """Sequences without their EOS, and scores, nested lists; and the tokens of the best ones together.

    Raises:
        InputError: the model's numbers are broken.
    """
    sequences = []
    scores = []
    longest = 0
    for b, final_W in enumerate(found.final_BW[: len(call.prompts)]):
        if (step := found.broken_B[b]) >= 0:
            raise InputError(f"row {b}, step {step}: the scores are nan: {call.broken}")
        kept = [w for w in range(returned) if np.isfinite(final_W[w])]
        rows = [found.ended_BWT[b, w, : found.length_BW[b, w]].tolist() for w in kept]
        longest += len(rows[0]) if rows else 0
        sequences.append([row[:-1] if row[-1] in call.ending else row for row in rows])
        scores.append(final_W[kept].tolist())
    return sequences, scores, longest


def _search(params, config, logits_BV, cache, request, kind, impl):
    """The sequences that ended, best first, and where the search stopped."""

    def body(carry):
        state, cache = carry
        cache = reorder_tail(cache, state.parent_R, request.shortest, kind.moving)
        logits_RV, cache = decode_step(params, config, state.token_R, cache, impl=impl)
        return following(logits_RV, state, request, kind), cache

    row_R = jnp.repeat(jnp.arange(len(logits_BV)), kind.beams)
    carry = start(logits_BV, request, kind), reorder(cache, row_R)
    return found_in(lax.while_loop(lambda carry: goes_on(carry[0], request), body, carry)[0])


def _behind(step, kind):
    """The program of a step behind the logits, and whether the search goes on; kind: which argument."""

    def answer(logits_R1V, *rest):
        state = step(logits_R1V[:, 0], *rest)
        return state, goes_on(state, rest[-2])

    return jax.jit(answer, static_argnums=kind)


def _move(keys, index_B, first, count):
    return keys.reorder_tail(index_B, first, count)


_SEARCH = jax.jit(_search, static_argnames=("config", "kind", "impl"))
_START = _behind(start, 2)
_NEXT = _behind(following, 3)
_MOVE = jax.jit(_move, static_argnums=3, donate_argnums=0)
