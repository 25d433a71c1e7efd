"""Grammars compiled by llguidance, once for each tokenizer and vocabulary."""

import contextlib
import re
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import GrammarError, InputError
from ..tool_calls.harmony import CALL, MESSAGE, last_header
from ..tool_calls.reasoning import THINK_END, THINK_START
from .automaton import Dfa
from .regex_parser import NotRegularError
from .token_automaton import token_automaton
from .vocabulary import token_bytes

if TYPE_CHECKING:
    from .grammars import Grammar

AUTO = "auto"  # `Grammar.reasoning_end`
CALLS = "calls"  # the kind of `tool_grammar`

_MOST_GRAMMARS = 256  # that are kept, the latest ones
_MOST_CHARACTERS = 2**22  # of them together
_MOST_AUTOMATA = 32  # of half a megabyte at most for 150,000 tokens
# Bounds of llguidance that hold for one grammar. They bound time too: work is counted, not measured.
_LIMITS = dict(max_lexer_states=50_000, initial_lexer_fuel=100_000, verbose_errors=False)
_MOST_INTERSECTIONS = 8  # & and ~ of a Lark grammar: their work is not all counted
# Where text is forced, the model still chooses among its tokenizations.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_LAST_TOKENS = 64  # of a prompt, which tell whether it ends where a model begins to reason

