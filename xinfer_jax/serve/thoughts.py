"""`split_thoughts` of a text that is still coming: each piece is looked at once."""

from ..api.responses import THINK, THOUGHT


class Thoughts:
    """What of each piece is thought, and what is said."""

    def __init__(self, opened: bool):
        """opened: the prompt has begun a thought."""
        self._state = "thinking" if opened else "begin"
        self._held = ""  # what may be the beginning of a mark
        self._blank: list[str] = []  # before anything else
        self._newline = True  # the first one of a thought is left out

    def push(self, piece: str, ended: bool) -> tuple[str, str]:
        """New thoughts and new content. ended: this is the last piece."""
        text = self._held + piece
        self._held = ""
        thought = ""
        if self._state == "begin":
            text = self._begin(text, ended)
        if self._state == "thinking":
            thought, text = self._think(text, ended)
        if self._state == "between":
            text = text.lstrip("\n")
            self._state = "said" if text else "between"
        return (thought, text) if self._state in ("between", "said") else (thought, "")

    def _begin(self, text: str, ended: bool) -> str:
        begun = text.lstrip()
        self._blank.append(text[: len(text) - len(begun)])
        if begun.startswith(THINK):
            self._state = "thinking"
            return begun[len(THINK) :]
        if ended or not THINK.startswith(begun):
            self._state = "said"
            return "".join(self._blank) + begun
        self._held = begun
        return ""

    def _think(self, text: str, ended: bool) -> tuple[str, str]:
        thought, mark, said = text.partition(THOUGHT)
        if mark:
            self._state = "between"
        elif not ended:
            held = next((n for n in range(len(THOUGHT) - 1, 0, -1) if thought.endswith(THOUGHT[:n])), 0)
            cut = len(thought) - held
            thought, self._held = thought[:cut], thought[cut:]
        if thought and self._newline:
            self._newline = False
            thought = thought.removeprefix("\n")
        return thought, said
