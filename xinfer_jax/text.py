"""Generates text from text: conversation → chat template → token ids → `generate` or `stream` → text."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, overload

import jax

from .checkpoint.loading import Model
from .checkpoint.model_defaults import end_ids, key_or_default, options_of_model
from .checks import is_sequence
from .errors import InputError, format_value
from .generation.entrypoints import generate
from .generation.executor_choice import Compilation
from .generation.options import GenerateOptions, GenerateOutput
from .generation.streaming import Stream, stream
from .grammar.grammars import with_tokenizer
from .sampling.sampling_config import min_tokens_of_row
from .tokenization.answer_detokenizer import AnswerDetokenizer
from .tokenization.conversation import MESSAGES_FORM, ChatOptions, prompt_ids
from .tokenization.tokenizer import Tokenizer

MAX_STOP_STRINGS = 64  # of one prompt
MAX_STOP_STRING_CHARS = 256
Conversation = Sequence[Mapping[str, Any]]  # messages, as in MESSAGES_FORM
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
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    r"""Encodes a prompt as token ids, with the checkpoint's chat template.

    `generate_text` starts from these ids. You need this function if you call functions of ids, for example
    `generate` or `score`. If a checkpoint has no chat template, a text is encoded as it is, with a warning.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> ids = xj.encode_prompt(model, "What is the capital of France?")
        >>> model.tokenizer.decode(ids, skip_special_tokens=False)[-22:]
        '<|im_start|>assistant\n'

    Args:
        model: a model from `load_model`.
        prompt: the user's text, or a conversation such as [{"role": "user", "content": "…"}].
        system: a system message that is put before the prompt. None adds none.
        raw: True encodes a text without the chat template.
        add_special_tokens: True adds the checkpoint's special tokens, for example BOS, around a text that is
            encoded without a chat template. It has no effect on other prompts.
        chat_template_kwargs: additional variables of the chat template, for example
            `{"enable_thinking": False}`.
        escape_control_tokens: True encodes control tokens that a conversation spells, such as `<|im_end|>`,
            as ordinary text. So no user can start a message of another role. False turns a spelled token into
            the token. Other texts are not affected, and raw texts and ids are never escaped.
        tools: functions that the answer may call, as the OpenAI API describes them: [{"type": "function",
            "function": {"name": …, "description": …, "parameters": a JSON Schema}}, …].
            `xj.tools.parse_tool_calls` finds the calls in an answer. A conversation may have earlier calls in
            `tool_calls` of the assistant's messages, and results in messages with the role "tool". None
            offers no tools.

    Returns:
        A list with at least one id. If the prompt has a chat template, the ids end with the start of the
        assistant's message.

    Raises:
        InputError: the model has no tokenizer.
        InputError: the prompt is empty, or a message has no role or no content.
        ContextLengthError: the text is too long for the context. Only its length is checked here, so a
            shorter text may still have too many ids.
        InputError: you gave a system message or a conversation with `raw`, or for a model without a chat
            template.
        InputError: you gave tools, and the chat template ignores them.
    """
    return prompt_ids(
        _tokenizer(model),
        prompt if isinstance(prompt, str) or not is_sequence(prompt) else list(prompt),
        model.config.context_length,
        ChatOptions(system, tools, chat_template_kwargs, escape_control_tokens),
        raw=raw,
        add_special_tokens=add_special_tokens,
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
    """Generates the answer to a prompt as a text, or the answers to a list of prompts as a list of texts.

    To print the text while it is generated, use `stream_text`. For token ids and log-probabilities, use
    `generate`.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> xj.generate_text(model, "What is the capital of France?")
        'The capital of France is Paris.'

    Args:
        model: a model from `load_model`.
        prompt: a text or a conversation, or a list of texts and conversations. A list of prompts is one
            batch, so all its rows are in memory at the same time. A list of messages is one conversation.
        options: the options of the call. None takes `GenerateOptions()`, which generates at most 128 tokens.
            If `options.sampling` is None, the answer follows the model's generation_config.json, like the
            commands.
        key: the PRNG key of sampling: one key (prompt i of a list then uses `fold_in(key, i)`), or one key
            per prompt. None takes `jax.random.key(0)`, like commands without --seed, so the same call gives
            the same texts.
        system: a system message that is put before each prompt. None adds none.
        raw: True encodes texts without the chat template.
        escape_control_tokens: True encodes control tokens that a conversation spells as ordinary text (see
            `encode_prompt`).

    Returns:
        The text of the answer, or a list with one text per prompt.

    Raises:
        InputError: `encode_prompt` or `generate` would raise it, the list of prompts is empty, or `options.n`
            is not 1.
    """
    options = _check_text_options(model, options)
    is_batch = is_sequence(prompt) and not _is_conversation(prompt)
    prompts = cast(Sequence[Prompt], prompt if is_batch else [prompt])
    if not len(prompts):
        raise InputError(f"no prompts: give at least one text, or messages {MESSAGES_FORM}")
    how: dict[str, Any] = dict(system=system, raw=raw, escape_control_tokens=escape_control_tokens)
    ids = []
    for i, one in enumerate(prompts):
        try:
            ids.append(encode_prompt(model, one, **how))
        except InputError as error:
            if not is_batch:
                raise
            raise InputError(f"prompt {i}: {error}") from error
    if options.stop_strings:
        texts = _generate_until_stop(model, ids, options, key)
    else:
        options = dataclasses.replace(options, grammar=with_tokenizer(options.grammar, _tokenizer(model)))
        out = generate(model.params, model.config, ids, options, key=key_or_default(key))
        texts = [_tokenizer(model).decode(out.text_ids(row)) for row in range(len(out.tokens))]
    return texts if is_batch else texts[0]


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
    """Streams the answer to one prompt as pieces of text, while it is generated.

    The pieces, joined, are the text that `generate_text` returns for the same arguments.

    Example:
        >>> import xinfer_jax as xj
        >>> model = xj.load_model()
        >>> for text in xj.stream_text(model, "What is the capital of France?"):
        ...     print(text, end="", flush=True)
        The capital of France is Paris.

    Args:
        model: a model from `load_model`.
        prompt: a text or a conversation.
        options: the options of the call. None takes `GenerateOptions()`, which generates at most 128 tokens.
            If `options.sampling` is None, the answer follows the model's generation_config.json.
        key: the PRNG key of sampling. None takes `jax.random.key(0)`.
        system: a system message that is put before the prompt. None adds none.
        raw: True encodes the text without the chat template.
        escape_control_tokens: True encodes control tokens that a conversation spells as ordinary text (see
            `encode_prompt`).

    Returns:
        A `TextStream`, an iterator over pieces of text. Its `output` has tokens and statistics at the end.

    Raises:
        InputError: `generate_text` would raise it, or you gave a list of prompts. The call raises it at once,
            before you iterate.
    """
    options = _check_text_options(model, options)
    if is_sequence(prompt) and len(prompt) and not _is_conversation(prompt):
        raise InputError(
            "stream_text takes one prompt, not a list: use generate_text, or stream of token ids"
        )
    how: dict[str, Any] = dict(system=system, raw=raw, escape_control_tokens=escape_control_tokens)
    return stream_text_from_ids(model, encode_prompt(model, prompt, **how), options, key=key)


def stream_text_from_ids(
    model: Model, ids: list[int], options: GenerateOptions, *, key: jax.Array | None = None
) -> "TextStream":
    """Runs `stream_text` for a prompt that is already encoded."""
    tokens = _stream_tokens(model, [ids], options, key)
    return TextStream(_detokenizer(model, options, 0), tokens)


class TextStream(Iterator[str]):
    """Iterates over the text of an answer while it is generated, in pieces of complete characters.

    `stream_text` returns it. The text ends before the first of `options.stop_strings`, even if this string
    spans several tokens. The tokens of `output` include the token that completed the stop string.
    """

    def __init__(self, detokenizer: AnswerDetokenizer, tokens: Stream):
        """Creates a stream of text.

        Args:
            detokenizer: converts the ids of the answer to text.
            tokens: a stream of one prompt's tokens.
        """
        self._detokenizer = detokenizer
        self._tokens = tokens

    def __next__(self) -> str:
        for (token,) in self._tokens:
            chunk = self._detokenizer.push(token)
            if self._detokenizer.ended:
                self.stop()
            if chunk:
                return chunk
        if rest := self._detokenizer.finish():
            return rest
        raise StopIteration

    def prepare(self) -> Compilation:
        """Begins to compile the programs of the answer in threads, and returns (see `Stream.prepare`)."""
        return self._tokens.prepare()

    def stop(self) -> None:
        """Ends the answer after the pieces that you took, with the finish_reason "abort"."""
        self._tokens.stop()
        self._detokenizer.ended = True

    @property
    def output(self) -> GenerateOutput:
        """The result of the call, as `generate` returns it.

        Raises:
            InputError: the stream has not ended.
        """
        out = self._tokens.output
        if (stop := self._detokenizer.stop_string) is not None:
            return dataclasses.replace(out, finish_reason=["stop"], stop_reason=[stop])
        return out


class TokenText(NamedTuple):
    """A token with its text and its probability, from `alternatives_text`.

    Attributes:
        id: the id of the token.
        text: the text of this token alone.
        probability: the probability of the token, 0 to 1, before any logits processor.
    """

    id: int
    text: str
    probability: float


def alternatives_text(model: Model, out: GenerateOutput, row: int = 0) -> list[list[TokenText]]:
    """Returns the generated tokens of an answer, each with its likely alternatives and their probabilities.

    Generate with `GenerateOptions(logprobs=k)` to get k alternatives per token.

    Args:
        model: the model that generated the answer. Its tokenizer converts ids to text.
        out: the result of `generate` with `logprobs` above 0.
        row: the index of the answer in `out`.

    Returns:
        A list of `TokenText` for each generated token. The token itself comes first, and its alternatives
        follow. Probabilities are before any logits processor.

    Raises:
        InputError: `out` has no alternatives, it has no such row, or the model has no tokenizer.
    """
    tokenizer = _tokenizer(model)
    if not isinstance(out, GenerateOutput) or out.alternatives is None:
        raise InputError("this output has no alternatives: generate with GenerateOptions(logprobs=…)")
    if not 0 <= row < len(out.alternatives):
        raise InputError(f"row {row!r} of an output of {len(out.alternatives)} rows")

    def decode(token: int, logprob: float) -> TokenText:
        return TokenText(token, tokenizer.token_text(token), math.exp(logprob))

    return [[decode(*pair) for pair in ((t.id, t.logprob), *t.top)] for t in out.alternatives[row]]


def _check_text_options(model: Model, options: GenerateOptions | None) -> GenerateOptions:
    """Returns the options, checked for the text functions, with the model's sampling settings if they have
    none.
    """
    options = options_of_model(model, options)
    if options.n != 1:
        several = "from Python, generate and the tokenizer give several"
        raise InputError(f"n={options.n}: the text functions give one answer; {several}")
    return dataclasses.replace(options, stop_strings=checked_stop_strings(options))


def checked_stop_strings(options: GenerateOptions) -> tuple[str, ...]:
    """Returns the stop strings of the options. Raises InputError for invalid ones."""
    stops = options.stop_strings
    if not is_sequence(stops) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InputError(
            f"stop_strings must be a list of texts that are not empty, got {format_value(stops)}"
        )
    if len(stops) > MAX_STOP_STRINGS or max(map(len, stops), default=0) > MAX_STOP_STRING_CHARS:
        raise InputError(
            f"stop_strings: {MAX_STOP_STRINGS} of at most {MAX_STOP_STRING_CHARS} characters may be given,"
            f" got {len(stops)}, the longest of {max(map(len, stops))}"
        )
    return tuple(stops)


def _stream_tokens(
    model: Model, prompts: list[list[int]], options: GenerateOptions, key: jax.Array | None
) -> Stream:
    """Streams the answers' ids, without stop strings: `AnswerDetokenizer` handles them. A grammar without a
    tokenizer has the model's.
    """
    grammar = with_tokenizer(options.grammar, _tokenizer(model))
    options = dataclasses.replace(options, stop_strings=(), grammar=grammar)
    return stream(model.params, model.config, prompts, options, key=key_or_default(key))


def _is_conversation(prompt: Any) -> bool:
    return is_sequence(prompt) and len(prompt) > 0 and all(isinstance(message, Mapping) for message in prompt)


def _generate_until_stop(
    model: Model, prompts: list[list[int]], options: GenerateOptions, key: jax.Array | None
) -> list[str]:
    """Returns the answers up to their first stop strings. The batch runs until every row has one, or has
    ended.
    """
    tokens = _stream_tokens(model, prompts, options, key)  # checks the options
    answers = [_detokenizer(model, options, row) for row in range(len(prompts))]
    texts = [""] * len(prompts)
    for ids in tokens:
        texts = [text + answer.push(i) for text, answer, i in zip(texts, answers, ids, strict=True)]
        if all(answer.ended or i is None for answer, i in zip(answers, ids, strict=True)):
            tokens.stop()
    return [text + answer.finish() for text, answer in zip(texts, answers, strict=True)]


def _detokenizer(model: Model, options: GenerateOptions, row: int) -> AnswerDetokenizer:
    return AnswerDetokenizer(
        _tokenizer(model),
        options.stop_strings,
        min_tokens=min_tokens_of_row(options.sampling, row),
        end_ids=end_ids(model, options),
    )


def _tokenizer(model: Model) -> Tokenizer:
    if not isinstance(model, Model):
        raise InputError(f"model must be what load_model gives, got {type(model).__name__}")
    if model.tokenizer is None:
        raise InputError(
            "this model has no tokenizer (its checkpoint no tokenizer.json), and text needs one: from Python,"
            " token ids work without"
        )
    return model.tokenizer
