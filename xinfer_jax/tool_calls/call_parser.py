"""`CallParser`: what the parsers of one call have in common."""

import abc


class CallParser(abc.ABC):
    """Parses one call while it is generated.

    Attributes:
        name: of the function; None: not known yet.
        ended: the call is complete.
        failed: the text is not a call.
        length: characters of the text so far that belong to the call, or precede what is wrong.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.ended = False
        self.failed = False
        self.length = 0

    @abc.abstractmethod
    def push(self, text: str) -> str:
        """Takes the next part of the text. Returns the next piece of the arguments' JSON."""
