"""The grammars of a call: `compile_grammars`, and `BatchMatchers`, which follow the rows that have one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..checks import is_sequence
from ..config.model_config import ModelConfig
from ..errors import InputError, format_value
from ..sampling.context import ALL_BITS
from .options import GenerateOptions


class BatchMatchers:
    """Follows the rows that have a grammar.

    Attributes:
        matchers: `grammar.matcher.Matcher` or `DfaMatcher` of these rows.
        dfas: the automaton of each row. None: the host writes its masks, or it has no grammar.
    """

    def __init__(self, matchers: Sequence[Any]):
        """Makes the matchers of a call. matchers: the matcher of each row."""
        self.matchers = {row: matcher for row, matcher in enumerate(matchers) if matcher is not None}
        self.dfas = [matcher and matcher.dfa for matcher in matchers]
        self._counts = dict.fromkeys(self.matchers, 0)  # tokens that were followed

    def need_masks(self, active_R: np.ndarray) -> bool:
        """Returns True if a row whose masks the host writes continues. active_R: bool."""
        return any(active_R[row] and one.dfa is None for row, one in self.matchers.items())

    def masks(
        self, shape: tuple[int, int, int], active_R: np.ndarray | None, draft_BT: Any = None
    ) -> np.ndarray:
        """Returns the masks of all rows, in a new array.

        Args:
            shape: [B, Q, W]. Q: 1, or one more than draft tokens.
            active_R: bool: rows that continue. None: all. The others may sample anything, and do not.
            draft_BT: int32. None: no drafts are verified next.
        """
        masks = np.full(shape, ALL_BITS)
        for row, matcher in self.matchers.items():
            if matcher.dfa is None and (active_R is None or active_R[row]):
                matcher.fill(masks[row], () if draft_BT is None else draft_BT[row].tolist())
        return masks

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        """Follows the new tokens of each row."""
        for row, matcher in self.matchers.items():
            matcher.append(rows[row][self._counts[row] :])
            self._counts[row] = len(rows[row])


def compile_grammars(
    config: ModelConfig, options: GenerateOptions, prompts: list[list[int]]
) -> tuple[tuple[Any, ...], bool]:
    """Returns the compiled grammar of each prompt, or () if no prompt has one, and True if the host writes
    masks.
    """
    given: Any = options.grammar
    each = list(given) if is_sequence(given) else [given] * len(prompts)
    if len(each) != len(prompts):
        counts = f"{len(each)} grammars for {len(prompts)} prompts"
        raise InputError(f"{counts}: give one grammar, or one per prompt")
    if all(grammar is None for grammar in each):
        return (), False
    if not options.eos_token_ids:
        raise InputError("grammar needs an EOS id, which ends the answer: eos_token_ids is empty")
    if not options.use_cache:
        raise InputError("grammar needs the cache: leave use_cache true")
    compiled: dict[Any, Any] = {}
    for grammar in each:
        if grammar is not None and grammar not in compiled:
            compiled[grammar] = _compile_grammar(config, grammar)
    grammars = tuple(None if grammar is None else compiled[grammar] for grammar in each)
    pairs = zip(grammars, prompts, strict=True)
    return grammars, any(x is not None and not x.runs_on_device(prompt) for x, prompt in pairs)


def _compile_grammar(config: ModelConfig, grammar: Any) -> Any:
    if not hasattr(grammar, "compile"):
        made_by = "json_schema, json_object, regex, lark or choice"
        raise InputError(f"grammar must be made by {made_by}, got {format_value(grammar)}")
    return grammar.compile(config.vocab_size)
