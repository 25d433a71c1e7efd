"""The rows of a call on their road, and their programs compiled side by side before they set out."""

import copy
from typing import Any

import jax
import numpy as np

from ..cache.kv_cache import KVCache, truncate
from ..config.model_config import ModelConfig
from ..sharding import lies_over
from ..weights.params import Params
from .batches import check_room, empty_cache, first_state, padded, prompts_of_rows
from .options import Call, GenerateOptions
from .programs import NOW, Ahead, Do, kinds, prepared, struct
from .roads import Layered, Road, Whole
from .speculation import Guessing, Speculation, look_up
from .state import Chosen, DecodeState


class Rows:
    """The rows of a call on their road: read, then advanced.

    Attributes:
        state: of the rows that answer.
        cache: what they hold; None without one.
        draft: what guesses start from; None where nobody guesses.
    """

    def __init__(self, call: Call, decodes_whole: bool, do: Do = NOW):
        check_room(call, call.rows)
        self.call = call
        self.decodes_whole = decodes_whole
        self._go_by(do)
        self._prompt_R = prompts_of_rows(call)
        prefix = call.options.prefix
        self.held_B = np.zeros(call.prompt_rows, np.int32)  # tokens of each prompt that are not read again
        self.cache: KVCache | None = None
        if prefix:
            self.held_B[: len(call.prompts)] = prefix.shared(call.prompts)
            self.cache = do.make(lambda: truncate(prefix.cache, self.held_B))
        elif call.options.use_cache:
            self.cache = do.make(
                lambda: empty_cache(call, call.params, call.config, call.capacity, call.prompt_rows)
            )
        self.draft: Speculation | None = None
        self.state: DecodeState = first_state(call, self._prompt_R)
        rest = [prompt[held:] for prompt, held in zip(call.prompts, self.held_B, strict=False)]
        self._to_read = padded(rest, call.capacity, call.prompt_rows)
        self._guesser = _guesser(call.options)

    def _go_by(self, do: Do) -> None:
        self._do = do
        impl = self.call.options.impl
        self._reading = road(self.call.params)(do, impl)
        self._decoding = Whole(do, impl) if self.decodes_whole else self._reading

    def rehearsal(self, ahead: Ahead) -> "Rows":
        """The same rows as shapes."""
        rows = copy.copy(self)
        rows._go_by(ahead)
        rows.cache = jax.tree.map(struct, self.cache)
        return rows

    @property
    def kind(self) -> Any:
        """What decides on the programs: rows of one kind run the same."""
        call = self.call
        options = self.call.options
        arrays = call.params, self._guesser[0], self.state, self.cache, self._to_read
        # A draft model reads the whole prompt, whatever a prefix holds.
        longest = call.longest, int(self._to_read[1].max())
        widths = (self._reading.at_once(tokens, call.prompt_rows) for tokens in longest)
        way = self.decodes_whole, options.max_new_tokens > 1, options.prefix is None, options.impl, *widths
        return call.config, self._guesser[1], call.guesses, call.answers, *way, kinds(arrays)

    def read(self) -> jax.Array:
        """What `choose` takes, of the rows that answer."""
        call = self.call
        model = (self.call.params, self.call.config)
        donate = call.options.prefix is None
        behind, self.cache = self._reading.read(model, self._to_read, self.cache, donate)
        draft_cache = self._read_for_draft()
        if call.answers > 1:
            behind = self._do(_PICK, behind, self._prompt_R)
            caches = (self.cache, draft_cache)
            shared = (cache and self._reading.share(cache, self._prompt_R) for cache in caches)
            self.cache, draft_cache = shared
        if call.options.draft is not None:
            nothing_R = np.zeros(call.rows, np.int32)
            self.draft = Speculation(draft_cache, nothing_R, nothing_R)
        return behind

    def _read_for_draft(self) -> KVCache | None:
        """The draft model's cache, which holds the prompts; None where no model guesses."""
        call = self.call
        model = self._guesser
        if not isinstance(config := model[1], ModelConfig):
            return None
        capacity = min(call.capacity, config.context_length)  # guesses beyond are dropped
        cache = self._do.make(lambda: empty_cache(call, *model, capacity, call.prompt_rows))
        tokens = padded(call.prompts, capacity, call.prompt_rows)
        return self._reading.read(model, tokens, cache, True)[1]

    def choose(self, behind: jax.Array) -> None:
        """Takes each row's first token."""
        self.state = self._reading.choose((self.call.params, self.call.config), behind, self.state)

    def advance(self, steps: int, chosen: Chosen | None = None) -> None:
        """Takes so many steps, or fewer where all rows end; without a cache one, behind what was chosen."""
        call = self.call
        model = (self.call.params, self.call.config)
        if self.cache is None:
            prompts = [call.prompts[i] for i in self._prompt_R]
            answers = chosen.rows() if chosen else [[0]] * len(prompts)
            rows = [prompt + ids for prompt, ids in zip(prompts, answers, strict=False)]
            tokens = padded(rows, call.config.context_length, call.rows)
            self.choose(self._reading.read(model, tokens, None, True)[0])
        elif self.draft is None:
            self.state, self.cache = self._decoding.advance(model, self.state, self.cache, steps)
        else:
            draft_params, guesser = self._guesser
            who = Guessing(guesser, call.guesses)
            carried: Any = self.state, self.cache, self.draft
            carried = self._decoding.speculate(model, draft_params, who, carried, steps)
            self.state, self.cache, self.draft = carried


def road(params: Params) -> type[Road]:
    """How prompts are read and streams decoded: `Layered` on one CPU, where first answers wait for the
    compiler. The parameters may be shapes.
    """
    leaf = params["final_norm"]
    if lies_over(leaf) is not None:
        return Whole
    if isinstance(leaf, jax.Array):
        platforms = [device.platform for device in leaf.devices()]
        return Layered if platforms == ["cpu"] else Whole
    return Layered if jax.default_backend() == "cpu" else Whole


def prepare(rows: Rows) -> tuple[Ahead, int]:
    """`prepared` for what such rows run."""

    def rehearse(ahead: Ahead) -> int:
        rehearsal = rows.rehearsal(ahead)
        rehearsal.choose(rehearsal.read())
        first = ahead.programs
        if rows.call.options.max_new_tokens > 1:
            rehearsal.advance(1)
        return first

    return prepared(rows.call.params, rows.kind, rehearse)


def _guesser(options: GenerateOptions) -> tuple[Any, Any]:
    """The draft model's parameters and configuration; or None and a function, or None."""
    if options.draft is None or options.draft == "lookup" or callable(options.draft):
        return None, look_up if options.draft == "lookup" else options.draft
    return options.draft.params, options.draft.config


def _pick(behind_B, prompt_R):
    return behind_B[prompt_R]


_PICK = jax.jit(_pick)
