"""The server's connections, client addresses, keys and shutdown, without a model."""

import asyncio
import contextlib
import dataclasses
import errno
import hashlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from paths import ROOT

pytest.importorskip("uvicorn", reason="the server needs starlette, uvicorn and prometheus-client")
pytest.importorskip("prometheus_client")
import h11
import serving
from starlette.responses import JSONResponse, Response, StreamingResponse

import xinfer_jax as xj
from xinfer_jax.serve import command, connections, framing, http_server, ip_addresses
from xinfer_jax.serve.admission import AdmissionControl
from xinfer_jax.serve.arrivals import Arrivals
from xinfer_jax.serve.http_responses import APIError
from xinfer_jax.serve.service import Service

pytestmark = pytest.mark.oldest


def connected(port, count=1, source="127.0.0.1", options=()):
    """Opens connections from this address, which send nothing."""
    found = []
    for _ in range(count):
        own = socket.socket()
        for option, value in options:
            own.setsockopt(socket.SOL_SOCKET, option, value)
        own.settimeout(120)
        own.bind((source, 0))
        own.connect(("127.0.0.1", port))
        found.append(own)
    return found


def health(port, source="127.0.0.1"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120, source_address=(source, 0))
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().read()


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_new_connections_close_idle_ones():
    with serving.run_server(max_connections=6, max_connections_per_address=4) as own:
        idle = connected(own.port, 12)
        assert b"loaded" in health(own.port) and b"loaded" in health(own.port, "127.0.0.2")
        until(lambda: len(own.server.server_state.connections) <= 4)
        assert [sock.recv(1) for sock in idle[:8]] == [b""] * 8  # the oldest ones
        idle += connected(own.port, 4, "127.0.0.2") + connected(own.port, 4, "127.0.0.3")
        assert b"loaded" in health(own.port) and b"loaded" in health(own.port, "127.0.0.4")
        until(lambda: len(own.server.server_state.connections) <= 6)
        for sock in idle:
            sock.close()
        until(lambda: not own.server.server_state.connections)
        assert not own.log


def test_connections_with_requests_stay(monkeypatch):
    release = threading.Event()

    async def answer(self, call, kind):
        while not release.is_set():
            await asyncio.sleep(0.01)
        return JSONResponse(dict(client=call.client.host))

    monkeypatch.setattr(Service, "create_completion", answer)
    with serving.run_server(max_connections=4, max_connections_per_address=2) as own:
        busy = connected(own.port, 2)
        for sock in busy:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
        until(lambda: len(own.server.server_state.tasks) == 2)
        for _ in range(3):
            [late] = connected(own.port)
            assert late.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert b"loaded" in health(own.port, "127.0.0.2")
        assert len(own.log) == 1 and "127.0.0.1 is rejected" in own.log[0]  # once a minute
        release.set()
        assert all(b"200 OK" in sock.recv(4096) for sock in busy)
        assert b"loaded" in health(own.port)


class _Full(socket.socket):
    """A socket whose `accept` fails a few times: too many open files."""

    failures = 0

    def accept(self):
        if self.failures < 20:
            self.failures += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_too_many_open_files_is_logged_once(monkeypatch, capfd):
    monkeypatch.setattr(http_server, "_RETRY_SECONDS", 0.01)
    with serving.run_server(listening=_Full(fileno=socket.create_server(("127.0.0.1", 0)).detach())) as own:
        assert b"loaded" in health(own.port)
        assert len(own.log) == 1 and "Too many open files" in own.log[0]
    assert "Traceback" not in capfd.readouterr().err


DRIVER = """
import resource, signal, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
from xinfer_jax.cli.process import run_interruptible
from xinfer_jax.serve import command

class Stuck:
    error, name, last_step_time, usable_capacity, missing = None, "engine 0", 0.0, 1, ""
    engines = ()
    def close(self):
        time.sleep(600)

def load(service, *_):
    service.engine = Stuck()
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(600,)).start()
    command._log("stuck is ready")

command._load, command._CLOSE_SECONDS = load, 1.0
run_interruptible(lambda: command.main(["xinfer-jax-serve", "--port=0", "--grace=0"]), signal.SIGTERM)
"""


