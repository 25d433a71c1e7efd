"""Text in, text out: conversation → chat template → ids → `generate` or `stream` → text."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, overload

import jax

from .checkpoint.conversation import FORM, prompt_ids
from .checkpoint.detokenizer import IncrementalDecoder
from .checkpoint.loading import Model
from .checkpoint.stop_strings import StopStrings
from .checkpoint.tokenizer import Tokenizer
from .checks import in_order
from .errors import InputError, shown
from .generation.options import GenerateOptions, GenerateOutput, asked
from .generation.programs import Ahead
from .generation.streaming import Stream, generate, stream

MOST_STOP_STRINGS = 64
LONGEST_STOP_STRING = 256  # of a prompt; characters
Conversation = Sequence[Mapping[str, Any]]  # messages of that form
Prompt = str | Conversation


def encode_prompt(
    model: Model,
    prompt: Prompt,
    *,
    system: str | None = None,
    raw: bool = False,
    add_special_tokens: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    escape_control_tokens: bool = True,
) -> list[int]:
    """The token ids that `generate_text` would start from.

    Args:
        model: from `load_model`.
        prompt: the user's text, or a whole conversation [{"role": "user", "content": "…"}, …].
        system: the system message put before it.
        raw: take the text as it is, without the chat template.
        add_special_tokens: to such a text, what the checkpoint puts around each (BOS, say).
        chat_template_kwargs: further variables of the chat template (enable_thinking, …).
        escape_control_tokens: where a conversation spells control tokens, like <|im_end|>, it gets the ids of
            their letters, so that nobody opens a turn by writing so. Without such spellings nothing changes.
            False: what is spelled becomes the token. A raw text and ids are never escaped.

    A text for a checkpoint without a chat template is taken as it is, with a warning.

    Returns:
        At least one id; the template has opened the assistant's turn.

    Raises:
        InputError: no tokenizer, an empty prompt, a message without role or content, more text than the
            context limit can hold, or a system message or a conversation with raw or without a chat template.
    """
    return prompt_ids(
        _tokenizer(model),
        prompt if isinstance(prompt, str) or not in_order(prompt) else list(prompt),
        model.config.context_length,
        system=system,
        raw=raw,
        add_special_tokens=add_special_tokens,
        variables=chat_template_kwargs,
        escape=escape_control_tokens,
    )


@overload
def generate_text(  # type: ignore[overload-overlap]  # a text is a sequence of texts to a type checker
    model: Model, prompt: Prompt, options: GenerateOptions | None = None, *,
    key: jax.Array | None = None, system: str | None = None, raw: bool = False,
    escape_control_tokens: bool = True,
) -> str: ...  # fmt: skip
@overload
def generate_text(
    model: Model, prompt: Sequence[Prompt], options: GenerateOptions | None = None, *,
    key: jax.Array | None = None, system: str | None = None, raw: bool = False,
    escape_control_tokens: bool = True,
) -> list[str]: ...  # fmt: skip
def generate_text(
    model: Model,
    prompt: Prompt | Sequence[Prompt],
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
    system: str | None = None,
    raw: bool = False,
    escape_control_tokens: bool = True,
) -> str | list[str]:
    """The answer to a prompt as one text, or to a list of prompts as a list of texts.

    Args:
        model: from `load_model`.
        prompt: a text or a conversation, or a list of them, mixed as you like: one batch, all of whose rows
            are in memory together. A list of messages is one conversation.
        options: None: greedy, 128 tokens at most.
        key: PRNG key, needed when sampling: one (prompt i of a list then uses `fold_in(key, i)`), or one per
            prompt.
        system, raw, escape_control_tokens: as in `encode_prompt`, for each prompt.

    Raises:
        InputError: as `encode_prompt` and `generate`; an empty list; `n` other than 1.
    """
    options = _text_options(options)
    many = in_order(prompt) and not _is_conversation(prompt)
    prompts = cast(Sequence[Prompt], prompt if many else [prompt])
    if not len(prompts):
        raise InputError(f"no prompts: give at least one text, or messages {FORM}")
    given: dict[str, Any] = dict(system=system, raw=raw, escape_control_tokens=escape_control_tokens)
    ids = []
    for i, one in enumerate(prompts):
        try:
            ids.append(encode_prompt(model, one, **given))
        except InputError as error:
            if not many:
                raise
            raise InputError(f"prompt {i}: {error}") from error
    if options.stop_strings:
        texts = _cut_texts(model, ids, options, key)
    else:
        out = generate(model.params, model.config, ids, options, key=key)
        texts = [_tokenizer(model).decode(row) for row in out.tokens]
    return texts if many else texts[0]


def stream_text(
    model: Model,
    prompt: Prompt,
    options: GenerateOptions | None = None,
    *,
    key: jax.Array | None = None,
    system: str | None = None,
    raw: bool = False,
    escape_control_tokens: bool = True,
) -> "TextStream":
    """`generate_text` of one prompt, piece by piece.

    Raises:
        InputError: as `generate_text`, at once; a list of prompts.
    """
    options = _text_options(options)
    if in_order(prompt) and len(prompt) and not _is_conversation(prompt):
        raise InputError(
            "stream_text takes one prompt, not a list: use generate_text, or stream of token ids"
        )
    given: dict[str, Any] = dict(system=system, raw=raw, escape_control_tokens=escape_control_tokens)
    return stream_answer(model, encode_prompt(model, prompt, **given), options, key=key)


def stream_answer(
    model: Model, ids: list[int], options: GenerateOptions, *, key: jax.Array | None = None
) -> "TextStream":
    """`stream_text` of a prompt that is encoded already."""
    return TextStream(Said(_tokenizer(model), options.stop_strings), _ids(model, [ids], options, key))


class TextStream(Iterator[str]):
    """An answer whose text comes as it is written: iterating it gives pieces, whole characters only.

    The text ends before the first of `options.stop_strings`, across token borders too; the output's tokens go
    up to the one that completed it.
    """

    def __init__(self, answer: "Said", steps: Stream):
        """answer, steps: of the one prompt."""
        self._answer = answer
        self._steps = steps

    def __next__(self) -> str:
        for (token,) in self._steps:
            piece = self._answer.push(token)
            if self._answer.ended:
                self.stop()
            if piece:
                return piece
        if rest := self._answer.finish():
            return rest
        raise StopIteration

    def prepare(self) -> Ahead:
        """As `Stream.prepare`."""
        return self._steps.prepare()

    def stop(self) -> None:
        """Ends the answer after the pieces that were given, with the finish_reason "stop"."""
        self._steps.stop()
        self._answer.ended = True

    @property
    def output(self) -> GenerateOutput:
        """What `generate` returns.

        Raises:
            InputError: the stream has not ended.
        """
        return self._steps.output


class TokenText(NamedTuple):
    """A token as a reader sees it."""

    id: int
    text: str
    probability: float


def alternatives_text(model: Model, out: GenerateOutput, row: int = 0) -> list[list[TokenText]]:
    """For each chosen token: itself, then its alternatives, with probabilities before any processor."""
    tokenizer = _tokenizer(model)
    if not isinstance(out, GenerateOutput) or out.alternatives is None:
        raise InputError("this output has no alternatives: generate with GenerateOptions(logprobs=…)")
    if not 0 <= row < len(out.alternatives):
        raise InputError(f"row {row!r} of an output of {len(out.alternatives)} rows")

    def readable(token: int, logprob: float) -> TokenText:
        return TokenText(token, tokenizer.token_text(token), math.exp(logprob))

    return [[readable(*pair) for pair in ((t.id, t.logprob), *t.top)] for t in out.alternatives[row]]


def _text_options(options: GenerateOptions | None) -> GenerateOptions:
    """Options that a text function can serve."""
    options = asked(options)
    if options.n != 1:
        several = "from Python, generate and the tokenizer give several"
        raise InputError(f"n={options.n}: the text functions give one answer; {several}")
    return dataclasses.replace(options, stop_strings=stops_of(options))


def stops_of(options: GenerateOptions) -> tuple[str, ...]:
    """Its stop strings, or an InputError."""
    stops = options.stop_strings
    if not in_order(stops) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InputError(f"stop_strings must be a list of texts that are not empty, got {shown(stops)}")
    if len(stops) > MOST_STOP_STRINGS or max(map(len, stops), default=0) > LONGEST_STOP_STRING:
        raise InputError(
            f"stop_strings: {MOST_STOP_STRINGS} of at most {LONGEST_STOP_STRING} characters may be given, got"
            f" {len(stops)}, the longest of {max(map(len, stops))}"
        )
    return tuple(stops)


def _ids(model: Model, prompts: list[list[int]], options: GenerateOptions, key: jax.Array | None) -> Stream:
    """The answers' ids as they come; stop strings are minded here, not there."""
    options = dataclasses.replace(options, stop_strings=())
    return stream(model.params, model.config, prompts, options, key=key)


