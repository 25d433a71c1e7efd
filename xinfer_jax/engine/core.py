"""`EngineCore`: one step of an engine is to prefill a chunk and to decode several steps (vLLM: EngineCore).

scheduler ─ actions ─► device ─ SampledTokens ─► answers; then the scheduler records what was done
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..cache.page_size import PAGE_SIZE
from ..errors import InputError
from ..generation.state import SampledTokens
from ..grammar.matcher import Matcher
from ..sampling.context import ALL_BITS
from ..sampling.logprobs import TokenLogprobs, token_logprob_rows
from ..weights.params_like import is_deleted
from .answers import Answer
from .controller import Leader
from .draft_pacing import DraftPacing, DraftResult
from .engine_device import Device, NewRow, draft_stage
from .pacing import Pacing
from .page_files import PageFiles
from .page_tiers import PageTiers
from .requests import Request
from .row import PLAIN, Action, LoadPages, PrefillChunk, Restore, Row, Swap
from .scheduler import Scheduler
from .shape import EngineShape
from .statistics import EngineCounters
from .weight_switch import WeightSwitch

_POLL_SECONDS = 0.01  # while no row can run, as programs are being compiled
_FILE_POLL_SECONDS = 0.001  # the same, as files are read
_MASK_SECONDS = 0.005  # that rows wait for the mask of another one


class EngineCore:
    """Executes the decisions of the scheduler. One thread at a time may call it.

    Args:
        device: the `Device` of this process, or the `Leader` of all processes.
        notify: is called with requests that have new tokens, or have ended.
        is_ready: returns True if the programs of these stages (of `Device.stages`) are compiled.
        files: the files for pages. None: there are none.
        adapter_paths: the paths of the matrices that adapters may change.

    Attributes:
        answers: the answers that have not ended, by their rows.
        weights: the part that replaces parameters and adapters.
    """

    def __init__(
        self,
        device: Device | Leader,
        scheduler: Scheduler,
        shape: EngineShape,
        counters: EngineCounters,
        notify: Callable[[Collection[Request]], None],
        is_ready: Callable[[frozenset[str]], bool],
        files: PageFiles | None = None,
        adapter_paths: Sequence[str] = (),
    ):
        self.device: Any = device
        self.scheduler = scheduler
        self.tiers = PageTiers(device, scheduler, files)
        self._counters = counters
        self._notify = notify
        self.shape = shape
        self._is_ready = is_ready
        self.answers: dict[Row, Answer] = {}
        self.weights = WeightSwitch(self, adapter_paths)
        self._held: dict[Answer, frozenset[str]] = {}  # of these, that wait for their stages, or for masks
        # Of preempted rows: the state (None: it has none yet), and the pages.
        self._swapped: dict[Answer, Any] = {}
        # Of rows that compute their keys anew: the state, with the old recurrent states.
        self._restarted: dict[Answer, Any] = {}
        self._firsts: dict[int, Answer] = {}  # of slots: prefilled, without a first token
        self._holds = False  # no answer starts
        self._pacing = Pacing(shape.chunk)
        self._draft_pacing = DraftPacing(shape.draft_widths)

    def add(self, answers: Iterable[Answer]) -> None:
        """Queues answers. `step` submits them to the scheduler once their programs are compiled."""
        for answer in answers:
            answer.row.resalt(self.tiers.salt)
            if answer.row.num_computed:  # another engine prefilled it, maybe before the last switch
                answer.record_version(self.weights.version)
            self.answers[answer.row] = answer
            self._held[answer] = self._stages(answer)
            if isinstance(answer.matcher, Matcher) and not answer.tokens:
                answer.matcher.start()

    def close(self, works: bool) -> None:
        """Ends the pages in files. works: the engine did not fail."""
        self.tiers.close(works)

    def release_cache(self) -> None:
        """Preempts all rows, and frees the device memory of the pages, until `Device.restore_cache`."""
        self._execute(self.scheduler.preempt_all())
        self.device.release_cache()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def abort(self, requests: Sequence[Request], reason: str) -> None:
        """Ends requests in any state. reason: their `ended_by`."""
        for request in requests:
            self._end_all(request, reason)
        self._notify(requests)

    def hold(self, holds: bool) -> None:
        """Holds back new answers: no answer starts until `hold(False)` is called."""
        self._holds = holds
        for answer in self.answers.values() if holds else ():
            if not answer.has_begun and answer not in self._held:
                self.scheduler.withdraw(answer.row)
                self._held[answer] = self._stages(answer)

    @property
    def is_drained(self) -> bool:
        """Returns True if all answers that had started when `hold` was called have ended."""
        return not any(answer.has_begun for answer in list(self.answers.values()))

    def restart(self, answer: Answer) -> None:
        """Lets a row compute its keys again. Then it continues from the token that it sampled last."""
        row = answer.row
        if row.is_prefilled:
            state, *_ = self._swapped.get(answer) or (self.device.get_row(row.slot),)
            self._restarted[answer] = state
        elif row.logprobs_from is not None:  # they are computed again
            answer.request.prompt_logprobs.clear()
        self._swapped.pop(answer, None)
        self.scheduler.restart(row, answer.ids_with_keys)

    def step(self, has_new_requests: Callable[[], bool]) -> bool:
        """Prefills at most one full chunk, or as many tokens in pages, and decodes. Returns True if there was
        anything to do. If the parameters were donated or deleted, all requests fail, and later ones too until
        `WeightSwitch.switch`.
        """
        if self.answers and not self._fail_without_params():
            try:
                return self._step(has_new_requests)
            except Exception:  # they were donated within the step; later ones go on if the pages are whole
                if not self._fail_without_params() or is_deleted(self.device.pools):
                    raise
        return self._step(has_new_requests)

    def _step(self, has_new_requests: Callable[[], bool]) -> bool:
        if self._held:
            ready = {stages for stages in {*self._held.values()} if self._is_ready(stages)}
            held = [answer for answer, stages in self._held.items() if stages in ready]
            held = [answer for answer in held if answer.has_begun or not self._holds]
            for answer in filter(_has_masks, held):
                del self._held[answer]
                self.scheduler.submit(answer.row)
        self.tiers.step()
        busy = False
        width = 0
        now = time.monotonic()
        while self._pacing.may_prefill(width) and (actions := self.scheduler.schedule(now)):
            busy = True
            self._execute(actions)
            width += sum(action.width for action in actions if isinstance(action, PrefillChunk | LoadPages))
        if not self._pacing.skips_decoding(width, self._is_live):
            self.sample_firsts()
            if self.scheduler.running:
                busy = True
                self._decode(has_new_requests)
        if not busy and (self._held or self.tiers.is_busy):
            time.sleep(_POLL_SECONDS if self._held else _FILE_POLL_SECONDS)
            return True
        return busy

    @property
    def _is_live(self) -> bool:
        """Returns True if a caller may stream a running row, and other requests may come meanwhile."""
        return any(self.answers[row].request.request_options.live for row in self.scheduler.running)

    def _stages(self, answer: Answer) -> frozenset[str]:
        """Returns the stages of `Device.stages` that an answer needs in addition to the first."""
        call = answer.request.call
        needed = {
            "sampled": not call.greedy,
            "processed": answer.request.recorded > 0,
            "logprobs": call.options.logprobs > 0,
            "support": answer.request.request_options.return_support,
            "chunk": len(answer.row.ids) > self.shape.chunk and answer.row.logprobs_from is None,
            "prompt_logprobs": answer.row.logprobs_from is not None,
            "routed_experts": answer.request.request_options.return_routed_experts,
            # Copies of pages, which no decoding row waits for, and the pages of an answer.
            "rare": self.scheduler.host is not None or self._shares_head_pages(answer),
        }
        return frozenset(name for name, needs in needed.items() if needs)

    def _shares_head_pages(self, answer: Answer) -> bool:
        """Returns True if other rows may share pages of this answer that a draft head has written too."""
        return self.shape.num_head_pools > 0 and answer.row.share_answers

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if not isinstance(action, PrefillChunk | Swap | Restore):
                self.tiers.execute(action)
                continue
            if isinstance(action, Swap):
                self.sample_firsts()
            answer = self.answers.get(action.row)
            if answer is None:  # it ended with its first token
                continue
            if isinstance(action, PrefillChunk):
                self._prefill(action, answer)
            elif isinstance(action, Restore):
                self.device.load_state(action.slot, action.snapshot, action.on_host)
            elif action.out:
                self._swap_out(action, answer)
            else:
                self._swap_in(action, answer)

    def _swap_out(self, swap: Swap, answer: Answer) -> None:
        has_state = answer.row.is_prefilled or self.shape.state_bytes
        row = self.device.get_row(swap.slot, True) if has_state else None
        self._swapped[answer] = row, self.device.copy_pages_out(swap.pages)

    def _swap_in(self, swap: Swap, answer: Answer) -> None:
        row, pages = self._swapped.pop(answer)
        self.device.copy_pages_in(swap.pages, pages)
        if row is not None:
            self.device.set_row(swap.slot, row)

    def _prefill(self, chunk: PrefillChunk, answer: Answer) -> None:
        row = chunk.row
        request = answer.request
        request.times.setdefault("prefill", time.monotonic())
        answer.record_version(self.weights.version)
        outputs, targets, alternatives = self.prefill_chunk(chunk, row.slot)
        if row.logprobs_from is not None:
            logprobs_1T = np.asarray(alternatives.processed_logprobs_BT)
            count_1 = np.array([len(targets)])
            top = request.request_options.prompt_logprobs
            (tokens,) = token_logprob_rows(alternatives, np.array([targets]), logprobs_1T, count_1, top)
            request.prompt_logprobs.extend(tokens[max(0, row.logprobs_from - chunk.start - 1) :])
        self._counters.prefill_tokens += chunk.count
        if taken := self.scheduler.record_prefill(chunk):
            if taken.saved:
                self.tiers.execute(taken.saved)
            self.device.save_state(row.slot, taken.snapshot)
        if chunk.is_last and answer in self._restarted:
            self.device.set_row(row.slot, self._restarted.pop(answer), False)
        elif chunk.is_last:
            slot: Any = row.slot
            self.device.put_first(slot, outputs)
            self._firsts[slot] = answer

    def prefill_chunk(self, chunk: PrefillChunk, slot: Any) -> tuple[Any, Sequence[int], Any]:
        """Prefills a chunk into a slot. Returns the outputs of its last token, for the last chunk of a
        prompt, then the tokens whose `Alternatives` are asked for, and these alternatives.
        """
        row = chunk.row
        end = chunk.start + chunk.count
        args = slot, row.pages, row.ids[chunk.start : end], chunk.start, row.longest
        variant = row.variant
        outputs = None
        if row.logprobs_from is None:
            return self.device.prefill(*args, chunk.is_full, True, variant), (), None
        if chunk.is_last:
            outputs = self.device.prefill(*args, chunk.is_full, False, variant)
        targets = row.ids[chunk.start + 1 : end + 1]
        # It writes the pages last, so they have this program's bits.
        return outputs, targets, self.device.prefill_with_logprobs(*args, targets, variant)

    def lend_pages(self, row: Row) -> None:
        """Gives a row that needs no slot pages for all of its tokens. Other rows are preempted for them."""
        self._execute(self.scheduler.lend_pages(row, row.longest))

    def sample_firsts(self) -> None:
        """Samples the first tokens of the rows that were prefilled since the last time, which decode from now
        on: together, since that takes as long as a step of all slots.
        """
        firsts, self._firsts = self._firsts, {}
        masks = self._masks([answer for answer in firsts.values() if answer.row in self.answers])
        firsts = {slot: answer for slot, answer in firsts.items() if answer.row in self.answers}
        if not firsts:
            return
        new = {slot: _new_row(answer, masks) for slot, answer in firsts.items()}
        together = len(new) > 1 and self._is_ready(frozenset({"several"}))
        out = jax.device_get(self.device.sample_first(new, together, *_sampling_of(firsts)))
        now = time.monotonic()
        for answer in firsts.values():
            request = answer.request
            request.times.setdefault("first", now)
            if len(firsts) == 1 and answer is request.answers[0]:
                seconds = now - request.times["prefill"]
                self.tiers.note_prefill(len(request.ids) - answer.row.hits, seconds)
        self._append_all(firsts, out)

    def _decode(self, has_new_requests: Callable[[], bool]) -> None:
        """Decodes the running rows for a limited time or, while others wait, until a row ends. A row whose
        masks are not computed yet does not take part.
        """
        scheduler = self.scheduler
        started = time.perf_counter()
        masked = bool(_with_masks(self.answers[row] for row in scheduler.running))
        num_running = len(scheduler.running)
        choice = self._draft_pacing.choose(num_running, masked, self._is_width_ready)
        width = choice.width
        late = self._late_rows(width)
        in_time = [self.answers[row] for row in scheduler.running if row not in late]
        masks = self._masks(in_time)
        running = [answer for answer in in_time if answer.row in self.answers]
        if not running:  # all are late, or have failed
            return
        left = [answer.request.call.options.max_tokens - len(answer.tokens) for answer in running]
        most_steps = self.shape.most_steps(width)
        if choice.most_steps is not None:
            most_steps = min(most_steps, choice.most_steps)
        waiting = has_new_requests(), self._is_live
        steps, until_one_ends = self._pacing.decode_call(scheduler, left, *waiting, most_steps)
        steps = steps if masks is None and not late else 1
        self._execute(scheduler.reserve_pages(steps * (1 + width), self.shape.extra_slots))
        rows: dict[Any, Row] = {row.slot: row for row in scheduler.running if row not in late}
        answers = {slot: self.answers[row] for slot, row in rows.items()}
        pages = {slot: row.pages for slot, row in rows.items()}
        read_seconds = self._read_unread(pages, width, steps)
        began = time.perf_counter()
        variants = {slot: row.variant for slot, row in rows.items() if row.variant != PLAIN}
        call = pages, steps, until_one_ends, *_sampling_of(answers), masks, variants, width
        out = jax.device_get(self.device.decode(*call))
        seconds = time.perf_counter() - began
        passes_B = out.count_B if out.passes_B is None else out.passes_B
        self._pacing.record_decode(seconds, int(passes_B.max()))
        if out.accepted_BT is not None:
            if masked:  # drafting and waiting for masks took time too
                seconds = time.perf_counter() - started - read_seconds
            result = _draft_result(out, [*answers], width, (seconds, read_seconds))
            self._draft_pacing.record(choice, num_running, masked, result)
        for slot, answer in answers.items():
            scheduler.record_decode(answer.row, int(out.count_B[slot]))
            if out.accepted_BT is not None:
                counts = int(passes_B[slot]), out.accepted_BT[slot].tolist()
                answer.count_passes(*counts)
                self._counters.count_passes(*counts)
        self._append_all(answers, out)

    def _is_width_ready(self, width: int) -> bool:
        """Returns True if steps with this number of draft tokens are compiled. Else it begins to compile."""
        return self._is_ready(frozenset({draft_stage(width)}))

    def _read_unread(self, pages: dict[Any, list[int]], width: int, steps: int) -> float:
        """Lets a draft head read what a call of `Device.decode` needs. Returns the seconds that it took."""
        began = time.perf_counter()
        has_read = self.shape.head_waits and self.device.read_unread(pages, width, steps)
        return time.perf_counter() - began if has_read else 0.0

    def _late_rows(self, width: int) -> set[Row]:
        """Returns the running rows whose masks are not computed yet. The others wait a moment for rows whose
        last mask came soon. width: the draft tokens of the next step.
        """
        if not _with_masks(self.answers[row] for row in self.scheduler.running):
            return set()
        if width:  # a draft head writes to pages
            self._execute(self.scheduler.reserve_pages(1 + width, self.shape.extra_slots))
        running = self.scheduler.running  # the others were preempted
        constrained = _with_masks(self.answers[row] for row in running)
        if not constrained:
            return set()
        draft_BT = None
        if width:
            pages = {row.slot: row.pages for row in running}
            self._read_unread(pages, width, 1)
            draft_BT = self.device.draft_tokens(pages, width)
        for answer in constrained:
            answer.matcher.start(() if draft_BT is None else draft_BT[answer.row.slot].tolist())
        end = time.monotonic() + max(_MASK_SECONDS, self._pacing.step_seconds / 2)

        def is_late(matcher: Matcher) -> bool:
            left = end - time.monotonic() if matcher.seconds < _MASK_SECONDS else 0.0
            return not matcher.wait(max(0.0, left))

        late = [answer for answer in constrained if is_late(answer.matcher)]
        if len(late) == len(running):
            min(late, key=lambda answer: answer.matcher.seconds).matcher.wait(_POLL_SECONDS)
        return {answer.row for answer in late}

    def _masks(self, answers: Sequence[Answer]) -> np.ndarray | None:
        """Returns uint32 [slots, 1 + draft tokens, words]: the tokens that grammars allow next. None: all. A
        request whose grammar fails ends.
        """
        constrained = _with_masks(answers)
        if not constrained:
            return None
        words = -(-constrained[0].request.call.config.vocab_size // 32)
        masks_BQW = np.full((self.shape.rows, 1 + self.shape.num_draft_tokens, words), ALL_BITS)
        for answer in constrained:
            if answer.row.slot is None:  # it failed with another answer of its request
                continue
            try:
                answer.matcher.fill(masks_BQW[answer.row.slot])
            except InputError as error:
                self._fail(answer.request, error)
        return masks_BQW

    def _append_all(self, answers: Mapping[int, Answer], out: SampledTokens) -> None:
        """Appends the tokens of the rows in these slots, and notifies their requests."""
        for slot, answer in answers.items():
            if answer.row in self.answers:  # it did not fail with another answer of its request
                self._append(answer, out, slot)
        self._notify({answer.request for answer in answers.values()})

    def _append(self, answer: Answer, out: SampledTokens, slot: int) -> bool:
        """Appends a row's tokens to its answer. Returns True if the answer has ended."""
        request = answer.request
        count = int(out.count_B[slot])
        self._counters.generated_tokens += count
        processed_logprobs = (
            out.alternatives.processed_logprobs_BT[slot, :count].tolist() if request.recorded else ()
        )
        has_support = request.request_options.return_support
        # Copies, so that the array of all rows is freed.
        support = [*out.alternatives.support_BTW[slot, :count].copy()] if has_support else ()
        alternatives: Sequence[TokenLogprobs] = ()
        if top := request.call.options.logprobs:
            parts = out.alternatives, out.tokens_BT, out.logprobs_BT, out.count_B
            recorded, *of_row = jax.tree.map(lambda x_B: x_B[slot : slot + 1], parts)
            tokens_1T, logprobs_1T, count_1 = of_row
            (alternatives,) = token_logprob_rows(recorded, tokens_1T, logprobs_1T, count_1, top)
        ids = out.tokens_BT[slot, :count].tolist()
        logprobs = out.logprobs_BT[slot, :count].tolist()
        try:
            finished = bool(out.finished_B[slot])
            ended = answer.append(ids, logprobs, finished, processed_logprobs, alternatives, support)
        except InputError as error:
            self._fail(request, error)
            return True
        if ended:
            self._end(answer, answer.ended_by or "")
        elif isinstance(answer.matcher, Matcher) and not self.shape.num_draft_tokens:
            answer.matcher.start()  # beside what follows in this step
        return ended

    def _fail(self, request: Request, error: BaseException) -> None:
        """Ends a request. Other requests continue."""
        request.fail(error)
        self._end_all(request, "error", valid=False)
        self._notify([request])

    def _fail_without_params(self) -> bool:
        """Fails all requests if parameters were donated or deleted. Returns True if they were."""
        if not is_deleted(getattr(self.device, "params", None)):
            return False
        error = InputError(
            "the engine's parameters were donated to another program, or deleted: give it others by"
            " engine.update(params), with copy=True if these will be donated"
        )
        for request in {answer.request: None for answer in self.answers.values()}:
            self._fail(request, error)
        return True

    def _end_all(self, request: Request, reason: str, valid: bool = True) -> None:
        for answer in request.answers:
            if answer.row in self.answers:
                self._end(answer, reason, valid)

    def _end(self, answer: Answer, reason: str, valid: bool = True) -> None:
        self._finish_pages(answer, valid)
        routed_experts = None
        if answer.request.request_options.return_routed_experts and answer.row.state in (
            "prefilling",
            "running",
        ):
            parts = jax.device_get(self.device.copy_routes(answer.row.pages))
            numbers = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
            routed_experts = numbers[: answer.row.num_computed]
        answer.end(reason, routed_experts)
        for kept in (self._swapped, self._restarted):
            kept.pop(answer, None)
        if self._held.pop(answer, None) is None:  # the scheduler has it
            row = answer.row
            self.scheduler.end(row, answer.tokens[len(row.ids) - len(answer.request.ids) :], valid)
        del self.answers[answer.row]

    def _finish_pages(self, answer: Answer, valid: bool) -> None:
        """Completes the pages of an answer that ends, if other rows may share them: a draft head may not have
        read its last tokens.
        """
        row = answer.row
        unread = self.shape.num_unread - 1  # tokens at most
        if not (valid and self._shares_head_pages(answer) and row.state == "running"):
            return
        if is_deleted(getattr(self.device, "params", None)):
            return
        if row.num_computed // PAGE_SIZE > (row.num_computed - unread) // PAGE_SIZE:
            self.device.finish_pages(row.slot, row.pages)


