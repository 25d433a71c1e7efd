"""The settings of a server."""

import dataclasses

from ..engine.engine_options import EngineOptions

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")  # only this machine can connect


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """The settings of one server. Those that are flags have the flags' names and meanings (`command`)."""

    name: str  # of the model in requests
    model: str  # the directory or hub name that it was loaded from
    host: str
    port: int
    api_keys: tuple[bytes, ...]  # a client must send one of them; (): no key is needed
    origins: tuple[str, ...]  # of web pages that may send requests from a browser
    max_waiting: int
    max_waiting_per_client: int
    deadline: float  # seconds; 0: none
    grace: float
    stuck_seconds: float
    seed: int
    escape: bool  # control tokens in the text of messages
    log_prompts: bool
    engine: EngineOptions
    max_waiting_tokens: int = 2**22
    max_waiting_tokens_per_client: int = 2**19
    max_body_bytes: int = 2**22
    share_prefixes: bool = False
    max_connections: int = 512
    max_connections_per_address: int = 256
    trusted_proxies: tuple[str, ...] = ()
    stop_in_reasoning: bool = False
    adapter_dir: str | None = None  # below it are the adapters that may be loaded by requests
    admin_keys: tuple[bytes, ...] = ()  # for adapters, pauses and new weights
    weight_dir: str | None = None  # below it are the checkpoints that requests may make the engine's weights
    has_own_engines: bool = True  # else other processes have them
    stall_seconds: float = 30.0  # a client that reads nothing for so long is disconnected
