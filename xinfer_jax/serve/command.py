"""`xinfer-jax-serve`: its flags, and the process from start to shutdown."""

import asyncio
import dataclasses
import os
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..cli.answer_flags import define_engine, define_model, define_sampling, engine_options
from ..cli.flag_parser import FlagParser
from ..cli.process import SignalEvent, capture_signals, command_main
from ..cli.process_group import define_processes, supervise
from ..cli.terminal import status
from ..engine.engine_options import EngineOptions
from ..errors import InputError, format_message
from ..formats.hub import split_revision
from ..processes.channel import listen, parse_host_port
from ..processes.launcher import distributed_args
from ..processes.secret import load_secret
from .ip_addresses import parse_networks
from .server_settings import LOCAL_HOSTS, ServerSettings

_INSTALL = "pip install starlette uvicorn h11 prometheus-client llguidance"  # the extra `serve`

PARSER = FlagParser(
    "xinfer-jax-serve",
    f"Serves a model through the OpenAI HTTP API, and a chat page.\nNeeds more packages: run {_INSTALL}.",
    "[flags]",
    "--model Qwen/Qwen2.5-0.5B-Instruct --port 8000",
)
_SWITCH_SECONDS = 0.0005  # until a thread releases the GIL for others, such as the engine and the event loop
_KEY_VARIABLE = "XINFER_JAX_API_KEY"
_MAX_CONNECTIONS = 2048  # by default
_RESERVED_FILES = 64  # for everything other than connections
_CLOSE_SECONDS = 3.0  # for closing, after the grace time

PARSER.group = "address, keys and name"
PARSER.add_text(
    "host", "Address to listen on; one that other machines can reach needs a key. Default: 127.0.0.1."
)
PARSER.add_integer("port", "Port to listen on; 0: any free one.", default=8000, most=65535)
PARSER.add_text(
    "api_key_file", f"File of keys, one a line; a client must send one. Default: ${_KEY_VARIABLE}, or none."
)
PARSER.add_text(
    "served_model_name", "Name of the model in requests. Default: the last part of --model.", "give a name"
)
PARSER.add_texts(
    "allowed_origins",
    "Origin of web pages that may send requests; may be given several times.",
    "give an origin",
)
define_model(PARSER)
define_sampling(PARSER)
PARSER.add_integer(
    "seed", "Seed for requests without one. Default: drawn at the start, and logged.", most=2**32 - 1
)
PARSER.group = "answers"
PARSER.add_integer("max_tokens", "Maximum tokens of a chat answer without max_tokens.", default=4096, least=1)
PARSER.add_switch("stop_in_reasoning", "Stop strings of chats end the reasoning too, not the content alone.")
PARSER.add_switch("escape_control_tokens", "The text of messages never becomes a control token.", True)
PARSER.add_switch("share_prefixes", "Keys share prefix pages: cached_tokens may reveal another's prompt.")
define_engine(PARSER)
PARSER.add_text(
    "adapter_dir",
    "Directory of LoRA adapters that POST /v1/load_lora_adapter may load; needs --admin_key_file, and"
    " --max_adapters. Default: none.",
    empty="give a directory",
)
PARSER.add_text(
    "weight_dir",
    "Directory of checkpoints whose weights POST /update_weights may give the engine; needs"
    " --admin_key_file. Default: none.",
    empty="give a directory",
)
PARSER.add_text(
    "weight_address",
    "HOST:PORT where trainers that know the secret (--secret_file) send new weights, by send_weights of the"
    " library. Default: none.",
    empty="give HOST:PORT",
)
PARSER.add_text(
    "admin_key_file", "File of keys, one a line, for adapters, for pauses, and for new weights of the engine."
)
define_processes(PARSER)
PARSER.group = "prefill and decode in processes of their own"
PARSER.add_text(
    "peers",
    "HOST:PORT where prefill and decode processes connect; this process then has no weights and no engine.",
    empty="give HOST:PORT",
)
PARSER.add_choice("role", "prefill or decode: serve no HTTP, but the process at --peer.", "prefill", "decode")
PARSER.add_text("peer", "With --role: HOST:PORT of the --peers of the front process.", empty="give HOST:PORT")
PARSER.group = "limits"
PARSER.add_integer("max_waiting", "Answers that may wait for a slot; more get 429.", default=1024)
PARSER.add_integer(
    "max_waiting_per_client", "Answers of one key or address that may be in flight.", default=256, least=1
)
PARSER.add_integer(
    "max_waiting_tokens", "Tokens of prompts and answers in flight; more get 429.", default=2**22, least=1
)
PARSER.add_integer(
    "max_waiting_tokens_per_client", "The same, of one key or address.", default=2**19, least=1
)
PARSER.add_integer(
    "max_body_bytes", "Bytes of a request's body; larger ones get 413.", default=2**22, least=2**10
)
PARSER.add_integer(
    "max_connections",
    "Limit of open connections; at the limit, a new one closes one that waits for its client. Default: half"
    f" of the files that the process may open (ulimit -n), at most {_MAX_CONNECTIONS}.",
    least=1,
)
PARSER.add_integer(
    "max_connections_per_address",
    "The same, of one IP address (IPv6: of one /64). Default: half of all.",
    least=1,
)
PARSER.add_texts(
    "trusted_proxy",
    "Address or network of a proxy: its X-Forwarded-For names the client, and it may open any number of"
    " connections; may be given several times. Default: none, and the header is ignored.",
    "give an address",
)
PARSER.add_number(
    "deadline", "Seconds after which an answer ends unfinished; 0: never.", lambda x: x >= 0, "from 0 on", 0.0
)
PARSER.group = "start, log and end"
PARSER.add_switch("log_prompts", "Log the token ids of prompts, too.")
PARSER.add_integer("grace", "Seconds that running answers have to end after SIGTERM or Ctrl-C.", default=30)
PARSER.add_integer(
    "stuck_seconds", "Seconds without progress after which /health answers 503.", default=120, least=1
)


