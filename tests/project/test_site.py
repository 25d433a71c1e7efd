"""The documentation site builds without a warning, and has no dead link. Its pictures are up to date."""

import functools
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from browser import Browser
from paths import ROOT, SCRIPTS
from tables import markdown

DOCS = ROOT / ".docs"


def load(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.oldest
def test_pictures_are_those_of_the_script():
    drawn = load("draw_pictures").pictures()
    found = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "pictures").glob("*.svg")}
    assert found == drawn, "python .docs/draw_pictures.py draws them again"


@pytest.mark.oldest
def test_the_charts_show_figures_of_the_page_of_measurements():
    page = (ROOT / "scripts/bench/README.md").read_text(encoding="utf-8")
    figures = json.loads((DOCS / "pictures/figures.json").read_text(encoding="utf-8"))
    for engine, rows in figures["speeds"]["engines"].items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {engine.split(' (')[0]}")]
        for values in rows.values():
            assert " · ".join(f"{value:g}" for value in values) in line
    for device in figures["decode_bytes"]["devices"]:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {device['name']} |")]
        assert f"| {device['moved']:,} | {device['least']:,} |" in line


@pytest.mark.unit
def test_each_picture_is_shown_on_a_page():
    shown = set()
    for page in markdown.pages(ROOT):
        links = re.findall(r"!\[[^]]+\]\(([^)]+\.svg)\)", page.read_text(encoding="utf-8"))
        shown |= {(page.parent / link).resolve() for link in links if "://" not in link}
    assert shown == {path.resolve() for path in (DOCS / "pictures").glob("*.svg")}


def build(folder):
    for module in ("sphinx", "myst_nb", "furo", "jupytext"):
        pytest.importorskip(module, reason="the extra `docs` is not installed")
    command = [sys.executable, DOCS / "build_site.py", "--output", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr


class Page(HTMLParser):
    """The links of a page, and the anchors that it has."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.add(value)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


PAGES = {
    "index": "xinfer_jax",
    "reference/xinfer_jax.GenerateOptions": "GenerateOptions",
    "tutorials/lora": "LoRA",
}
BROKEN_PICTURES = "return [...document.images].filter(x => !x.naturalWidth).map(x => x.src)"
COUNT_LINKS = "return document.links.length"
CHECK_LINKS = """
const links = new Set([...document.links].map(x => x.href.split('#')[0]));
const inside = [...links].filter(x => x.startsWith(location.origin));
Promise.all(inside.map(async x => (await fetch(x, {method: 'HEAD'})).ok ? null : x)).then(
  found => { const dead = found.filter(x => x); window.dead = dead.length ? dead : ['none'] },
  error => { window.dead = [String(error)] });
"""


def check_every_text_is_a_page(site):
    addresses = load("build_site").ADDRESSES
    texts = [*markdown.pages(ROOT), *(SCRIPTS / "tutorials").glob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in texts} == {*addresses}
    assert not [address for address in addresses.values() if not (site / f"{address}.html").is_file()]


def check_links(site):
    """Checks links to files, and to anchors, except in the pages of code, whose anchors are Sphinx's own."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html") if "_modules" not in path.parts}
    assert len(pages) > 100
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert there.exists(), f"{path}: {link}"
            if there in pages and parts.fragment:
                assert unquote(parts.fragment) in pages[there].anchors, f"{path}: {link}"


def check_in_a_browser(site, folder):
    """Opens three pages: their pictures are shown, and none of their links is dead."""
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser(folder)
    try:
        for name, heading in PAGES.items():
            address = f"http://127.0.0.1:{server.server_port}/{name}.html"
            browser.open(address, "document.readyState === 'complete'")
            assert heading in browser.script("return document.querySelector('h1').innerText")
            assert browser.script(BROKEN_PICTURES) == [], name
            assert browser.script(COUNT_LINKS) > 50
            browser.script(CHECK_LINKS)
            assert browser.wait_for("window.dead") == ["none"], name
    finally:
        browser.close()
        server.shutdown()
        server.server_close()


@pytest.mark.full
@pytest.mark.oldest
def test_the_site_is_whole(tmp_path):
    """One test, so that one process builds the site. Without Chromium no page is opened."""
    build(site := tmp_path / "site")
    check_every_text_is_a_page(site)
    check_links(site)
    if shutil.which("chromedriver"):
        check_in_a_browser(site, tmp_path)
