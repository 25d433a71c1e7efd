"""Controls Chromium, and serves the page to it with answers that a test sets."""

import contextlib
import http.server
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from xinfer_jax.serve.page import HEADERS, PAGE

CHROMIUM = pytest.mark.skipif(
    not shutil.which("chromedriver"), reason="no Chromium with its driver is installed"
)
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
).split()
LAST = "document.querySelector('.assistant:last-child')"


class _Handler(http.server.BaseHTTPRequestHandler):
    stub: Any

    def do_GET(self):
        if self.path == "/":
            self.respond(200, PAGE.encode(), **HEADERS, content_type="text/html; charset=utf-8")
            return
        known = {
            "/v1/models": dict(data=[dict(id="stub-model", about="of 3 tokens", description="It answers.")]),
            "/tokenizer_info": dict(chat_template=self.stub.template),
        }
        if self.path in known:
            if self.allowed():
                self.respond(200, known[self.path])
            return
        self.respond(404, dict(error=dict(message="no such address")))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.allowed():
            return
        if self.stub.error:
            self.respond(400, dict(error=dict(message=self.stub.error)))
            return
        self.stub.requests.append((self.path, body))
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # the page may stop an answer: it disconnects
            for word in re.findall(r"\S*\s*", self.stub.text):
                piece = dict(text=word) if "prompt" in body else dict(delta=dict(content=word))
                self.event(dict(choices=[dict(piece, finish_reason=None)]))
                time.sleep(self.stub.pause)
            self.event(dict(choices=[], usage=dict(prompt_tokens=3, completion_tokens=4)))
            self.wfile.write(b"data: [DONE]\n\n")

    def allowed(self):
        if self.stub.key in ("", (self.headers["authorization"] or "").removeprefix("Bearer ")):
            return True
        self.respond(401, dict(error=dict(message="a key is needed")))

    def event(self, value):
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())

    def respond(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *_):
        pass


class Stub:
    """A server of the page, with answers that a test sets.

    Attributes:
        text: of an answer.
        pause: seconds between its words.
        key: that a client must send. "": none.
        template: the model's chat template.
        error: the message of a 400 that is sent instead of an answer. "": none.
        requests: (path, body) of each answered request.
    """

    def __init__(self):
        self.text = "Yes."
        self.pause = 0.0
        self.key = ""
        self.template = "a template"
        self.error = ""
        self.requests = []
        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), dict(stub=self))
        )
        self.address = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


class Browser:
    """Chromium, controlled through chromedriver."""

    def __init__(self, folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._driver = subprocess.Popen(["chromedriver", f"--port={self._port}"], stdout=subprocess.DEVNULL)
        self._session = ""
        try:
            self._open(folder)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path):
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                if self._command("GET", "/status"):
                    break
            assert time.monotonic() < end
            time.sleep(0.1)
        options = {"goog:chromeOptions": dict(args=[*FLAGS, f"--user-data-dir={folder}/profile"])}
        found = self._command("POST", "/session", capabilities=dict(alwaysMatch=options))
        self._session = f"/session/{found['sessionId']}"

    def close(self):
        with contextlib.suppress(OSError):
            if self._session:
                self._command("DELETE", self._session)
        self._driver.terminate()
        self._driver.wait()

    def _command(self, method, path, **body):
        data = json.dumps(body).encode() if method == "POST" else None
        call = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, method=method)
        with urllib.request.urlopen(call, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, address, ready="plain !== null"):
        self._command("POST", f"{self._session}/url", url=address)
        self.wait_for(ready)

    def script(self, text, *args):
        return self._command("POST", f"{self._session}/execute/sync", script=text, args=args)

    def wait_for(self, text, seconds=120):
        end = time.monotonic() + seconds
        while not (found := self.script(f"return {text}")):
            assert time.monotonic() < end, (text, self.script("return document.body.innerText"))
            time.sleep(0.05)
        return found

    def send(self, text, wait=True):
        self.script(f"ask.value = {json.dumps(text)}; form.requestSubmit()")
        if wait:
            self.wait_for("running === null")

    def type(self, id, text):
        """Presses keys in an element; \\ue007 is Enter."""
        found = self._command(
            "POST", f"{self._session}/element", **dict(using="css selector", value=f"#{id}")
        )
        (element,) = found.values()
        self._command("POST", f"{self._session}/element/{element}/value", text=text)

    def check_widths(self):
        """The page is never wider than the window."""
        for width in (360, 1280):
            metrics = dict(width=width, height=800, deviceScaleFactor=1, mobile=False)
            path = f"{self._session}/goog/cdp/execute"
            self._command("POST", path, cmd="Emulation.setDeviceMetricsOverride", params=metrics)
            assert self.script("return document.documentElement.scrollWidth <= innerWidth")