def _new_row(answer: Answer, masks_BQW: np.ndarray | None) -> NewRow:
    """Returns the values from which the device makes the row of an answer. masks_BQW: the masks of all slots.
    They are read if the row has masks.
    """
    call = answer.request.call
    dfa = answer.matcher and answer.matcher.dfa
    masks_QW = None
    if masks_BQW is not None and isinstance(answer.matcher, Matcher):
        masks_QW = masks_BQW[answer.row.slot]
    tables = dfa and [dfa.class_V, dfa.next_SC]
    return NewRow(call, answer.number, masks_QW, tables, jax.tree.leaves(call.callers))


def _sampling_of(answers: Mapping[int, Answer]) -> tuple[bool, dict[int, int]]:
    """Returns `greedy` and `recorded` of `Device.decode`, for the rows in these slots."""
    requests = {slot: answer.request for slot, answer in answers.items()}
    recorded = {slot: request.recorded for slot, request in requests.items() if request.recorded}
    return all(request.call.greedy for request in requests.values()), recorded


def _draft_result(
    out: SampledTokens, slots: list[Any], width: int, seconds: tuple[float, float]
) -> DraftResult:
    """Returns what a call of `Device.decode` for these slots gave. seconds: of the call, and of the head
    reading before it. The head reads regularly in steps without draft tokens, and otherwise because the width
    changed.
    """
    own, of_reading = seconds
    accepted = out.accepted_BT[slots].sum(0).tolist()
    counts = int(out.passes_B.max()), int(out.passes_B[slots].sum()), accepted
    return DraftResult(own, *counts, of_reading) if width else DraftResult(own + of_reading, *counts)


def _with_masks(answers: Iterable[Answer]) -> list[Answer]:
    """Returns the answers whose grammar needs the host for the mask of each token."""
    return [answer for answer in answers if isinstance(answer.matcher, Matcher)]


def _has_masks(answer: Answer) -> bool:
    """Returns True if the masks of the answer's next token are computed, or if the answer needs none."""
    return not isinstance(answer.matcher, Matcher) or answer.matcher.wait()