def _run() -> int:
    sys.setswitchinterval(_SWITCH_SECONDS)
    flags = PARSER.values
    host = flags.host or LOCAL_HOSTS[0]
    keys = _read_keys(flags.api_key_file)
    admin_keys = _read_keys(flags.admin_key_file, "admin_key_file", None)
    _check_admin_flags(flags, bool(admin_keys))
    most_connections, most_per_address = _connection_limits(flags)
    parse_networks(flags.trusted_proxy)
    if host not in LOCAL_HOSTS and not keys:
        raise InputError(f"--host={host} lets others in: give --api_key_file, or a key in ${_KEY_VARIABLE}")
    _check_roles(flags)
    if (code := supervise(PARSER)) is not None:
        return code
    options = engine_options(flags)
    if flags.role:
        return _serve_role(flags, options)
    if distributed_args().get("process_id"):
        from ..engine.engine import LocalEngine

        LocalEngine(*_load_model(flags, options)).follow()
        return 0
    with status("loading jax"):
        try:
            from .app import make_server
            from .service import Service
        except ModuleNotFoundError as error:
            raise InputError(f"{error.name} is missing: run {_INSTALL}") from error
    model = split_revision(flags.model or "bundled")[0]
    name = flags.served_model_name or Path(model).name
    _check_names(options.adapters, name, model)
    seed = secrets.randbits(32) if flags.seed is None else flags.seed
    names = [field.name for field in dataclasses.fields(ServerSettings)]
    same: dict[str, Any] = {name: flags[name].value for name in names if name in flags}
    settings = ServerSettings(**same | dict(
        name=name, model=model, host=host, api_keys=keys,
        origins=tuple(flags.allowed_origins), seed=seed, escape=flags.escape_control_tokens,
        engine=options,
        max_connections=most_connections, max_connections_per_address=most_per_address,
        trusted_proxies=tuple(flags.trusted_proxy), admin_keys=admin_keys, has_own_engines=not flags.peers,
    ))  # fmt: skip
    peers = _listen_with_secret(flags, "peers")
    trainers = _listen_with_secret(flags, "weight_address")
    listening = _listen(host, flags.port)
    service = Service(settings, _log)
    failed: list[BaseException] = []
    with capture_signals() as stop:
        with _exit_deadline(stop, settings.grace):
            threading.Thread(
                target=_load, args=(service, flags, peers, trainers, failed), daemon=True
            ).start()
            asyncio.run(_serve(make_server(service), service, listening, stop, failed))
            service.close()
    if failed:
        raise failed[0]
    return 0


main = command_main(PARSER, _run)


