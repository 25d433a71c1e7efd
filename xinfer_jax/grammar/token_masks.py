"""`TokenMasks`: the tokens that a grammar allows next, by llguidance. It imports no jax, as the processes of
`worker` start with it.
"""

import dataclasses
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import GrammarError, InputError, NoTokenLeftError

# Bounds of llguidance that hold for one grammar. They bound time too: work is counted, not measured.
_LIMITS = dict(max_lexer_states=50_000, initial_lexer_fuel=100_000, verbose_errors=False)
_MOST_INTERSECTIONS = 8  # & and ~ of a Lark grammar: their work is not all counted
# Where text is forced, the model still chooses among its tokenizations.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
MASK_SECONDS = 0.25  # of one mask of a grammar that is served
_WALKS = 3  # random texts that a new grammar is tried with
_WALK_TOKENS = 8
_NOT_ALLOWED = (
    "the settings leave no token that the grammar allows: loosen logit_bias, allowed, forbidden or"
    " bad words, min_tokens, or the grammar"
)

# Without a closing quote it matches too, and so takes each character once.
_LARK_TEXT = re.compile(r'"(?:\\.?+|[^"\\])*+("?+)', re.DOTALL)


@dataclasses.dataclass
class TokenMasks:
    """The masks of one answer."""

    _matcher: Any  # an `LLMatcher` of its own, at the grammar's beginning
    _size: int  # V
    count: int = 0  # tokens that it followed

    def after(self, ids: Sequence[int], draft_ids: Sequence[int] = ()) -> np.ndarray:
        """Returns uint32 [1 + n, words of V + 1 bits]: the tokens that may come after all `ids` of the
        answer, and after each draft token up to the first that the grammar forbids. Bit V: the text may end.

        Raises:
            NoTokenLeftError: the grammar forbids one of `ids`, or exceeds llguidance's limits.
        """
        new = list(ids[self.count :])
        self.count = len(ids)
        if not all(self._matcher.consume_token(token) for token in new):
            self._check_served()
            check_allowed(False)
        found = [self._next()]
        ahead: Any = self._matcher.deep_copy() if draft_ids else None
        for token in draft_ids:
            if not ahead.consume_token(token):
                break
            found.append(TokenMasks(ahead, self._size)._next())
        return np.stack(found)

    def _next(self) -> np.ndarray:
        bits = next_tokens(self._matcher, self._size)
        self._check_served()
        return bits

    def _check_served(self) -> None:
        if self._matcher.is_error():
            why = error_words(self._matcher.get_error())
            raise NoTokenLeftError(f"the grammar exceeds what is served: {why}; simplify it")


def compile_matcher(tokenizer: Any, vocab_size: int, kind: str, source: str, walks: int = _WALKS) -> Any:
    """Returns an `LLMatcher` at the beginning of a grammar, which was tried with a few random texts (walks.
    0: it was tried before).

    Raises:
        InputError: llguidance is not installed.
        GrammarError: llguidance does not serve the grammar: its own words.
    """
    llguidance = _import_llguidance()
    limits = llguidance.LLParserLimits(**_LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, lark_text(kind, source), log_level=0, limits=limits)
    draw = random.Random(0)
    for _ in range(walks):
        _walk(matcher, vocab_size, kind, source, draw)
    return matcher


def _walk(matcher: Any, vocab_size: int, kind: str, source: str, draw: random.Random) -> None:
    """Follows a random text. Raises GrammarError if the grammar or one of its masks is too large."""
    if not matcher.is_error():
        matcher = matcher.deep_copy()
    for _ in range(_WALK_TOKENS):
        began = time.process_time()
        bits = next_tokens(matcher, vocab_size) if not matcher.is_error() else None
        if matcher.get_error().startswith("NoExtension"):
            raise GrammarError(f"the {kind} grammar allows no text: loosen it")
        if matcher.is_error():
            error = matcher.get_error()
            raise GrammarError(f"{_failed_part(kind, source, error)} is not served: {error_words(error)}")
        if time.process_time() - began > MASK_SECONDS:
            raise GrammarError(
                f"the {kind} grammar takes more than {MASK_SECONDS:g} s for one token: make it less ambiguous"
            )
        assert bits is not None
        ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little"))
        if not len(ids):
            return
        matcher.consume_token(int(ids[draw.randrange(len(ids))]))


