"""Grammars compiled by llguidance, once for each tokenizer and vocabulary."""

import threading
import weakref
from collections import OrderedDict
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..tool_calls.harmony import CALL, MESSAGE, last_header
from ..tool_calls.reasoning import THINK_END, THINK_START
from .automaton import Dfa
from .regex_parser import NotRegularError
from .token_automaton import token_automaton
from .token_masks import compile_matcher, make_tokenizer
from .vocabulary import TokenSearch, keep_latest, token_bytes

if TYPE_CHECKING:
    from .grammars import Grammar

AUTO = "auto"  # `Grammar.reasoning_end`
CALLS = "calls"  # the kind of `tool_grammar`

_MOST_GRAMMARS = 256  # that are kept, the latest ones
_MOST_CHARACTERS = 2**22  # of them together
_MOST_AUTOMATA = 32  # of half a megabyte at most for 150,000 tokens
_LAST_TOKENS = 64  # of a prompt, which tell whether it ends where a model begins to reason

_vocabularies: weakref.WeakKeyDictionary[Any, dict[int, "Vocabulary"]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def vocabulary_of(tokenizer: Any, vocab_size: int) -> "Vocabulary":
    """Returns the `Vocabulary` of a tokenizer and a model's number of logits. It is made once."""
    with _lock:
        by_size = _vocabularies.setdefault(tokenizer, {})
        if vocab_size not in by_size:
            by_size[vocab_size] = Vocabulary(tokenizer, vocab_size)
        return by_size[vocab_size]


class Vocabulary:
    """Compiles grammars for a tokenizer and a number of logits, and keeps the latest ones. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        self.size = vocab_size
        self.tokens, self.special = token_bytes(tokenizer, vocab_size)  # no grammar allows special ones
        self._generation_prompt = _thinking_prompt(tokenizer)
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._automaton_of = lru_cache(_MOST_AUTOMATA)(self._make_automaton)
        self._lock = threading.Lock()

    def matcher(self, grammar: "Grammar") -> Any:
        """Returns a new `llguidance.LLMatcher` at the grammar's beginning. It raises the errors of
        `compile_matcher`.
        """
        key = grammar.kind, grammar.source
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None:
            compiled = compile_matcher(self._llguidance, self.size, *key)  # without the lock: no one waits
            with self._lock:
                keep_latest(self._compiled, key, compiled, _MOST_GRAMMARS)
                while sum(len(source) for _, source in self._compiled) > _MOST_CHARACTERS:
                    self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def automaton(self, grammar: "Grammar") -> Dfa | None:
        """Returns the grammar as an automaton, or None if it is not regular, or too large."""
        return self._automaton_of(grammar.source) if grammar.kind == "regex" else None

    def _make_automaton(self, pattern: str) -> Dfa | None:
        try:
            return Dfa(*token_automaton(pattern, self.tokens, self.special))
        except NotRegularError:
            return None

    @cached_property
    def search(self) -> TokenSearch:
        return TokenSearch(self.tokens)

    @cached_property
    def _llguidance(self) -> Any:
        return make_tokenizer(self.tokens, self.special)

    def reasoning_end(self, grammar: "Grammar", prompt: list[int]) -> "ReasoningEnd | None":
        """Returns the end of the reasoning after which a grammar begins in the answer to a prompt. None: the
        grammar begins with the answer.
        """
        end = grammar.reasoning_end
        if end is None or end == AUTO and self._generation_prompt is None:
            return None
        tokenizer: Any = grammar.tokenizer  # of a grammar that is compiled
        before = tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special_tokens=False)
        if end == AUTO:
            if not before.endswith(str(self._generation_prompt)):
                return None
            return ReasoningEnd(tokenizer, None if tokenizer.writes_harmony else THINK_END)
        return None if before.rstrip().endswith(end) else ReasoningEnd(tokenizer, end)


class ReasoningEnd:
    """Finds the end of the reasoning in an answer."""

    def __init__(self, tokenizer: Any, text: str | None):
        """Makes a finder. text: the text after which the reasoning ends. None: it ends with the header of
        Harmony's channel `final`.
        """
        self._tokenizer = tokenizer
        self._text = text
        self.most_tokens = _LAST_TOKENS if text is None else len(text) + 8  # in which the end stands
        marks = tokenizer.harmony_marks if text is None else {}
        # The id of <|call|>, which ends a call instead; -1: there is none.
        self.call_end = next((i for i, mark in marks.items() if mark == CALL), -1)

    def ends(self, recent: list[int]) -> bool:
        """Returns True if the last tokens contain the end. recent: at most `most_tokens`."""
        if self._text is not None:
            return self._text in self._tokenizer.decode(recent, skip_special_tokens=False)
        return self._header(recent) == ("final", None)

    def in_call(self, recent: list[int], before: bool) -> bool:
        """Returns True if the last tokens belong to a message to a function. before: the result for the
        tokens without the last one.
        """
        mark = self._tokenizer.harmony_marks.get(recent[-1]) if self._text is None else None
        if mark != MESSAGE:
            return before and mark is None
        header = self._header(recent)
        return before if header is None else header[1] is not None

    def _header(self, recent: list[int]) -> tuple[str, str | None] | None:
        """Returns channel and function of the header that the last token ends. None: it ends no header."""
        if self._tokenizer.harmony_marks.get(recent[-1]) != MESSAGE:
            return None
        return last_header(self._tokenizer.decode_marked(recent))


def _thinking_prompt(tokenizer: Any) -> str | None:
    """Returns the text that the chat template puts before an answer that begins with reasoning. None: the
    template has no such text.
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
