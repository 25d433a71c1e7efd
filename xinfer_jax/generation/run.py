"""A call under way: its prompts are read, its rows advance, the host looks at them. `generate` and `stream`
are this in two rhythms.
"""

import numpy as np

from ..cache.prefix import kept_prefix
from ..sampling.logprobs import rows_of_tokens
from ..stats import GenerateStats, Stopwatch, peak_bytes
from ..weights.params import tree_bytes
from .faults import check_cache, check_chosen
from .options import Call, GenerateOutput
from .rows import Rows, prepare
from .state import Chosen, look


class Run:
    """A call under way.

    Attributes:
        chosen: what its rows chose, as the host knows it.
        stats: what it cost so far.
    """

    def __init__(self, call: Call, *, decodes_whole: bool):
        """Reads the prompts and chooses every row's first token.

        Args:
            call: from `checked`.
            decodes_whole: on the device, in one loop, on whatever road the prompts are read.
        """
        self._call = call
        prompts = call.prompts
        self.chosen: Chosen
        with Stopwatch() as setup:
            self._rows = Rows(call, decodes_whole)
        self._asked = [row for row in prompts for _ in range(call.answers)]
        read = sum(map(len, prompts))
        reused = int(self._rows.held_B.sum())
        self.stats = GenerateStats(len(self._asked), read, tree_bytes(call.params), 0, reused)
        with Stopwatch() as compiling:
            self._ahead, programs = prepare(self._rows)
            self._ahead.wait(programs)
        with Stopwatch() as reading:
            behind = self._rows.read().block_until_ready()
        with Stopwatch() as choosing:
            self._rows.choose(behind)
            self._look()
        held = self._rows.cache
        self.stats.cache_bytes = tree_bytes((held.k, held.v)) if held else 0
        self.stats.prefill_seconds = reading.seconds
        self.stats.ttft_seconds = setup.seconds + reading.seconds + choosing.seconds
        self.stats.compile_seconds = compiling.seconds
        self.stats.count(setup, compiling, reading, choosing)

    @property
    def active_R(self) -> np.ndarray:
        """bool: the row goes on."""
        return ~self.chosen.finished_B & (self.chosen.length_B < self._call.options.max_new_tokens)

    @property
    def steps(self) -> int:
        """Tokens that every row has which goes on; the longest row's, once none does."""
        of_active = self.chosen.length_B[self.active_R]
        return int(of_active.min() if of_active.size else self.chosen.length_B.max())

    def advance(self, steps: int) -> None:
        """Takes so many steps, or fewer where all rows end; without a cache, one."""
        with Stopwatch() as compiling:
            self._ahead.wait()
        with Stopwatch() as decoding:
            self._rows.advance(steps, self.chosen)
            self._look()
        self.stats.compile_seconds += compiling.seconds
        self.stats.count(compiling, decoding)
        self.stats.decode_seconds += decoding.seconds
        self.stats.decode_steps = self.steps - 1

    def _look(self) -> None:
        self.chosen = look(self._rows.state, len(self._asked))
        check_chosen(self._call, self.chosen)

    def ids(self, step: int) -> list[int | None]:
        """What the rows chose at a step; None of a row that had ended, or ends there."""
        column = self.chosen.tokens_BT[:, step].tolist()
        ends = self._call.ending
        rows = zip(column, self.chosen.length_B, strict=True)
        return [token if step < n and token not in ends else None for token, n in rows]

    def output(self, told: int | None = None) -> GenerateOutput:
        """What the call gives.

        Args:
            told: a caller's word to stop came after so many tokens a row: what was chosen ahead of it does
                not count.
        """
        call = self._call
        options = self._call.options
        stats = self.stats
        check_cache(call, self._rows.cache)
        tokens_RT, logprobs_RT, length_R, finished_R = self.chosen
        if told is not None:
            finished_R = finished_R & (length_R <= told)
            length_R = np.minimum(length_R, told)
        rows = self.chosen._replace(length_B=length_R).rows()
        stats.generated_tokens = int(length_R.sum())
        stats.peak_bytes = peak_bytes()
        if (draft := self._rows.draft) is not None:
            passes_R, accepted_R = (np.asarray(x)[: len(rows)] for x in (draft.passes_B, draft.accepted_B))
            stats.passes = passes_R.tolist()
            stats.acceptance = (accepted_R / (np.maximum(passes_R, 1) * call.guesses)).tolist()

        def reason(ids: list[int], finished: bool) -> str:
            if finished:
                return "stop" if ids[-1] in options.stop_token_ids else "eos"
            return "length" if told is None or len(ids) == options.max_new_tokens else "stop"

        ends = list(zip(rows, finished_R, strict=True))
        out = GenerateOutput(
            tokens=[ids[:-1] if finished else ids for ids, finished in ends],
            logprobs=[row[:n].tolist() for row, n in zip(logprobs_RT, length_R, strict=True)],
            finish_reason=[reason(*end) for end in ends],
            stats=stats,
        )
        noted = self._rows.state.alternatives
        if options.logprobs and noted:
            out.alternatives = rows_of_tokens(noted, tokens_RT, logprobs_RT, length_R)
        if options.logits and noted:
            of_rows = zip(map(np.asarray, noted.logits_BTV), length_R, strict=False)
            out.logits = [logits_TV[:n] for logits_TV, n in of_rows]  # cut on the host: nothing to compile
        if options.keep_prefix:
            out.prefix = kept_prefix(call.params, call.config, self._asked, rows, self._rows.cache)
        return out if options.best_of in (None, options.n) else out.best(options.n, options.best_of)