def make_tokenizer(tokens: Sequence[bytes], special: Sequence[int]) -> Any:
    """Returns llguidance's tokenizer of a vocabulary. Raises InputError if it is not installed."""
    return _import_llguidance().LLTokenizer(_wrap(tokens, special), len(tokens) + 1)


def next_tokens(matcher: Any, vocab_size: int) -> np.ndarray:
    """Returns uint32 [ceil((V + 1) / 32)]: a bit for each token that may come next, and for the end at bit
    V.
    """
    bits = np.zeros(vocab_size // 32 + 1, np.uint32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return bits


def check_allowed(is_allowed: bool) -> None:
    """Raises NoTokenLeftError if a grammar does not allow the token that was sampled."""
    if not is_allowed:
        raise NoTokenLeftError(_NOT_ALLOWED)


def error_words(error: str) -> str:
    """Returns llguidance's words, without the text that it repeats, the place in the text, and its own
    measures.
    """
    if re.search(r"Current row has|too many items", error, re.IGNORECASE):
        return "too many alternatives, or optional properties, are possible in one place"
    text = re.split(r"\n\s*\d+ \| |\n<state>|\s*<backtrace>", error)[0]
    text = re.sub(r"(?s)regex parse error:.*\nerror: ", "a pattern is no regular expression: ", text)
    text = re.sub(r":\s+\((And|SearchRegex) .*", "", text)
    text = re.sub(r"Enable 'coerce_one_of' .*", "Give anyOf", text)
    return re.sub(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?", "", text)


def _failed_part(kind: str, source: str, error: str) -> str:
    """Names the grammar to which an error belongs, or the tool whose schema it concerns. The rule of a tool
    has the tool's name in a comment.
    """
    place = re.match(r"at (\d+)\(", error)
    if kind != "calls" or place is None:
        return f"the {kind} grammar"
    line = lark_text(kind, source).split("\n")[int(place[1]) - 1]
    _, mark, name = line.rpartition(" // ")
    return f"the schema of tool {name!r}" if mark else "the grammar beside tools"


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        why = "a grammar needs llguidance, which is not installed: run pip install 'llguidance>=1.9.1'"
        raise InputError(why) from error
    return llguidance


def _wrap(tokens: Sequence[bytes], special: Sequence[int]) -> Any:
    """Returns the vocabulary as llguidance takes it. The end of a text is an additional token after the
    others, so the EOS ids of a request need no other vocabulary. Nothing is ever tokenized.
    """
    from llguidance import TokenizerWrapper

    class Tokens:
        eos_token_id = len(tokens)
        bos_token_id = None
        special_token_ids = [*special, len(tokens)]

        def __call__(self, text: Any) -> list[int]:
            return []

    found = Tokens()
    found.tokens = [*tokens, b"<|end of text|>"]  # type: ignore[attr-defined]
    return TokenizerWrapper(found)


def lark_text(kind: str, source: str) -> str:
    """Returns a grammar in llguidance's Lark syntax, whatever its kind."""
    if kind == "lark":
        operators = re.findall("[&~]", _LARK_TEXT.sub(lambda found: "" if found[1] else found[0], source))
        if len(operators) > _MOST_INTERSECTIONS:
            raise GrammarError(
                f"the lark grammar has {len(operators)} of & and ~: at most {_MOST_INTERSECTIONS} are served"
            )
        return source if "%llguidance" in source else _NO_FORCING + source
    if kind == "json":
        return f"{_NO_FORCING}start: %json {source}"
    if kind == "regex":
        return f"{_NO_FORCING}start: /{_import_llguidance().regex_to_lark(source, use_ascii='dws')}/"
    return _NO_FORCING + source