@pytest.mark.full
def test_400_idle_connections_with_200_files_and_an_engine_that_does_not_close():
    command_line = [sys.executable, "-c", DRIVER]
    process = subprocess.Popen(command_line, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        while not any("is ready" in line for line in lines) or not any("listening" in line for line in lines):
            assert (line := process.stderr.readline()), lines
            lines.append(line)
        port = int(next(line for line in lines if "listening" in line).rsplit(":", 1)[1])
        idle = connected(port, 200) + connected(port, 200, "127.0.0.2")
        for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            assert b"ok" in health(port, source)
        assert 100 < len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 150  # 100 connections
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=60)[1]
        assert process.returncode == 0 and time.monotonic() - began < 100
        assert "shutting down" in rest and "the process ends" in rest
        assert "Traceback" not in rest and len(rest.splitlines()) < 6
        for sock in idle:
            sock.close()
    finally:
        process.kill()


BIG = b"0123456789" * 100_000


@pytest.mark.parametrize("reads, streamed", [(True, False), (False, True)])
def test_connection_of_a_client_that_reads_nothing_is_aborted(monkeypatch, streamed, reads):
    async def parts():
        for start in range(0, len(BIG), 10_000):
            yield BIG[start : start + 10_000]

    async def answer(self, call, kind):
        return StreamingResponse(parts()) if streamed else Response(BIG)

    monkeypatch.setattr(Service, "create_completion", answer)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with serving.run_server(listening=listening, stall_seconds=0.5) as own:
        [sock] = connected(own.port, options=[(socket.SO_RCVBUF, 4096)])
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n"
        sock.sendall(head + b"connection: close\r\n\r\n")
        found = b""
        if reads:
            while part := sock.recv(65536):
                found += part
            assert found.count(b"0123456789") > 50_000 and found.endswith(b"0\r\n\r\n" if streamed else BIG)
            return
        until(lambda: own.server.server_state.connections)
        until(lambda: not own.server.server_state.connections and not own.server.server_state.tasks)
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(65536):
                found += part
        assert 0 < len(found) < len(BIG) / 2


def test_client_addresses_behind_proxies():
    trusted = ip_addresses.parse_networks(["10.0.0.0/24", "::1"])
    for peer, header, client in [
        ("10.0.0.7", "1.2.3.4", "1.2.3.4"),
        ("10.0.0.7", "6.6.6.6, 1.2.3.4", "1.2.3.4"),  # the client itself wrote the left one
        ("10.0.0.7", "nonsense, 1.2.3.4:55, 10.0.0.8", "1.2.3.4"),
        ("10.0.0.7", "10.0.0.9,10.0.0.8", "10.0.0.9"),
        ("::1", "[2001:db8::5]:443", "2001:db8::5"),
        ("10.0.0.7", "::ffff:1.2.3.4", "1.2.3.4"),
    ]:
        assert ip_addresses.is_within(peer, trusted)
        assert ip_addresses.forwarded_client(peer, [header], trusted) == client
    assert ip_addresses.forwarded_client("10.0.0.7", [], trusted) == "10.0.0.7"
    assert ip_addresses.forwarded_client("10.0.0.7", ["6.6.6.6", "1.2.3.4"], trusted) == "1.2.3.4"
    for header in ("1.2.3.4, ", "unknown", "1.2.3.4:", "[::1", "fe80::1%a", "1.2.3", "", "[::1]x"):
        with pytest.raises(xj.InputError, match="no IP address"):
            ip_addresses.forwarded_client("10.0.0.7", [header], trusted)
    assert not ip_addresses.is_within("10.0.1.1", trusted) and not ip_addresses.is_within("name", trusted)
    assert ip_addresses.is_within("::ffff:10.0.0.1", trusted)
    assert (
        ip_addresses.address_group("2001:db8::1")
        == ip_addresses.address_group("2001:db8::2:3")
        != ip_addresses.address_group("::1")
    )
    assert ip_addresses.address_group("::ffff:1.2.3.4") == ip_addresses.address_group("1.2.3.4")