def _is_conversation(prompt: Any) -> bool:
    return in_order(prompt) and len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)


def _cut_texts(
    model: Model, prompts: list[list[int]], options: GenerateOptions, key: jax.Array | None
) -> list[str]:
    """The answers up to their first stop strings; the batch runs until each has one, or has ended."""
    answers = [Said(_tokenizer(model), options.stop_strings) for _ in prompts]
    texts = [""] * len(prompts)
    steps = _ids(model, prompts, options, key)
    for ids in steps:
        texts = [text + answer.push(i) for text, answer, i in zip(texts, answers, ids, strict=True)]
        if all(answer.ended or i is None for answer, i in zip(answers, ids, strict=True)):
            steps.stop()
    return [text + answer.finish() for text, answer in zip(texts, answers, strict=True)]


class Said:
    """The text of one row as its ids come, up to the first stop string.

    Args:
        tokenizer: that decodes.
        stops: the stop strings.
        include_stop: the text ends with the stop string, not before it.
        skip_special_tokens: special tokens have no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._stops = StopStrings.of(tuple(stops)) if stops else None
        self._state = 0
        self._held = ""
        self._include = include_stop
        self.ended = False  # no more is said, as after a complete stop string

    def push(self, token: int | None) -> str:
        """What can be said now; what may be the beginning of a stop string is held back."""
        if token is None or self.ended:
            return ""
        return self._take(self._decoder.push(token))

    def finish(self) -> str:
        """What is left when no more ids come."""
        if self.ended:
            return ""
        text = self._take(self._decoder.finish()) + ("" if self.ended else self._held)
        self.ended = True
        return text

    def _take(self, piece: str) -> str:
        if self._stops is None:
            return piece
        begin = len(self._held)
        text = self._held + piece
        self._state, found = self._stops.find(self._state, piece, begin)
        if found is not None:
            self.ended = True
            return text[: found[self._include]]
        ready = len(text) - self._stops.depth[self._state]
        self._held = text[ready:]
        return text[:ready]


def _tokenizer(model: Model) -> Tokenizer:
    if not isinstance(model, Model):
        raise InputError(f"model must be what load_model gives, got {type(model).__name__}")
    if model.tokenizer is None:
        without = "from Python, token ids work without one"
        raise InputError(f"this checkpoint has no tokenizer.json: text needs a tokenizer ({without})")
    return model.tokenizer
