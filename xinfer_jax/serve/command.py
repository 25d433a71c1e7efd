"""`xinfer-jax-serve`: flags, and the server's life from its first second to its last."""

import asyncio
import os
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..cli.answer_flags import define_engine, define_model, define_sampling
from ..cli.group import define_processes
from ..cli.process import Told, finish, told_first
from ..cli.program import Program
from ..cli.terminal import status
from ..cli.watch import child, watch
from ..errors import InputError, one_line
from .addresses import networks
from .settings import LOCAL, Settings

PROGRAM = Program(
    "xinfer-jax-serve",
    "A model behind the OpenAI HTTP API, and a page to talk to it.\n"
    "Needs the extra packages of serve: run pip install '.[serve]' in a checkout of xinfer_jax.",
    "xinfer-jax-serve [flags]",
    "xinfer-jax-serve --model Qwen/Qwen2.5-0.5B-Instruct --port 8000",
)
_SWITCH_SECONDS = (
    0.0005  # that a thread keeps the interpreter's lock: the engine and the event loop wait for it
)
_KEY = "XINFER_JAX_API_KEY"  # of the environment
_MOST_CONNECTIONS = 2048  # without a flag
_RESERVED_FILES = 64  # for all but connections, at least
_CLOSE_SECONDS = 3.0  # after the grace time, for what is left to close