def _listen_with_secret(flags: Any, name: str) -> tuple[socket.socket, bytes] | None:
    """Returns a socket at the address of a flag, and the secret of its connections. None: the flag is not
    given.
    """
    if not (address := flags[name].value):
        return None
    (host, port) = parse_host_port(f"--{name}", address)
    secret = load_secret(flags.secret_file, host)
    return listen(host, port, f"--{name}"), secret


def _check_admin_flags(flags: Any, has_keys: bool) -> None:
    """Raises InputError if flags for requests of admins, or for trainers, lack others."""
    for name in ("adapter_dir", "weight_dir"):
        if flags[name].value and not has_keys:
            raise InputError(f"--{name} and --admin_key_file belong together: give both")
    if flags.adapter_dir and not (flags.max_adapters and Path(flags.adapter_dir).is_dir()):
        remedy = "give a directory, and --max_adapters"
        raise InputError(f"--adapter_dir={flags.adapter_dir} has no place for adapters: {remedy}")
    if flags.weight_dir and not Path(flags.weight_dir).is_dir():
        raise InputError(f"--weight_dir={flags.weight_dir} is no directory: give one that exists")
    for name in ("weight_dir", "weight_address"):
        for other in ("peers", "role", "coordinator"):
            keeps = other != "coordinator" or name == "weight_address"
            if keeps and flags[name].value and flags[other].value:
                raise InputError(
                    f"--{name} does not go with --{other}, whose processes take no weights so: leave out one"
                )


def _check_names(adapters: Any, *names: str) -> None:
    """Raises InputError if an adapter has a name of the model. names: the names of the model."""
    for name in names:
        if name in adapters:
            flag = f"--adapter={name}={adapters[name]}"
            raise InputError(f"{flag} has the name of the model: give it another")


def _check_roles(flags: Any) -> None:
    """Raises InputError if flags of several processes with roles contradict others."""
    if bool(flags.role) != bool(flags.peer):
        raise InputError("--role and --peer belong together: give both")
    own = "peers" if flags.peers else "role"
    if flags[own].value is None:
        return
    for name in (
        "role",
        "coordinator",
        "data_parallel",
        "prefill_devices",
        "decode_devices",
        "routed_experts",
    ):
        if name != own and flags[name].value != flags[name].default:
            remedy = "leave it out" if name == "routed_experts" else "start a process for each part"
            raise InputError(f"--{name} does not go with --{own}: {remedy}")


def _serve_role(flags: Any, options: EngineOptions) -> int:
    """Runs a prefill or decode process. It works for the front process until that ends, or until a signal."""
    from ..engine.engine import LocalEngine
    from .peer_worker import PeerWorker

    address = parse_host_port("--peer", flags.peer)
    secret = load_secret(flags.secret_file, address[0])
    with capture_signals() as stop, LocalEngine(*_load_model(flags, options)) as engine:
        worker = PeerWorker(engine, address, secret, _log)
        _log(f"this {flags.role} process works for {flags.peer}")
        why = worker.run(stop)
    if why:
        raise InputError(f"the front process at {flags.peer} is gone ({why})")
    return 0


