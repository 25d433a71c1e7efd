"""The amount of prefill and of decoding in one step of an engine: plain Python, without arrays."""

from collections.abc import Sequence

from .scheduler import Scheduler

MAX_DECODE_TOKENS = 128  # of a row in one call of `Device.decode`
# Seconds of decoding in one step, about. New requests, cancels and deadlines wait for the end of a step.
_LIVE_SECONDS = 0.1  # a caller may stream the answer, and more requests may come
_BUSY_SECONDS = 0.01  # the same, while other rows wait or prefill
_LONGEST_SECONDS = 1.0  # no caller streams
_FIRST_STEPS = 8  # decode steps of the first step, before their time is known
_MAX_PREFILL_STEPS = 32  # consecutive steps without decoding, if no caller streams


class Pacing:
    """Decides how long a step prefills and decodes.

    Args:
        chunk: tokens of a full chunk.
    """

    def __init__(self, chunk: int):
        self._chunk = chunk
        self.step_seconds = 0.0  # of the last decode steps, each; 0 before the first
        self._prefill_steps = 0  # since the last step that decoded

    def may_prefill(self, width: int) -> bool:
        """Returns True if a step that prefilled `width` tokens, padding included, may prefill more."""
        return width < self._chunk

    def skips_decoding(self, width: int, live: bool) -> bool:
        """Returns True if a step that prefilled `width` tokens ends without decoding. If no caller streams,
        free slots are filled first, for a limited number of steps. Call it once in each step.
        """
        skips = width >= self._chunk and not live and self._prefill_steps < _MAX_PREFILL_STEPS
        self._prefill_steps = self._prefill_steps + 1 if skips else 0
        return skips

    def decode_call(
        self,
        scheduler: Scheduler,
        left: Sequence[int],
        has_new_requests: bool,
        live: bool,
        most_steps: int = MAX_DECODE_TOKENS,
    ) -> tuple[int, bool]:
        """Returns the largest number of steps that the running rows decode, within a limited time, and True
        if they stop when a row ends because others wait.

        Args:
            scheduler: the scheduler of the engine.
            left: the number of tokens that each running row may still sample.
            has_new_requests: True: there are requests that the scheduler does not have yet.
            live: True: a caller may stream one of the rows.
            most_steps: the most steps of a call.
        """
        others = scheduler.has_waiting or len(scheduler.rows_with_slots) > len(scheduler.running)
        until_one_ends = others or has_new_requests
        most = min(left) if until_one_ends else max(left)
        steps = min(most, most_steps, self._affordable_steps(others, live))
        return steps, until_one_ends

    def record_decode(self, seconds: float, steps: int) -> None:
        """Records that a call of `steps` decode steps took this number of seconds."""
        self.step_seconds = seconds / max(1, steps)

    def _affordable_steps(self, others: bool, live: bool) -> int:
        """Returns the number of decode steps in the time of one step. others: True: rows wait or prefill."""
        if not self.step_seconds:
            return _FIRST_STEPS
        seconds = _LONGEST_SECONDS
        if live:
            seconds = _BUSY_SECONDS if others else _LIVE_SECONDS
        return max(1, int(seconds / self.step_seconds))
