"""`WeightSwitch`: the part of a core that replaces the parameters, or an adapter, between two steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from .answers import Answer
from .row import HeldAdapter


class WeightSwitch:
    """Replaces the parameters of a core, and decides the fate of unfinished answers.

    Attributes:
        version: the version of the parameters.
        recomputes: True for the parameters (key None) or an adapter, if rows computed their keys again after
            its last switch.
    """

    def __init__(self, core: Any, adapter_paths: Sequence[str]):
        """Makes the switch of a core. core: `EngineCore`. adapter_paths: the paths of the matrices that
        adapters may change.
        """
        self._core = core
        self._adapter_paths = adapter_paths
        self.version = 0
        self.recomputes: dict[HeldAdapter | None, bool] = {}

    def switch(
        self, contents: Any, version: int, recomputes: bool, adapter: HeldAdapter | None = None
    ) -> None:
        """Replaces the parameters between two steps, or an adapter, whose version and digest the caller then
        sets. Pages of earlier contents are not shared any more.

        Args:
            contents: the parameters, or (a, b, scale) of each matrix of the adapter.
            version: the version of the contents.
            recomputes: True: rows compute their keys again. False: they continue with the keys that they
                have.
        """
        self._core.sample_firsts()
        self.recomputes[adapter] = recomputes
        scheduler = self._core.scheduler
        for row, answer in self._core.answers.items():
            if adapter is None:
                self._go_on(answer, recomputes, version)
                scheduler.prefixes.release_host_pages(row)  # they are of earlier parameters
            elif row.adapter is adapter:
                self._go_on(answer, recomputes, self.version, version)
                scheduler.forget_prompt(row)
        if adapter is not None:
            self.set_adapter(adapter.index, contents)
            return
        scheduler.reset_prefix_cache()
        self._core.device.params = contents
        self.version = version

    def set_adapter(self, index: int, matrices: Mapping[str, Any]) -> None:
        """Writes (a, b, scale) of each matrix of an adapter, between two steps."""
        for path in self._adapter_paths:
            self._core.device.set_adapter(index, path, *matrices.get(path, (None, None, 0.0)))

    def _go_on(
        self, answer: Answer, recomputes: bool, version: int, adapter_version: int | None = None
    ) -> None:
        """Continues an answer whose next tokens come from these versions (`Answer.record_version`). It
        restarts the answer if its keys are recomputed, or cannot be continued.
        """
        row = answer.row
        # The states in its slot are of the end of pages that it has not loaded, and will not load now.
        is_ahead = bool(row.host_pages) and self._core.shape.state_bytes > 0
        restarts = (recomputes or is_ahead) and row.num_computed > 0
        if answer.has_begun:
            answer.record_version(self.version)  # it may have nothing but found pages
            answer.record_version(version, restarts, adapter_version)
        if restarts:
            self._core.restart(answer)
