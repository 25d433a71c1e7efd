"""`Row`: one answer as the scheduler sees it. Also has the actions that the scheduler asks of the engine."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from . import clients
from .pages import num_pages_for


@dataclasses.dataclass(eq=False)
class HeldAdapter:
    """A LoRA adapter of an engine (`Engine.add_adapter`).

    Attributes:
        name: the name in requests.
        index: its place among the adapters on the devices.
        digest: the digest of its contents: other contents share no pages.
        version: the version of its contents: 0, and another after each `update_adapter`.
        removed: no request may name it.
    """

    name: str
    index: int
    digest: bytes
    version: int = 0
    removed: bool = False


class Variant(NamedTuple):
    """The difference between the model of a row and the model of its engine. adapter: the index of the row's
    adapter, or -1 for none. factors: the factors of the engine's vectors, or () for none.
    """

    adapter: int = -1
    factors: Sequence[float] = ()


PLAIN = Variant()


@dataclasses.dataclass(eq=False)
class Row:
    """One answer of a request (vLLM: a sequence)."""

    ids: Sequence[int]  # the prompt
    max_tokens: int
    priority: int = 0  # higher goes first
    # Answer j of a request is in group j // slots. Rows of a lower group go first, among those of one client.
    answer_group: int = 0
    salt: bytes = b""  # pages are shared only between rows of equal salt
    adapter: HeldAdapter | None = None  # and of equal adapters
    factors: Sequence[float] = ()  # of the engine's vectors; (): none, else its pages are never shared
    client: str = ""
    # The first token of the prompt whose log-probability is asked for. Such a prompt is prefilled by another
    # program, and shares pages only with such prompts.
    logprobs_from: int | None = None
    share_answers: bool = False  # reuses pages that any program wrote, and caches pages of its answer
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)  # in the order of its tokens
    num_computed: int = 0  # tokens whose keys are in its pages, or in host memory
    # Pages of its prompt in host memory, to copy to its next pages before it prefills.
    host_pages: list[int] = dataclasses.field(default_factory=list)
    has_read: bool = False  # pages of its prompt were looked for in files
    hits: int = 0  # tokens of the prompt found in the prefix cache
    shared: int = 0  # tokens whose pages it has, also beyond the last snapshot of recurrent states
    arrival: int = 0  # its number in the order of `submit`
    slot_time: float = math.inf  # when it got its last slot; inf: it has had none
    overtaken: int = 0  # later rows of its client that got a slot before it
    exact: bool = True  # its keys have the bits that they have without other requests
    cacheable: bool = True  # its pages may be found by other rows
    moving: bool = False  # its pages are on the way from or to another engine, so it does not decode
    ended: bool = False  # it ended, failed or was cancelled
    page_hashes: Sequence[bytes] = ()  # of the prompt's full pages, over tokens and programs
    token_hashes: Sequence[bytes] = ()  # the same over tokens alone

    @property
    def page_salt(self) -> bytes:
        """The bytes on which the row's pages depend, in addition to tokens and programs."""
        # No salt of a request begins with b"\xfe".
        return self.salt if self.adapter is None else b"\xfe" + self.adapter.digest + self.salt

    @property
    def variant(self) -> Variant:
        """The difference between the row's model and the engine's model."""
        return Variant(-1 if self.adapter is None else self.adapter.index, self.factors)

    @property
    def is_new(self) -> bool:
        """Returns True if the row has had no slot yet."""
        return self.slot_time == math.inf

    @property
    def is_prefilled(self) -> bool:
        """Returns True if the whole prompt is computed. The row then decodes when it has a slot."""
        return self.num_computed >= len(self.ids)

    @property
    def is_swapped_out(self) -> bool:
        """Returns True if the row's pages are in host memory."""
        return self.slot is None and self.num_computed > 0 and not self.ended

    @property
    def state(self) -> Literal["waiting", "prefilling", "moving", "running", "ended"]:
        if self.ended:
            return "ended"
        if self.slot is None:
            return "waiting"
        if self.moving:
            return "moving"
        return "running" if self.is_prefilled else "prefilling"

    def resalt(self, salt_of: Callable[[bytes], bytes]) -> None:
        """Changes the salt of its pages from the salt of its request to the engine's salt for it."""
        self.salt = salt_of(self.salt)

    def record_elsewhere(self, computed: int, hits: int) -> None:
        """Records that another engine computed the keys of `computed` tokens, and found the keys of `hits`
        tokens in its cache.
        """
        self.num_computed = computed
        self.hits = hits

    def restart(self, ids: Sequence[int]) -> None:
        """Records that the keys of these tokens have to be computed: tokens of its prompt, and tokens that it
        has sampled.
        """
        if self.is_prefilled:
            self.logprobs_from = None  # they are known
        self.max_tokens -= len(ids) - len(self.ids)
        self.ids = ids
        self.num_computed = 0

    @property
    def longest(self) -> int:
        """Tokens that it may come to have in pages: a single new token comes from the prompt's own logits."""
        return len(self.ids) + (self.max_tokens if self.max_tokens > 1 else 0)

    @property
    def pages_to_continue(self) -> int:
        """The number of pages that it needs soon: pages for its prompt or all computed tokens, and one
        more.
        """
        soon = num_pages_for(max(len(self.ids), self.num_computed)) + 1
        return min(num_pages_for(self.longest), soon)

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Its order among the rows of its client. The lowest goes first."""
        if self.overtaken >= clients.STARVATION_LIMIT:
            return False, 0, 0, self.arrival
        return True, -self.priority, self.answer_group, self.arrival


class Swap(NamedTuple):
    """Copy pages to host memory, after which they and the slot are free, or back. The state of a prefilled
    row is copied too.
    """

    row: Row
    slot: int  # that the row leaves, or gets
    pages: list[int]
    out: bool  # to host memory


class PrefillChunk(NamedTuple):
    """Prefill ids[start : start + count] of a row, then call `Scheduler.record_prefill`."""

    row: Row
    start: int
    count: int  # type: ignore[assignment]  # a tuple has a method of this name
    is_full: bool  # by the program of full chunks, else by the program of single pages
    is_last: bool  # the row's first token is sampled after it
    width: int  # tokens of that program, padding included


class Restore(NamedTuple):
    """Copy a snapshot of recurrent states into the slot of a row whose prompt begins with cached pages."""

    row: Row
    slot: int
    snapshot: int
    on_host: bool  # it is in host memory


class SaveSnapshot(NamedTuple):
    """Copy a snapshot of recurrent states to host memory, before the device replaces it."""

    snapshot: int
    host_snapshot: int
    name: bytes  # the hash by which a file may have it


class TakeSnapshot(NamedTuple):
    """Copy the recurrent states of a row's slot into a snapshot, as they are now."""

    snapshot: int
    saved: SaveSnapshot | None  # of the old contents, which comes first