@contextmanager
def _exit_deadline(stop: SignalEvent, grace: float) -> Iterator[None]:
    """Within, the process exits with 0 some seconds after a signal's grace, even in a long call."""
    ended = threading.Event()

    def exit_late() -> None:
        stop.wait()
        if ended.wait(grace + _CLOSE_SECONDS):
            return
        line = f"not everything ended within {grace:g} s: the process ends without it"
        # In a thread: it blocks if nobody reads the log.
        logging = threading.Thread(target=_log, args=(line,), daemon=True)
        logging.start()
        logging.join(0.5)
        os._exit(0)

    watching = threading.Thread(target=exit_late, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        stop.set()  # ends the thread
        watching.join()


def _load(service: Any, flags: Any, peers: Any, trainers: Any, failed: list[BaseException]) -> None:
    """Loads the model and makes the engine.

    Args:
        service: the service that gets the engine.
        flags: the flags of the command.
        peers: the address to which other processes connect, and their secret. None: the engine is in this
            process.
        trainers: the address to which trainers send weights, and their secret. None: none do.
        failed: a list to which an error is appended.
    """
    from ..cli.answer import sampling_from_flags
    from ..cli.startup import open_model
    from ..engine.weight_receiver import WeightReceiver
    from ..generation.options import GenerateOptions
    from .peer_front import PeerEngines

    try:
        engine = None
        if peers:
            model = open_model(flags.model, flags).model
            (listening, secret) = peers
            engine = PeerEngines(model, listening, secret, _log)
            engine.wait_for_both(lambda: service.closing)
        else:
            model, options = _load_model(flags, service.settings.engine)
            service.settings = dataclasses.replace(service.settings, engine=options)
        service.start(
            model,
            GenerateOptions(max_tokens=flags.max_tokens, sampling=sampling_from_flags(flags, model)),
            engine,
        )
        if trainers:
            (listening, secret) = trainers
            receiver = WeightReceiver(service.engine, listening, secret, _log)
            _log(f"trainers send weights to {receiver.address}")
    except BaseException as error:
        service.load_error = format_message(error) or type(error).__name__
        failed.append(error)


def _load_model(flags: Any, options: EngineOptions) -> tuple[Any, EngineOptions]:
    """Returns the model, and the options of its engine with the draft head that a flag names."""
    from ..cli.startup import check_devices, engine_draft, join_processes, open_model, use_compilation_cache

    use_compilation_cache(PARSER.name, flags.compilation_cache)
    join_processes()
    check_devices(flags)
    checkpoint = open_model(flags.model, flags)
    draft = engine_draft(options.draft, checkpoint.model)
    return checkpoint.read(), dataclasses.replace(options, draft=draft)


async def _serve(
    server: Any, service: Any, listening: socket.socket, stop: SignalEvent, failed: list[Any]
) -> None:
    """Serves until a signal comes, or loading the model fails."""
    settings = service.settings
    address, port = listening.getsockname()[:2]
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # one that can be opened
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    _log(f"loading {settings.model}: {url}/health says when it can answer")
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    loading = True
    while not (stop.is_set() or failed or serving.done()):
        await asyncio.sleep(0.05)
        if loading and service.engine is not None:
            loading = False
            _log(f"{settings.name} is ready (seed {settings.seed}), listening on {url}")
    if stop.is_set():
        _log(f"shutting down: running answers have {settings.grace} s to end")
    service.closing = True
    server.should_exit = True
    await serving


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"--host={host} --port={port} cannot be listened on: {why}: give another") from error


def _connection_limits(flags: Any) -> tuple[int, int]:
    """Returns the limits of open connections: in total, and for one address."""
    files = _raise_file_limit(max(2 * _MAX_CONNECTIONS, _RESERVED_FILES + (flags.max_connections or 0)))
    most = flags.max_connections or max(1, min(_MAX_CONNECTIONS, files // 2))
    if flags.max_connections and most > files - _RESERVED_FILES:
        raise InputError(
            f"--max_connections={most} needs more than the {files} files that this process may open:"
            f" give at most {max(1, files - _RESERVED_FILES)}, or raise ulimit -n"
        )
    of_address = flags.max_connections_per_address or max(1, most // 2)
    if of_address > most:
        raise InputError(
            f"--max_connections_per_address={of_address} is above the limit of all connections, {most}:"
            " lower it, or raise --max_connections"
        )
    return most, of_address


def _raise_file_limit(wanted: int) -> int:
    """Raises the number of files that this process may open, as far as allowed, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # some systems have a lower limit of their own
        return soft
    return wanted


def _read_keys(
    path: str | None, flag: str = "api_key_file", variable: str | None = _KEY_VARIABLE
) -> tuple[bytes, ...]:
    """Returns the keys of a flag's file, or of an environment variable: one a line."""
    text = os.environ.get(variable, "") if variable else ""
    source = f"${variable}"
    if path:
        source = f"--{flag}={path}"
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise InputError(f"{source} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{source} is not UTF-8 text: write one key a line") from error
    keys = []
    for number, line in enumerate(text.split("\n"), 1):
        key = line.strip()
        if key.startswith("#") or not key.isprintable() or len(key.split()) > 1:
            problem = f"line {number} has more than one key (a space, a comment or a control character)"
            raise InputError(f"{source}: {problem}: write one key a line, and nothing beside it")
        if key:
            keys.append(key.encode())
    if path and not keys:
        raise InputError(f"{source} holds no key: write one a line")
    return tuple(keys)


def _log(line: str) -> None:
    """Writes a line of the log."""
    status.log(f"{time.strftime('%H:%M:%S')} {line}")
