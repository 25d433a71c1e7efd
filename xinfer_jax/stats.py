"""The cost of a call of `generate`: seconds, bytes, rates, and how they are measured."""

import ctypes
import dataclasses
import threading
import time

import jax

from .memory_plan import MemoryPlan
from .registry import plugin


@dataclasses.dataclass
class GenerateStats:
    """The cost of a call of `generate` or `stream` in time, tokens and memory.

    Only `compile_seconds` and `total_seconds` include compilation. All times are in seconds.

    Attributes:
        rows: the number of prompts times answers.
        prompt_tokens: the tokens of all prompts together.
        weight_bytes: the bytes of the parameter tree.
        cache_bytes: the bytes of the KV cache, filled or not.
        reused_tokens: prompt tokens whose keys and values came from a prefix cache.
        generated_tokens: the tokens of all answers together, EOS tokens included.
        compile_seconds: the time that the call waited for tracing, lowering and compiling, or for programs
            from the compilation cache.
        prefill_seconds: the time of prefill.
        ttft_seconds: the time to the first token of every row (TTFT), after the arguments were validated.
        decode_seconds: the time of everything after the first token.
        decode_steps: the tokens of the longest row after its first one. Without draft tokens it is the number
            of forward passes.
        total_seconds: the time of the whole call after its arguments were validated, compilation included.
        acceptance: the acceptance rate of each row's draft tokens. None: the call had no draft tokens.
        drafted: for each row, the number of draft tokens at each place of a pass. None: the call had no draft
            tokens.
        accepted: for each row, the number of accepted draft tokens at each place of a pass: the first number
            counts first draft tokens. None: the call had no draft tokens.
        passes: the number of forward passes of the model for each row. None: the call had no draft tokens.
        peak_bytes: the peak memory in bytes: of the process on a CPU, and of the device elsewhere.
        memory: the planned bytes. None: a request to an engine, because the engine itself has the plan in its
            `memory`.
    """

    rows: int
    prompt_tokens: int
    weight_bytes: int
    cache_bytes: int
    reused_tokens: int = 0
    generated_tokens: int = 0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    ttft_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    total_seconds: float = 0.0
    acceptance: list[float] | None = None
    drafted: list[list[int]] | None = None
    accepted: list[list[int]] | None = None
    passes: list[int] | None = None
    peak_bytes: int = 0
    memory: MemoryPlan | None = None

    @property
    def decode_tokens(self) -> int:
        """The number of tokens from decode steps. Prefill returns the first token of each row."""
        return max(0, self.generated_tokens - self.rows)

    @property
    def prefill_tokens_per_second(self) -> float:
        """The prompt tokens that were computed per second of prefill."""
        prefilled = self.prompt_tokens - self.reused_tokens
        return prefilled / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """The tokens from decode steps per second, all rows together."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tpot_seconds(self) -> float:
        """The time per output token (TPOT), which is the time of one decode step in seconds."""
        return self.decode_seconds / self.decode_steps if self.decode_steps else 0.0

    def count(self, *watches: "Stopwatch") -> None:
        """Adds the times of the watches to `compile_seconds` and `total_seconds`."""
        self.compile_seconds += sum(watch.compile_seconds for watch in watches)
        self.total_seconds += sum(watch.seconds + watch.compile_seconds for watch in watches)


class Stopwatch:
    """Measures wall time, and separately the seconds that this thread compiled: `with Stopwatch() as w: ...`
    sets `w.seconds` and `w.compile_seconds`, and releases the memory that compiling freed.
    """

    def __enter__(self) -> "Stopwatch":
        self._spans: list[tuple[float, float]] = []
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        wall = time.perf_counter() - self._start
        jax.monitoring.unregister_event_duration_listener(self._listen)
        self.compile_seconds = min(wall, self._covered())
        self.seconds = wall - self.compile_seconds
        if self.compile_seconds:
            release_free_memory()

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/") and threading.get_ident() == self._thread:
            now = time.perf_counter()
            self._spans.append((max(now - duration_secs, self._start), now))

    def _covered(self) -> float:
        """Returns the length of the union of the spans: an inner function's trace is inside its caller's."""
        total = 0.0
        end = 0.0
        for first, last in sorted(self._spans):
            total += max(0.0, last - max(first, end))
            end = max(end, last)
        return total


def release_free_memory() -> None:
    """Makes glibc return its free pages to the system: compiling leaves 100 MiB or more of them."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def peak_bytes() -> int:
    """Returns peak memory so far: of the device, or of the process if the device has no counter (CPU)."""
    of_device = plugin("device", "peak bytes")
    return of_device() if of_device else 0