PROGRAM.text("host", "Where it listens; another than this machine needs a key. Default: 127.0.0.1.")
PROGRAM.integer("port", "0: any that is free.", default=8000, most=65535)
PROGRAM.text("api_key_file", f"A file of keys, one a line; clients send one. Default: ${_KEY}, or none.")
PROGRAM.text("served_model_name", "In requests. Default: the last part of --model.", "give a name")
PROGRAM.texts("allowed_origins", "Of web pages that may ask; may be given several times.", "give an origin")
define_model(PROGRAM)
PROGRAM.number("temperature", "Default: the checkpoint's.", lambda x: 0 <= x < 3.4e38, "of 0 or above")
define_sampling(PROGRAM)
PROGRAM.integer("max_tokens", "Of a chat answer that names no limit, at most.", default=4096, least=1)
define_engine(PROGRAM)
define_processes(PROGRAM)
PROGRAM.integer("max_waiting", "Answers that may wait; more get 429.", default=1024)
PROGRAM.integer("max_waiting_per_client", "Of one key or address, under way together.", default=256, least=1)
PROGRAM.integer(
    "max_waiting_tokens", "Of prompts and answers under way; more get 429.", default=2**22, least=1
)
PROGRAM.integer("max_waiting_tokens_per_client", "Of one key or address.", default=2**19, least=1)
PROGRAM.integer("max_body_bytes", "Of a request's body; larger ones get 413.", default=2**22, least=2**10)
PROGRAM.integer(
    "max_connections",
    "Open at the same time; for one more, one that waits for its client is closed. Default: half of the files"
    f" that the process may open (ulimit -n), at most {_MOST_CONNECTIONS}.",
    least=1,
)
PROGRAM.integer(
    "max_connections_per_address", "Of one IP address (IPv6: of one /64). Default: half of all.", least=1
)
PROGRAM.texts(
    "trusted_proxy",
    "Address or network of a proxy: its X-Forwarded-For names the client, and it may open any number of"
    " connections; may be given several times. Default: none, and the header is ignored.",
    "give an address",
)
PROGRAM.number(
    "deadline", "Seconds until an answer ends as it is; 0: never.", lambda x: x >= 0, "from 0 on", 0.0
)
PROGRAM.integer("grace", "Seconds that answers under way have to end at SIGTERM and Ctrl-C.", default=30)
PROGRAM.integer("stuck_seconds", "Without progress, after which /health answers 503.", default=120, least=1)
PROGRAM.integer("seed", "Of requests without one. Default: drawn at the start, and said.", most=2**32 - 1)
PROGRAM.switch("log_prompts", "The log has the token ids of prompts, too.")
PROGRAM.switch("share_prefixes", "Keys share prefix pages: cached_tokens may tell of another's prompt.")
PROGRAM.switch("escape_control_tokens", "What messages spell never becomes a control token.", True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command in this thread and exits: 0 once it is told to end; 2 with one line on standard error
    where the input is at fault. `__main__.serve` is the process, which minds SIGTERM and Ctrl-C.
    """
    finish(PROGRAM.name, lambda: _run(sys.argv if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    PROGRAM.parse(argv)
    sys.setswitchinterval(_SWITCH_SECONDS)
    flags = PROGRAM.values
    host = flags.host or LOCAL[0]
    keys = _keys(flags.api_key_file)
    most_connections, most_per_address = _connection_limits(flags)
    networks(flags.trusted_proxy)
    if host not in LOCAL and not keys:
        raise InputError(f"--host={host} lets others in: give --api_key_file, or a key in ${_KEY}")
    if (code := watch(PROGRAM)) is not None:
        return code
    shape = dict(rows=flags.rows, capacity=flags.capacity, pages=flags.pages, cache_dtype=flags.cache_dtype)
    if child().get("process_id"):
        from ..engine.engine import Engine

        Engine(_model(flags), **shape).follow()
        return 0
    with status("loading jax"):
        try:
            from .app import make_server
            from .service import Service
        except ModuleNotFoundError as error:
            remedy = "run pip install '.[serve]' in a checkout of xinfer_jax"
            raise InputError(f"{error.name} is missing: {remedy}") from error
    model = flags.model or "bundled"
    seed = secrets.randbits(32) if flags.seed is None else flags.seed
    settings = Settings(
        name=flags.served_model_name or Path(model).name, model=model, host=host, port=flags.port,
        api_keys=keys, origins=tuple(flags.allowed_origins), max_waiting=flags.max_waiting,
        max_waiting_per_client=flags.max_waiting_per_client, max_waiting_tokens=flags.max_waiting_tokens,
        max_waiting_tokens_per_client=flags.max_waiting_tokens_per_client,
        max_body_bytes=flags.max_body_bytes, share_prefixes=flags.share_prefixes,
        deadline=flags.deadline, grace=flags.grace,
        stuck_seconds=flags.stuck_seconds, seed=seed, escape=flags.escape_control_tokens,
        log_prompts=flags.log_prompts, shape=shape | dict(data_parallel=flags.data_parallel),
        max_connections=most_connections, max_connections_per_address=most_per_address,
        trusted_proxies=tuple(flags.trusted_proxy),
    )  # fmt: skip
    listening = _listen(host, flags.port)
    service = Service(settings, _say)
    failed: list[BaseException] = []
    with told_first() as stop:
        with _bounded_end(stop, settings.grace):
            threading.Thread(target=_load, args=(service, flags, failed), daemon=True).start()
            asyncio.run(_serve(make_server(service), service, listening, stop, failed))
            service.close()
    if failed:
        raise failed[0]
    return 0


@contextmanager
def _bounded_end(stop: Told, grace: float) -> Iterator[None]:
    """Within, the process ends at most `grace` and a few seconds after a signal, with exit code 0: also where
    the engine's thread, another one or the event loop is in a long call.
    """
    ended = threading.Event()

    def watch_end() -> None:
        stop.wait()
        if ended.wait(grace + _CLOSE_SECONDS):
            return
        line = f"not everything ended within {grace:g} s: the process ends without it"
        saying = threading.Thread(target=_say, args=(line,), daemon=True)  # nobody may read the log
        saying.start()
        saying.join(0.5)
        os._exit(0)

    watching = threading.Thread(target=watch_end, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        stop.set()  # ends the thread
        watching.join()


def _load(service: Any, flags: Any, failed: list[BaseException]) -> None:
    """The model, then the engine; what breaks it off is left in `failed`."""
    from ..cli.answer import sampling_of
    from ..generation.options import GenerateOptions

    try:
        model = _model(flags)
        service.start(model, GenerateOptions(flags.max_tokens, sampling_of(flags, model)))
        _say(f"{service.settings.name} is ready (seed {service.settings.seed})")
    except BaseException as error:
        service.broken = one_line(error) or type(error).__name__
        failed.append(error)


def _model(flags: Any) -> Any:
    from ..cli.startup import check_devices, join_processes, keep_compiled_programs, open_model

    keep_compiled_programs("xinfer-jax-serve", flags.compilation_cache)
    join_processes()
    check_devices(flags)
    return open_model(flags.model, flags).read()


async def _serve(server: Any, service: Any, listening: socket.socket, stop: Told, failed: list[Any]) -> None:
    """Until it is told to end, or the model cannot be had."""
    address, port = listening.getsockname()[:2]
    _say(f"listening on http://{f'[{address}]' if ':' in address else address}:{port}")
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not (stop.is_set() or failed or serving.done()):
        await asyncio.sleep(0.05)
    if stop.is_set():
        _say(f"going down: answers under way have {service.settings.grace} s to end")
    service.closing = server.should_exit = True
    await serving


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"--host={host} --port={port} cannot be listened on: {why}") from error


def _connection_limits(flags: Any) -> tuple[int, int]:
    """Of all connections, and of one address."""
    files = _raise_file_limit(max(2 * _MOST_CONNECTIONS, _RESERVED_FILES + (flags.max_connections or 0)))
    most = flags.max_connections or max(1, min(_MOST_CONNECTIONS, files // 2))
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
    """Files that this process may open: so many, where its hard limit allows it."""
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


def _keys(path: str | None) -> tuple[bytes, ...]:
    """Keys of a file, or of the environment: one a line."""
    text = os.environ.get(_KEY, "")
    source = f"${_KEY}"
    if path:
        source = f"--api_key_file={path}"
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise InputError(f"{source} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{source} is no text in UTF-8: write one key a line") from error
    keys = []
    for number, line in enumerate(text.split("\n"), 1):
        key = line.strip()
        if key.startswith("#") or not key.isprintable() or len(key.split()) > 1:
            problem = "has more than a key (a blank, a comment or a control character)"
            raise InputError(
                f"{source}: line {number} {problem}: write one key a line, and nothing beside it"
            )
        if key:
            keys.append(key.encode())
    if path and not keys:
        raise InputError(f"{source} holds no key: write one a line")
    return tuple(keys)


def _say(line: str) -> None:
    """A line of the log."""
    status.say(f"{time.strftime('%H:%M:%S')} {line}")
