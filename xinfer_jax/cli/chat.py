"""The work of `xinfer-jax-chat` after its flags: a conversation that reuses its KV cache."""

import dataclasses
import sys
from contextlib import suppress
from typing import Any

import jax

from ..cache.prefix import Prefix
from ..errors import ContextLengthError, InputError
from ..generation.options import GenerateOptions, GenerateOutput
from ..sampling.random_keys import key_from_seed
from ..stats import GenerateStats
from ..text import encode_prompt, stream_text_from_ids
from ..tokenization.conversation import harmony_header
from ..tool_calls.answer_parser import AnswerParser
from .answer import grammar_from_flags, sampling_from_flags, with_adapter_files
from .process import capture_signals
from .startup import chunks_with_status, load_and_compile, open_draft, open_model, use_compilation_cache
from .terminal import read_line, status, write

_MAX_LINE = 2**20  # characters
_COMMANDS = "there are /exit, /reset and /stats"


def chat_loop(command: str, flags: Any) -> int:
    """Answers the lines of standard input until it ends. Returns the exit code. command: the name of the
    command, for log lines.
    """
    use_compilation_cache(command, flags.compilation_cache)
    conversation = Conversation(flags)
    show_stats = flags.stats
    while (line := _next_line()) and line != "/exit":
        if line == "/stats":
            show_stats = not show_stats
        elif line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            write(f"{line}: {_COMMANDS}\n")
        else:
            try:
                stats = conversation.answer(line)
            except InputError as error:  # of this question; the next one may work
                status.log(f"{command}: {error}")
            else:
                write(stats if show_stats else "")
    return 0


def _next_line() -> str:
    """Returns the next line of standard input, or "" at its end."""
    if sys.stdin is None:
        return ""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            line = read_line("> ")
        else:
            write("> " if sys.stdin.isatty() else "")
            line = sys.stdin.readline(_MAX_LINE + 1)
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not {error.encoding} text: {error.reason}") from error
    if len(line) > _MAX_LINE:
        raise InputError(f"a line of standard input has more than {_MAX_LINE} characters: give shorter ones")
    return line.strip()


class Conversation:
    """The messages of a chat, and the prefix with their keys and values."""

    def __init__(self, flags: Any):
        checkpoint = with_adapter_files(open_model(flags.model, flags), flags.adapter)
        self._model = checkpoint.model
        draft, of_draft = open_draft(flags, self._model)
        sampling = sampling_from_flags(flags, self._model)
        new = flags.max_tokens
        capacity = min(flags.capacity or 4096, self._model.config.context_length)
        if capacity <= new:
            raise InputError(
                f"--max_tokens={new} leaves no tokens for a question in a capacity of {capacity}: lower it"
            )
        self._capacity = capacity
        grammar = grammar_from_flags(flags)
        drafting: dict[str, Any] = dict(draft=draft, draft_tokens=flags.draft_tokens)
        self._options = GenerateOptions(
            max_tokens=new,
            sampling=sampling,
            capacity=capacity,
            keep_prefix=True,
            grammar=grammar,
            **drafting,
        )
        self._key = key_from_seed(flags.seed)
        self._escape = flags.escape_control_tokens
        self._system = [] if flags.system is None else [{"role": "system", "content": flags.system}]
        self.reset()
        self._model, *drafts = load_and_compile(self._prepare, checkpoint, *of_draft)
        if drafts:
            self._options = dataclasses.replace(self._options, draft=drafts[0])

    def _prepare(self) -> None:
        """Starts to compile for a short question, as most first questions are."""
        with suppress(InputError):  # it concerns only this short question
            _, ids = self._fit_to_capacity([{"role": "user", "content": "?"}])
            stream_text_from_ids(self._model, ids, self._options, key=self._key).prepare()

    def reset(self) -> None:
        self._turns: list[dict[str, str]] = []
        self._prefix: Prefix | None = None

    def answer(self, question: str) -> str:
        """Prints the answer to a question. Returns a line of statistics. After an error the chat is as it
        was.
        """
        turns, ids = self._fit_to_capacity([*self._turns, {"role": "user", "content": question}])
        if left_out := (len(self._turns) + 1 - len(turns)) // 2:
            write(f"[dropped the {left_out} earliest exchanges: the chat exceeds {self._capacity} tokens]\n")
        self._key, answer_key = jax.random.split(self._key)
        text, out = self._stream(ids, answer_key)
        header = harmony_header(self._model.tokenizer, ids)
        if header is not None and self._model.tokenizer is not None:
            marked = self._model.tokenizer.decode_marked(out.text_ids(0))
            text = AnswerParser([], harmony_header=header).parse(marked).content or ""
        self._turns = [*turns, {"role": "assistant", "content": text}]
        self._prefix = out.prefix
        return _format_stats(out.stats, out.finish_reason[0])

    def _fit_to_capacity(self, turns: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int]]:
        """Returns the turns and their ids. The earliest turns are left out if an answer would not fit."""
        for first in range(0, len(turns), 2):
            messages = self._system + turns[first:]
            ids = encode_prompt(self._model, messages, escape_control_tokens=self._escape)
            if len(ids) + self._options.max_tokens <= self._capacity:
                return turns[first:], ids
        raise ContextLengthError(
            f"a question of {len(ids)} tokens and its answer exceed {self._capacity} tokens: see --capacity"
        )

    def _stream(self, ids: list[int], key: jax.Array) -> tuple[str, GenerateOutput]:
        """Prints the answer while it is generated. Ctrl-C ends it, and the text until then stays in the
        chat.
        """
        options = dataclasses.replace(self._options, prefix=self._prefix)
        text = ""
        with capture_signals() as interrupted:
            answer = stream_text_from_ids(self._model, ids, options, key=key)
            for chunk in chunks_with_status(answer):
                write(chunk)
                text += chunk
                if interrupted.is_set():
                    answer.stop()
        write("\n")
        return text, answer.output


def _format_stats(s: GenerateStats, reason: str) -> str:
    new = s.prompt_tokens - s.reused_tokens
    milliseconds = 1e3 * s.prefill_seconds
    prefill = f"prefilled {new} of {s.prompt_tokens} tokens in {milliseconds:.0f} ms"
    decode = f"generated {s.generated_tokens} at {s.decode_tokens_per_second:.1f} tok/s"
    drafts = f", {100 * s.acceptance[0]:.0f}% of draft tokens accepted" if s.acceptance else ""
    return f"[{prefill}, {decode}{drafts}, {reason}]\n"