class SavePages(NamedTuple):
    """Copy pages that the prefix cache evicted to host memory, before anything is written to them."""

    pages: list[int]
    host_pages: list[int]
    names: list[bytes]  # hashes of these pages, by which files may have them


class LoadPages(NamedTuple):
    """Copy pages of a row's prompt back from host memory, instead of prefilling them."""

    row: Row
    pages: list[int]
    host_pages: list[int]
    width: int  # tokens of a prefill that would take longer


class ReadPages(NamedTuple):
    """An action: begin to read pages of a row's prompt from files, then call `Scheduler.record_read`. The row
    waits. `Scheduler.stop_waiting_for_files` ends the wait early.
    """

    row: Row
    names: list[bytes]  # the hashes that the files have
    hashes: list[bytes]  # by which these pages will be found
    host_pages: list[int]
    epoch: int  # of the prefix cache
    # The snapshot of recurrent states at the end of these pages, which is read after them: its hash, the name
    # of its file, and its place in host memory. None: it is in no file, or needs none.
    snapshot: tuple[bytes, bytes, int] | None
    num_pages: int  # of the prompt that the row would prefill otherwise


Transfer = SavePages | SaveSnapshot | LoadPages | ReadPages  # between the tiers of the prefix cache
Action = Swap | PrefillChunk | Restore | Transfer
