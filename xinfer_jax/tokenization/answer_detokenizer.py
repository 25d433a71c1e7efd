"""Decodes the token ids of one answer up to its first stop string."""

import functools
from collections.abc import Collection, Sequence

from ..tool_calls.harmony import SPELLINGS, HarmonySplitter, with_marks
from ..tool_calls.reasoning import ReasoningSplitter
from .detokenizer import IncrementalDetokenizer
from .tokenizer import Tokenizer


class AnswerDetokenizer:
    """Decodes the ids of one answer as they arrive, up to the first stop string.

    A stop string never has a part of a control token of Harmony: it has all of the token or nothing.

    Args:
        tokenizer: the tokenizer of the model.
        stops: the stop strings.
        include_stop: True: the text includes the stop string.
        skip_special_tokens, marked: see `IncrementalDetokenizer`.
        min_tokens: a stop string that ends within this number of first tokens does not count.
        content_after: the part of the answer that the prompt has already: <think>, a header of Harmony, or
            "". If it is given, stop strings count in the content only, not in the reasoning or, in Harmony,
            in calls. None: they count everywhere.
        end_ids: EOS and stop ids, which have no text here.

    Attributes:
        ended: no more text comes, for example after a complete stop string.
        stop_string: the stop string that ended the text. None: none did.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        marked: bool = False,
        min_tokens: int = 0,
        content_after: str | None = None,
        end_ids: Collection[int] = (),
    ):
        in_harmony = bool(tokenizer.harmony_marks)
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, in_harmony)
        self._stops = with_marks(stops) if in_harmony else tuple(stops)
        self._spellings = SPELLINGS if in_harmony and not marked else {}
        self._pending = ""  # text that may be the start of a stop string
        self._include_stop = include_stop
        self._tokens_left = min_tokens  # whose text ends no answer
        self._splitter: ReasoningSplitter | HarmonySplitter | None = None
        if content_after is not None and stops:
            splitter = HarmonySplitter if tokenizer.writes_harmony else ReasoningSplitter
            self._splitter = splitter(content_after)
        self._end_ids = end_ids
        self.stop_string: str | None = None
        self.ended = False

    def push(self, token: int | None) -> str:
        """Returns the text that this id completes. Text that may be the start of a stop string is returned
        later.
        """
        if token is None or self.ended or token in self._end_ids:
            return ""
        text = self._until_stop(self._detokenizer.push(token), False)
        self._tokens_left -= 1
        return text.translate(self._spellings)

    def finish(self) -> str:
        """Returns the remaining text, once no more ids come."""
        if self.ended:
            return ""
        text = self._until_stop(self._detokenizer.finish(), True)
        if not self.ended:
            text += self._pending
        self.ended = True
        return text.translate(self._spellings)

    def _until_stop(self, chunk: str, last: bool) -> str:
        if self._splitter is None:
            return self._until_stop_in_content(chunk)
        text = ""
        for part, is_content in self._splitter.push(chunk, last):
            if is_content:
                text += self._until_stop_in_content(part)
                if self.ended:
                    break
            elif part:
                text += self._pending + part
                self._pending = ""
        return text

    def _until_stop_in_content(self, chunk: str) -> str:
        text = self._pending + chunk
        found = find_stop(self._stops, text, len(self._pending))
        if found is not None and self._tokens_left <= 0:
            self.ended = True
            stop_start, stop_end = found
            self.stop_string = text[stop_start:stop_end]
            return text[: stop_end if self._include_stop else stop_start]
        ready = stop_prefix_start(self._stops, text)
        self._pending = text[ready:]
        return text[:ready]


def find_stop(stops: Sequence[str], text: str, least_end: int) -> tuple[int, int] | None:
    """Returns start and end of the first stop string, then the shortest, that ends after `least_end`."""
    starts = ((text.find(stop, max(0, least_end + 1 - len(stop))), stop) for stop in stops)
    return min(((start, start + len(stop)) for start, stop in starts if start >= 0), default=None)


def stop_prefix_start(stops: tuple[str, ...], text: str) -> int:
    """Returns the start of the longest end of the text that is the beginning of a stop string."""
    prefixes, longest = _prefixes(stops)
    ends = range(max(0, len(text) - longest), len(text))
    return next((start for start in ends if text[start:] in prefixes), len(text))


@functools.lru_cache(8)
def _prefixes(stops: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Returns the starts of the stop strings, without the strings, and the most characters of one. They are
    cached, since all answers of a request share them. The most take 4 MiB.
    """
    prefixes = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
    return prefixes, max(map(len, prefixes), default=0)
