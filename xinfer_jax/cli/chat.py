"""What `xinfer-jax-chat` does once its flags are read: questions in, answers out, on a cache that is kept."""

import dataclasses
import sys
from contextlib import suppress
from typing import Any

import jax

from ..cache.prefix import Prefix
from ..errors import InputError
from ..generation.options import GenerateOptions, GenerateOutput
from ..sampling.choice import seeded
from ..sampling.settings import SamplingConfig
from ..stats import GenerateStats
from ..text import encode_prompt, stream_answer
from .process import told_first
from .startup import from_the_first, keep_compiled_programs, open_model, read_and_compile
from .terminal import status, write

_LONGEST = 2**20  # characters of what is said at a time
_COMMANDS = "there are /exit, /reset and /stats"


def talk(flags: Any) -> int:
    """Answers what standard input asks until it ends; the exit code.

    Args:
        flags: the values that chat_flags.py defines.
    """
    keep_compiled_programs("xinfer-jax-chat", flags.compilation_cache)
    conversation = Conversation(flags)
    figures = flags.stats
    while (said := _ask()) and said != "/exit":
        if said == "/stats":
            figures = not figures
        elif said == "/reset":
            conversation.reset()
        elif said.startswith("/"):
            write(f"{said}: {_COMMANDS}\n")
        else:
            try:
                cost = conversation.answer(said)
            except InputError as error:  # of this question; the next may do
                status.say(f"xinfer-jax-chat: {error}")
            else:
                write(cost if figures else "")
    return 0


def _ask() -> str:
    """What is said next; nothing at the end of the input."""
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        write("> ")
    try:
        said = sys.stdin.readline(_LONGEST + 1)
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not {error.encoding} text: {error.reason}") from error
    if len(said) > _LONGEST:
        raise InputError(f"a line of standard input has more than {_LONGEST} characters: give shorter ones")
    return said.strip()


class Conversation:
    """Turns, and the cache that holds them."""

    def __init__(self, flags: Any):
        checkpoint = open_model(flags.model, flags)
        self._model = checkpoint.model
        sampling = SamplingConfig.from_hf(self._model.generation_config)
        if flags.temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=flags.temperature)
        new = flags.max_tokens
        capacity = min(flags.capacity or 4096, self._model.config.context_length)
        if capacity <= new:
            where = f"a capacity of {capacity}"
            raise InputError(f"--max_tokens={new} leaves no room for a question in {where}: lower it")
        self._capacity = capacity
        self._options = GenerateOptions(new, sampling.validate(), capacity=capacity, keep_prefix=True)
        self._key = seeded(flags.seed)
        self._escape = flags.escape_control_tokens
        self._system = [] if flags.system is None else [{"role": "system", "content": flags.system}]
        self.reset()
        (self._model,) = read_and_compile(self._prepare, checkpoint)

    def _prepare(self) -> None:
        """Begins to compile for a short question, as most first ones are."""
        with suppress(InputError):  # which concerns that one
            _, ids = self._fitting([{"role": "user", "content": "?"}])
            stream_answer(self._model, ids, self._options, key=self._key).prepare()

    def reset(self) -> None:
        self._turns: list[dict[str, str]] = []
        self._prefix: Prefix | None = None

    def answer(self, said: str) -> str:
        """Prints the answer to what is said and notes both; a line about its cost.

        Raises:
            InputError: it cannot be answered; then nothing is noted.
        """
        turns, ids = self._fitting([*self._turns, {"role": "user", "content": said}])
        if left_out := (len(self._turns) + 1 - len(turns)) // 2:
            fate = f"no longer fit in {self._capacity} tokens and are forgotten"
            write(f"[{left_out} of the earliest exchanges {fate}]\n")
        self._key, now = jax.random.split(self._key)
        text, out = self._stream(ids, now)
        self._turns = [*turns, {"role": "assistant", "content": text}]
        self._prefix = out.prefix
        return _cost(out.stats, out.finish_reason[0])

    def _fitting(self, turns: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int]]:
        """The turns, without the earliest where they leave no room for an answer, and their ids."""
        for first in range(0, len(turns), 2):
            talk = self._system + turns[first:]
            ids = encode_prompt(self._model, talk, escape_control_tokens=self._escape)
            if len(ids) + self._options.max_new_tokens <= self._capacity:
                return turns[first:], ids
        room = f"{self._capacity} tokens of room; see --capacity"
        raise InputError(f"too long: a question of {len(ids)} tokens and its answer have {room}")

    def _stream(self, ids: list[int], key: jax.Array) -> tuple[str, GenerateOutput]:
        """Prints the answer as it comes; Ctrl-C ends it, and what was said until then counts."""
        options = dataclasses.replace(self._options, prefix=self._prefix)
        text = ""
        with told_first() as interrupted:
            answer = stream_answer(self._model, ids, options, key=key)
            for piece in from_the_first(answer):
                write(piece)
                text += piece
                if interrupted.is_set():
                    answer.stop()
        write("\n")
        return text, answer.output


def _cost(s: GenerateStats, reason: str) -> str:
    new = s.prompt_tokens - s.reused_tokens
    milliseconds = 1e3 * s.prefill_seconds
    read = f"{new} of {s.prompt_tokens} tokens read in {milliseconds:.0f} ms"
    written = f"{s.generated_tokens} written at {s.decode_tokens_per_second:.1f} tok/s"
    return f"[{read}, {written}, {reason}]\n"
