"""What a server is told at its start."""

import dataclasses
from typing import Any

LOCAL = ("127.0.0.1", "localhost", "::1")  # where only this machine reaches a server


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of one server.

    Attributes:
        name, model: under which the model is asked for; the directory or hub name that it came from.
        host, port: where it listens.
        api_keys: of which a client must send one; (): anybody may ask.
        origins: of web pages that may ask from a browser.
        max_waiting, max_waiting_per_client: answers beyond the rows; of one key or address, all together.
        deadline: seconds after which an answer ends as it is; 0: never.
        grace: seconds that answers have to end once the server is told to.
        stuck_seconds: without a turn of the engine, after which /health says so.
        seed: of answers to requests without one.
        escape: control tokens that messages spell stay letters.
        log_prompts: the ids of prompts stand in the log.
        shape: arguments of `Engine`, and data_parallel.
        max_waiting_tokens, max_waiting_tokens_per_client: tokens of prompts and answers that have not ended,
            an answer's at its longest; one that is shown beside k others counts as 1 + k.
        max_body_bytes: of the largest body.
        share_prefixes: clients with different keys share the pages of prompts that begin alike.
        max_connections, max_connections_per_address: that are open at the same time.
        trusted_proxies: addresses or networks whose `X-Forwarded-For` names the client.
        stall_seconds: that a client may take to read what was written.
    """

    name: str
    model: str
    host: str
    port: int
    api_keys: tuple[bytes, ...]
    origins: tuple[str, ...]
    max_waiting: int
    max_waiting_per_client: int
    deadline: float
    grace: float
    stuck_seconds: float
    seed: int
    escape: bool
    log_prompts: bool
    shape: dict[str, Any]
    max_waiting_tokens: int = 2**22
    max_waiting_tokens_per_client: int = 2**19
    max_body_bytes: int = 2**22
    share_prefixes: bool = False
    max_connections: int = 512
    max_connections_per_address: int = 256
    trusted_proxies: tuple[str, ...] = ()
    stall_seconds: float = 30.0
