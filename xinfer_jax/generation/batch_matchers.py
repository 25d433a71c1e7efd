"""`BatchMatchers`: the grammars of the rows of a batch, some of which may have none."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..sampling.context import ALL_BITS


class BatchMatchers:
    """Follows the rows that have a grammar.

    Attributes:
        matchers: `grammar.matcher.Matcher` or `DfaMatcher` of these rows.
        dfas: of each row; None: the host writes its masks, or it has no grammar.
    """

    def __init__(self, matchers: Sequence[Any]):
        """matchers: of each row."""
        self.matchers = {row: matcher for row, matcher in enumerate(matchers) if matcher is not None}
        self.dfas = [matcher and matcher.dfa for matcher in matchers]
        self._counts = dict.fromkeys(self.matchers, 0)  # tokens that were followed

    def need_masks(self, active_R: np.ndarray) -> bool:
        """Whether a row whose masks the host writes continues. active_R: bool."""
        return any(active_R[row] and one.dfa is None for row, one in self.matchers.items())

    def masks(
        self, shape: tuple[int, int, int], active_R: np.ndarray | None, draft_BT: Any = None
    ) -> np.ndarray:
        """The masks of all rows, in a new array.

        Args:
            shape: [B, Q, W]; Q: 1, or one more than draft tokens.
            active_R: bool: rows that continue; None: all. The others may sample anything, and do not.
            draft_BT: int32; None: no drafts are verified next.
        """
        masks = np.full(shape, ALL_BITS)
        for row, matcher in self.matchers.items():
            if matcher.dfa is None and (active_R is None or active_R[row]):
                matcher.fill(masks[row], () if draft_BT is None else draft_BT[row].tolist())
        return masks

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        """Follows what is new in each row's tokens."""
        for row, matcher in self.matchers.items():
            matcher.append(rows[row][self._counts[row] :])
            self._counts[row] = len(rows[row])