_vocabularies: weakref.WeakKeyDictionary[Any, dict[int, "Vocabulary"]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def vocabulary_of(tokenizer: Any, vocab_size: int) -> "Vocabulary":
    """The `Vocabulary` of a tokenizer and a model's number of logits; it is made once."""
    with _lock:
        by_size = _vocabularies.setdefault(tokenizer, {})
        if vocab_size not in by_size:
            by_size[vocab_size] = Vocabulary(tokenizer, vocab_size)
        return by_size[vocab_size]


class Vocabulary:
    """Compiles grammars for a tokenizer and a number of logits, and keeps the latest ones. Thread-safe.

    Attributes:
        size: V. Ids beyond the tokenizer's have no text, and ids of the tokenizer beyond V do not exist.
        tokens: the bytes of each id.
        special: ids of special tokens, which no grammar allows.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self.size = vocab_size
        self.tokens, self.special = token_bytes(tokenizer, vocab_size)
        self._generation_prompt = _thinking_prompt(tokenizer)
        self._llguidance: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._automata: OrderedDict[str, Dfa | None] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, grammar: "Grammar") -> Any:
        """A new `llguidance.LLMatcher` at the grammar's beginning.

        Raises:
            InputError: llguidance is not installed.
            GrammarError: llguidance does not serve the grammar: its own words.
        """
        key = grammar.kind, grammar.source
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None:
            compiled = self._compile(grammar)  # without the lock: others do not wait
            with self._lock:
                self._compiled[key] = compiled
                while len(self._compiled) > _MOST_GRAMMARS or self._characters() > _MOST_CHARACTERS:
                    self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def automaton(self, grammar: "Grammar") -> Dfa | None:
        """The grammar as an automaton; None where it is not regular, or too large."""
        if grammar.kind != "regex":
            return None
        with self._lock:
            if grammar.source in self._automata:
                self._automata.move_to_end(grammar.source)
                return self._automata[grammar.source]
        found = None
        with contextlib.suppress(NotRegularError):
            found = token_automaton(grammar.source, self.tokens, self.special)
        with self._lock:
            self._automata[grammar.source] = found
            if len(self._automata) > _MOST_AUTOMATA:
                self._automata.popitem(last=False)
        return found

    def _characters(self) -> int:
        return sum(len(source) for _, source in self._compiled)

    def _compile(self, grammar: "Grammar") -> Any:
        llguidance = _import_llguidance()
        with self._lock:
            if self._llguidance is None:
                self._llguidance = llguidance.LLTokenizer(_wrap(self.tokens, self.special), self.size + 1)
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._llguidance, lark_text(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            next_tokens(matcher, self.size)
        if matcher.get_error().startswith("NoExtension"):
            raise GrammarError(f"the {grammar.kind} grammar allows no text: loosen it")
        if matcher.is_error():
            error = matcher.get_error()
            raise GrammarError(f"{_failed_part(grammar, error)} is not served: {error_words(error)}")
        return matcher

    def reasoning_end(self, grammar: "Grammar", prompt: list[int]) -> "ReasoningEnd | None":
        """After what a grammar begins in the answer to a prompt; None: with the answer."""
        end = grammar.reasoning_end
        if end is None or end == AUTO and self._generation_prompt is None:
            return None
        before = grammar.tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special_tokens=False)
        if end == AUTO:
            if not before.endswith(str(self._generation_prompt)):
                return None
            return ReasoningEnd(grammar.tokenizer, None if grammar.tokenizer.writes_harmony else THINK_END)
        return None if before.rstrip().endswith(end) else ReasoningEnd(grammar.tokenizer, end)


class ReasoningEnd:
    """Tells where the reasoning of an answer ends.

    Attributes:
        most_tokens: in which the end stands.
        call_end: the id of Harmony's <|call|>, which ends a call instead; -1: there is none.
    """

    def __init__(self, tokenizer: Any, text: str | None):
        """text: after which it ends; None: with the header of Harmony's channel `final`."""
        self._tokenizer = tokenizer
        self._text = text
        self.most_tokens = _LAST_TOKENS if text is None else len(text) + 8
        marks = tokenizer.harmony_marks if text is None else {}
        self.call_end = next((i for i, mark in marks.items() if mark == CALL), -1)

    def ends(self, recent: list[int]) -> bool:
        """Whether the last tokens have the end. recent: at most `most_tokens`."""
        if self._text is not None:
            return self._text in self._tokenizer.decode(recent, skip_special_tokens=False)
        return self._header(recent) == ("final", None)

    def in_call(self, recent: list[int], before: bool) -> bool:
        """Whether the last tokens are of a message to a function. before: the same without the last one."""
        mark = self._tokenizer.harmony_marks.get(recent[-1]) if self._text is None else None
        if mark != MESSAGE:
            return before and mark is None
        header = self._header(recent)
        return before if header is None else header[1] is not None

    def _header(self, recent: list[int]) -> tuple[str, str | None] | None:
        """Channel and function of the header that the last token ends; None: it ends no header."""
        if self._tokenizer.harmony_marks.get(recent[-1]) != MESSAGE:
            return None
        return last_header(self._tokenizer.decode_marked(recent))


def next_tokens(matcher: Any, vocab_size: int) -> np.ndarray:
    """uint32 [ceil((V + 1) / 32)]: a bit for each token that may come next, and for the end at bit V."""
    bits = np.zeros(vocab_size // 32 + 1, np.uint32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    return bits


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        why = "a grammar needs llguidance, which is not installed: pip install '.[grammar]' in the checkout"
        raise InputError(why) from error
    return llguidance


def _wrap(tokens: list[bytes], special: list[int]) -> Any:
    """The vocabulary as llguidance takes it. The end of a text is a token of its own after the others, so the
    EOS ids of a request need no other vocabulary. Nothing is ever tokenized.
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


def lark_text(grammar: "Grammar") -> str:
    """The grammar in llguidance's Lark syntax, whatever its kind."""
    if grammar.kind == "lark":
        operators = re.findall("[&~]", re.sub(r'"(?:\\.|[^"\\])*"', "", grammar.source))
        if len(operators) > _MOST_INTERSECTIONS:
            raise GrammarError(
                f"the lark grammar has {len(operators)} of & and ~: at most {_MOST_INTERSECTIONS} are served"
            )
        return grammar.source if "%llguidance" in grammar.source else _NO_FORCING + grammar.source
    if grammar.kind == CALLS:
        return _NO_FORCING + grammar.source
    if grammar.kind == "json":
        return f"{_NO_FORCING}start: %json {grammar.source}"
    return f"{_NO_FORCING}start: /{_import_llguidance().regex_to_lark(grammar.source, use_ascii='dws')}/"


def error_words(error: str) -> str:
    """llguidance's words, without the grammar and the expressions that it repeats and the place in them."""
    text = re.split(r"\n\s*\d+ \| |\n<state>|\s*<backtrace>", error)[0]
    text = re.sub(
        r"regex parse error:.*\nerror: ", "a pattern is no regular expression: ", text, flags=re.DOTALL
    )
    text = re.sub(r":\s+\((And|SearchRegex) .*", "", text)
    text = re.sub(r"Enable 'coerce_one_of' .*", "Give anyOf", text)
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", text)


def _failed_part(grammar: "Grammar", error: str) -> str:
    """Which grammar an error is of, or which tool's schema: its rule has the tool's name in a comment."""
    place = re.match(r"at (\d+)\(", error)
    if grammar.kind != CALLS or place is None:
        return f"the {grammar.kind} grammar"
    line = lark_text(grammar).split("\n")[int(place[1]) - 1]
    _, mark, name = line.rpartition(" // ")
    return f"the schema of tool {name!r}" if mark else "the grammar beside tools"


def _thinking_prompt(tokenizer: Any) -> str | None:
    """What the chat template puts before an answer that begins with reasoning, or with a header of Harmony;
    None: the model does not reason.
    """
    template = tokenizer.chat_template or ""
    in_harmony = tokenizer.writes_harmony
    if THINK_END not in template and not in_harmony:
        return None
    messages = [{"role": "user", "content": "?"}]
    try:
        asked, prompt = (tokenizer.apply_chat_template(messages, begun) for begun in (False, True))
    except InputError:
        return None
    start = prompt[len(asked) :] if prompt.startswith(asked) else prompt
    return start if start and (in_harmony or THINK_START in start or "enable_thinking" in template) else None