def test_x_forwarded_for_counts_only_from_a_trusted_proxy(monkeypatch):
    async def answer(self, call, kind):
        await call.body()
        since = time.monotonic() - call.state.received
        return JSONResponse(dict(client=call.client.host, since=since, name=call.state.request_id))

    monkeypatch.setattr(Service, "create_completion", answer)

    def client(own, **headers):
        return own.call("POST", "/v1/completions", {}, **headers)[1]

    with serving.run_server() as own:
        assert client(own, x_forwarded_for="1.2.3.4")["client"] == "127.0.0.1"
        for given in ("mine-1_a.b", "x" * 64):
            assert client(own, x_request_id=given)["name"] == given
        for forged in ("mine 1", "a: 200", "a\x85b", "x" * 65, "", "a\tb", "\xe9"):
            assert client(own, x_request_id=forged)["name"].isalnum()
        [sock] = connected(own.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n"
        sock.sendall(head + b"connection: close\r\n\r\n")
        time.sleep(0.3)  # a request arrives with its head, not with its body
        sock.sendall(b"a")
        with sock.makefile("rb") as answered:
            assert json.loads(answered.read().partition(b"\r\n\r\n")[2])["since"] > 0.2
        own.log.clear()
        for path in ("/a%0a12:00:00%20b%20GET%20/c", "/a%E2%80%A8b", "/a:%20200%20OK", "/%ff%00"):
            assert own.call("GET", path, x_request_id="id")[0] == 404
        assert [line.split(" ")[:2] for line in own.log] == [["id", "GET"]] * 4
        assert all(line.isprintable() and line.split(" ")[3] == "404" for line in own.log), own.log
    with serving.run_server(
        trusted_proxies=("127.0.0.1",), max_connections=6, max_connections_per_address=1
    ) as own:
        assert client(own, x_forwarded_for="6.6.6.6, 1.2.3.4")["client"] == "1.2.3.4"
        assert client(own)["client"] == "127.0.0.1"
        status, error, _ = own.call("POST", "/v1/completions", {}, x_forwarded_for="me")
        assert status == 400 and "'me'" in error["error"]["message"]
        idle = connected(own.port, 4)
        until(lambda: len(own.server.server_state.connections) == 4)  # a proxy's are not limited by address
        assert b"loaded" in health(own.port, "127.0.0.2") and len(idle) == 4


def test_models_and_version_paths_need_the_key():
    with serving.run_server(name="org/tiny", api_keys=(b"a",)) as own:
        key = dict(authorization="Bearer a")
        for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny", "/v1/models/bundled"):
            status, found, _ = own.call("GET", path, **key)
            assert status == 200 and (found["id"], found["object"]) == ("org/tiny", "model")
        assert own.call("GET", "/v1/models", **key)[1]["data"] == [found]
        for path in ("/v1/models/tiny", "/v1/models/org/tiny/", "/v1/models/"):
            status, error, _ = own.call("GET", path, **key)
            assert status == 404 and error["error"]["code"] == "model_not_found", path
        assert own.call("GET", "/version", **key)[:2] == (200, dict(version=xj.__version__))
        assert own.call("GET", "/version")[0] == own.call("GET", "/v1/models/org/tiny")[0] == 401
        [sock] = connected(own.port)  # the body of a rejected request is not kept
        sock.sendall(
            b"POST /version HTTP/1.1\r\nhost: localhost\r\ncontent-length: 200000\r\n\r\n" + bytes(10**5)
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 401 ")
        until(lambda: [c.cycle.body for c in own.server.server_state.connections] == [b""])


def test_key_files_have_one_key_a_line(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_bytes("\ufeff first \r\n\nzw\u00f6lf\n".encode())
    assert command._read_keys(str(path)) == (b"first", "zw\u00f6lf".encode())
    monkeypatch.setenv("XINFER_JAX_API_KEY", "own")
    assert command._read_keys(None) == (b"own",) and command._read_keys(str(path))[0] == b"first"
    for text in (b"a\nsecret # of bob\n", b"a\n# secret\n", b"a\nsecret\x0csecret\n", b"a\nsec\x00ret\n"):
        path.write_bytes(text)
        with pytest.raises(xj.InputError, match="line 2") as error:
            command._read_keys(str(path))
        assert "secret" not in str(error.value)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(xj.InputError, match="UTF-8"):
        command._read_keys(str(path))


def parsed(parser, data):
    """The events of what has arrived, or the error, and how often the parser was behind."""
    parser.receive_data(data)
    found = []
    behind = -1
    while parser.behind or behind < 0:
        behind += 1
        parser.begin()
        try:
            while (event := parser.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
                found.append(event)
        except h11.RemoteProtocolError as error:
            return str(error), error.error_status_hint, behind
    return found, None, behind


HEAD = b"POST / HTTP/1.1\r\nhost: a\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def test_heads_trailers_and_chunks_are_limited():
    headers = [b"a: %d\r\n" % i for i in range(8000)]
    for end in (b"\r\n", b""):  # a head is rejected before its end
        why, status, _ = parsed(framing.LimitedParser(), HEAD + b"".join(headers[:100]) + end)
        assert status == 431 and "more than 100 headers" in why
    for rest in (b"\r\n" + HEAD, b"\r\n", b"\r", b""):  # 100 are allowed
        found = parsed(framing.LimitedParser(), HEAD + b"".join(headers[:99]) + rest)[0]
        assert [*map(type, found)] == ([h11.Request, h11.EndOfMessage] if b"\n" in rest else [])
    assert parsed(framing.LimitedParser(), HEAD + b"a: " + b"b" * 2**16 + b"\r\n\r\n")[1] == 431
    for size, status in (4000, None), (4100, 414):
        for end in (b" HTTP/1.1\r\nhost: a\r\n\r\n", b""):
            assert parsed(framing.LimitedParser(), b"GET /" + b"a" * size + end)[1] == status
    folded = HEAD + b"a: b\r\n" + b" c\r\n" * 200 + b"\r\n"
    assert parsed(framing.LimitedParser(), folded)[1] == 431
    whole = CHUNKED + b"1\r\na\r\n0\r\n"
    assert parsed(framing.LimitedParser(), whole + b"".join(headers) + b"\r\n")[1] == 431
    (_, data, end), _, behind = parsed(framing.LimitedParser(), whole + b"x: y\r\n\r\n")
    assert (data.data, end.headers, behind) == (b"a", [(b"x", b"y")], 0)
    for size, count, rejected in [(1, 1000, False), (1, 1100, True), (300, 9000, False), (200, 9000, True)]:
        chunks = (b"%x\r\n" % size + b"a" * size + b"\r\n") * count
        found, status, behind = parsed(framing.LimitedParser(), CHUNKED + chunks + b"0\r\n\r\n")
        assert status == (400 if rejected else None) and behind > 100, (size, count, found)
        assert "too small" in found if rejected else len(found) == count + 2
    extended = (b"100;" + b"x" * 9000 + b"\r\n" + b"a" * 256 + b"\r\n") * 40
    assert parsed(framing.LimitedParser(), CHUNKED + extended)[1] == 400


def test_held_connections_of_an_address_wait_for_those_of_others():
    order = []

    class Held:
        def __init__(self, address, turns):
            self.address, self.turns = address, turns

        def go_on(self):
            order.append(self.address)
            self.turns -= 1
            if self.turns:
                backlog.add(self)

    async def run():
        for held in (Held("a", 3), Held("a", 3), Held("b", 2), gone):
            backlog.add(held)
        backlog.remove(gone)
        while len(order) < 8:
            await asyncio.sleep(0.001)

    backlog = framing.Backlog()
    gone = Held("c", 1)
    asyncio.run(run())
    assert order == ["a", "b", "a", "b", "a", "a", "a", "a"]


def test_bodies_arrive_whole_in_any_pieces(monkeypatch):
    async def answer(self, call, kind):
        body = await call.body()
        return JSONResponse(dict(size=len(body), digest=hashlib.sha256(body).hexdigest()))

    monkeypatch.setattr(Service, "create_completion", answer)
    body = random.Random(0).randbytes(2**20)
    pieces = [body[i : i + 500] for i in range(0, len(body), 500)]
    chunks = b"".join(b"%x;a=b\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nx: y\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    with serving.run_server() as own:
        [sock] = connected(own.port)
        whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
        sock.sendall(whole + head + b"transfer-encoding: chunked\r\n\r\n" + chunks + whole)
        with sock.makefile("rb") as file:
            for _ in range(3):
                size = 0
                while (line := file.readline()) != b"\r\n":
                    size = int(line[16:]) if line.startswith(b"content-length: ") else size
                answered = json.loads(file.read(size))
                assert answered == dict(size=len(body), digest=hashlib.sha256(body).hexdigest())


def test_what_is_no_request_gets_a_reason_and_a_body_after_its_response_is_limited(monkeypatch):
    async def answer(self, call, kind):
        bodies.append(len(await call.body()))

    bodies = []
    monkeypatch.setattr(Service, "create_completion", answer)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    tiny = head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 5000
    many = head + b"a: b\r\n" * 200 + b"\r\n"
    with serving.run_server(max_body_bytes=10_000, api_keys=(b"key",)) as own:
        keyed = b"authorization: Bearer key\r\n"
        for sent, status, why in [
            (many, b"431", b"more than 100 headers: send fewer"),
            (b"GET\x00\r\n\r\n", b"400", b"illegal request line"),
            (tiny.replace(b"\r\n", b"\r\n" + keyed, 1), b"400", b"chunks of the body are too small"),
            (tiny, b"401", b"a key is needed"),
        ]:
            [sock] = connected(own.port)
            found = b""
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
                while part := sock.recv(4096):  # until the server closes it
                    found += part
            assert found.startswith(b"HTTP/1.1 " + status) and why in found
        [sock] = connected(own.port)
        sock.sendall(head + b"content-length: 1000000\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 401")
        with pytest.raises(ConnectionError):
            while True:
                sock.sendall(bytes(1000))
        until(lambda: not own.server.server_state.connections and not own.server.server_state.tasks)
        assert bodies == []


def test_connections_whose_bodies_are_arriving_make_way_for_new_ones(monkeypatch):
    async def answer(self, call, kind):
        return JSONResponse(len(await call.body()))

    monkeypatch.setattr(Service, "create_completion", answer)
    with serving.run_server(max_connections=4, max_connections_per_address=2) as own:
        slow = connected(own.port, 2)
        for sock in slow:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n1")
        until(lambda: len(own.server.server_state.tasks) == 2)
        assert b"loaded" in health(own.port) and slow[0].recv(1) == b""
        slow[1].sendall(b"2")
        assert b"200 OK" in slow[1].recv(4096)


def test_a_body_that_ends_for_others_just_as_its_time_is_over():
    async def run():
        arrivals = Arrivals(dataclasses.replace(serving.SETTINGS, max_body_bytes=1000))

        async def send():
            async with arrivals.receive(("x", "a"), 0) as arrival:
                arrival.grow(8000)
                await asyncio.sleep(600)

        slow = asyncio.create_task(send())
        for _ in range(2):  # its time is over then, and its task has not run
            await asyncio.sleep(0)
        async with arrivals.receive(("y", "a"), 600) as arrival:
            arrival.grow(1)
        with pytest.raises(APIError, match="this client's the most"):
            await slow

    asyncio.run(run())


def test_bodies_that_arrive_have_limits_of_their_own():
    settings = dataclasses.replace(
        serving.SETTINGS, max_waiting=40, max_waiting_per_client=40, max_body_bytes=1000
    )
    admission = AdmissionControl(settings)
    ends = asyncio.Event()

    async def send(client, address="a", size=0):
        reservation = admission.admit(client, address)
        async with reservation.arrive(0.5 if size < 0 else 600) as arrival:
            if size > 0:
                arrival.grow(size)
            await ends.wait()
        reservation.reserve(answers=1, bytes=size)

    async def status(task):
        with pytest.raises(APIError) as error:
            await task
        return error.value.status, error.value.closes

    async def run():
        slow = [asyncio.create_task(send("x")) for _ in range(20)]
        await asyncio.sleep(0)
        assert await status(send("x")) == (429, False)
        others = [asyncio.create_task(send("x", "b")), asyncio.create_task(send("y"))]
        large = [asyncio.create_task(send(who, size=1000)) for who in "zzzzwwww"]
        await asyncio.sleep(0)
        assert not admission.used["answers"]  # none is complete
        large += [asyncio.create_task(send("v", size=10)), asyncio.create_task(send("z", size=1000))]
        assert [await status(task) for task in (large[0], large[1])] == [(429, True)] * 2
        assert await status(send("u", size=-1)) == (408, True)
        ends.set()
        await asyncio.gather(*slow, *others, *large[2:])
        assert admission.used["answers"] == dict(x=21, y=1, z=3, w=4, v=1)
        assert await status(asyncio.gather(*(send("x") for _ in range(20)))) == (429, False)  # answers
        assert not admission.arrivals._arriving and not admission.arrivals._bytes.total()

    asyncio.run(run())


def test_many_requests_of_an_address_wait_for_their_turn(monkeypatch):
    found = connections.Connections(serving.SETTINGS)
    now = 5.0
    monkeypatch.setattr(connections, "time", types.SimpleNamespace(monotonic=lambda: now))
    assert [found.count_request("a") for _ in range(260)] == [False] * 256 + [True] * 4
    assert not found.count_request("b")
    now += 1 / 64
    assert [found.count_request("a") for _ in range(5)] == [False] * 3 + [True] * 2
    monkeypatch.undo()
    monkeypatch.setattr(connections, "_BURST", 20.0)
    with serving.run_server() as own:
        [sock] = connected(own.port)
        request = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"
        sock.sendall((request + b"\r\n") * 99 + request + b"connection: close\r\n\r\n")
        with sock.makefile("rb") as file:
            assert file.read().count(b"HTTP/1.1 200 OK") == 100  # none is lost
