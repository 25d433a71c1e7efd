"""The settings of a server."""

import dataclasses
from typing import Any

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")  # only this machine can connect


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """The settings of one server.

    Attributes:
        name, model: the model's name in requests; the directory or hub name that it was loaded from.
        host, port: where the server listens.
        api_keys: a client must send one of them; (): no key is needed.
        origins: of web pages that may send requests from a browser.
        max_waiting, max_waiting_per_client: answers of all clients that wait for a slot; answers of one
            client in flight.
        deadline: seconds after which an answer ends unfinished; 0: never.
        grace: time in seconds for running answers to end at shutdown.
        stuck_seconds: /health fails if the engine makes no step for so long.
        seed: for requests without a seed.
        escape: escape control tokens in the text of messages.
        log_prompts: log the token ids of prompts.
        shape: arguments of `Engine`, and data_parallel.
        max_waiting_tokens, max_waiting_tokens_per_client: tokens of prompts and answers in flight, an
            answer's at its maximum; a token with k top log-probabilities counts as 1 + k.
        max_body_bytes: size limit of a body.
        share_prefixes: clients with different keys share prefix pages.
        max_connections, max_connections_per_address: open connections.
        trusted_proxies: addresses or networks whose `X-Forwarded-For` names the client.
        stop_in_reasoning: stop strings of chats count in the reasoning, too.
        stall_seconds: a client that reads nothing for so long is disconnected.
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
    stop_in_reasoning: bool = False
    stall_seconds: float = 30.0
