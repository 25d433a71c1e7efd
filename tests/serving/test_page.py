"""The page: use in Chromium, and answers that never become HTML."""

import base64
import json
import re
from hashlib import sha256

import pytest
from browser import CHROMIUM, LAST, Browser, Stub

from xinfer_jax.serve.page import HEADERS, PAGE

pytestmark = [pytest.mark.full, pytest.mark.newest]

MARKDOWN = """# Title

Some **bold**, *italic* and `code <b>`; [a link](https://example.com/a_b).
The second line.

1. one
   - inner
     - deepest

   ```python
   def f(x):
       return "<i>"  # a long line that does not fit on a narrow screen, and so has to be scrolled sideways
   ```
2. two

> A quote

---
A paragraph with snake_case_name, 2 * 3 * 4 and \\*stars\\*.

## Closed ##

``a `b` c``, \\``d` and ``open`

```
<script>window.hit = 1</script>
"""
HOSTILE = (
    "<img src=x onerror=window.hit=1> <script>window.hit=1</script> [x](javascript:window.hit=1)\n\n"
    "# <svg onload=window.hit=1>\n\n- [y](data:text/html,<script>window.hit=1</script>)\n\n"
    "[z](https://e.com/\" onclick=\"window.hit=1) **<b>bold</b>** `<i>`\n\n```<img src=x>\n<img src=x>\n```\n"
)  # fmt: skip


def test_headers_allow_only_the_pages_script_and_style():
    policy = HEADERS["content-security-policy"]
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", PAGE, re.DOTALL | re.IGNORECASE)
        digest = base64.b64encode(sha256(inside.encode()).digest()).decode()
        assert inside.strip() and f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"\b(src|href)=|\bstyle=|\bon\w+=|innerHTML|insertAdjacentHTML|@import", PAGE)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def stub(browser):
    stub = Stub()  # a new port has a new sessionStorage
    yield stub
    stub.close()


@CHROMIUM
def test_answer_is_rendered_as_markdown(browser, stub):
    stub.text = MARKDOWN
    browser.open(stub.address)
    browser.send("Show me.")
    shown = browser.script(f"return {LAST}.querySelector('.text').innerHTML")
    for part in (
        "<h3>Title</h3>", "<strong>bold</strong>", "<em>italic</em>", "<code>code &lt;b&gt;</code>",
        'href="https://example.com/a_b"', 'rel="noopener noreferrer"',
        '<ol start="1"><li>one<ul><li>inner<ul>',
        "<li>deepest</li>", "<li>two</li></ol>", "<blockquote><p>A quote</p></blockquote><hr>",
        "<h4>Closed</h4><p><code>a `b` c</code>, `<code>d</code> and ``open`</p>",
        "snake_case_name, 2 * 3 * 4 and *stars*.", "<pre tabindex=\"0\"><code>def f(x):\n    return",
        "<code>&lt;script&gt;window.hit = 1&lt;/script&gt;\n</code>",
    ):  # fmt: skip
        assert part in shown, (part, shown)
    browser.check_widths()


@CHROMIUM
def test_answer_never_becomes_html(browser, stub):
    stub.text = HOSTILE
    browser.open(stub.address)
    browser.send(HOSTILE)
    browser.script(
        "document.querySelectorAll('#conversation a, #conversation code').forEach((node) => node.click())"
    )
    tags = browser.script(
        "return [...new Set([...document.querySelectorAll('#conversation *')].map((node) => node.localName))]"
    )
    assert not {"img", "script", "svg", "a", "b", "i", "iframe"} & set(tags), tags
    text = browser.script(f"return {LAST}.querySelector('.text').textContent")
    for part in ("<img src=x onerror=window.hit=1>", "<script>", "[x](javascript:window.hit=1)", "<svg"):
        assert part in text
    assert browser.script("return window.hit === undefined")


@CHROMIUM
def test_markdown_of_any_text_is_fast(browser, stub):
    browser.open(stub.address)
    texts = "*,**a ,[,`a ``b ,_a ,> ,- ,1. - ,[a](https://,\\n,  - a\\n,```\\n"
    for text in texts.split(","):
        took = browser.script(
            "const began = performance.now(), target = document.createElement('div');"
            f"showMarkdown(target, '{text}'.repeat(20000)); return performance.now() - began"
        )
        assert took < 5000, (text, took)


@CHROMIUM
def test_page_asks_for_a_key_and_loses_nothing(browser, stub):
    browser.open(stub.address)
    stub.key = "secret"
    browser.send("Hello?", wait=False)
    browser.wait_for("$('keys').open")
    browser.check_widths()
    browser.type("key", "wrong\ue007")
    browser.wait_for("$('keys').open && $('keys-why').textContent.includes('does not accept')")
    browser.type("key", "secret\ue007")
    browser.wait_for("running === null")
    assert browser.script(f"return {LAST}.querySelector('.text').textContent") == "Yes."
    assert "secret" not in browser.script("return JSON.stringify([{...sessionStorage}, {...localStorage}])")
    browser.open(stub.address, "$('keys').open")  # it is not stored
    browser.script("$('keys-cancel').click()")
    browser.wait_for("keyPrompt === null")
    browser.send("Once more", wait=False)
    browser.wait_for("$('keys').open")
    browser.script("$('keys-cancel').click()")
    browser.wait_for("running === null")
    assert "needs a key" in browser.script(f"return {LAST}.querySelector('.error').textContent")
    assert browser.script("return conversation.at(-1).ask") == "Once more"


TITLES = "[...document.querySelectorAll('#list .open')].map((node) => node.textContent)"


@CHROMIUM
def test_conversations_are_kept_and_any_turn_is_changed(browser, stub):
    browser.open(stub.address)
    shown = "[...document.querySelectorAll('#welcome > :not(div)')].map((node) => node.textContent)"
    assert browser.script(f"return {shown}") == ["stub-model", "of 3 tokens", "It answers."]
    browser.check_widths()
    browser.script("document.querySelector('#examples button').click()")
    browser.wait_for("conversation.length === 1 && running === null")
    assert browser.script("return $('welcome').hidden && !$('export-json').hidden")
    browser.script("$('clear').click()")
    for question in ("First?", "Second?", "Third?"):
        browser.send(question)
    # An edited turn begins another conversation; the earlier one stays as it is.
    browser.script("document.querySelectorAll('.user .tools button')[1].click()")
    browser.script("document.querySelector('.user form textarea').value = 'Changed?'")
    browser.check_widths()
    browser.script("document.querySelector('.user form').requestSubmit()")
    browser.wait_for("running === null && conversation.length === 2")
    asked = [message["content"] for message in stub.requests[-1][1]["messages"]]
    assert asked == ["First?", "Yes.", "Changed?"]
    assert browser.script(f"return {TITLES}")[:2] == ["First?", "First?"]
    browser.script("document.querySelectorAll('#list .open')[1].click()")
    texts = "conversation.map((exchange) => exchange.ask)"
    assert browser.script(f"return {texts}") == ["First?", "Second?", "Third?"]
    browser.script("document.querySelectorAll('.assistant')[0].querySelectorAll('.tools button')[1].click()")
    browser.wait_for("running === null && conversation.length === 1")  # Regenerate
    assert [message["content"] for message in stub.requests[-1][1]["messages"]] == ["First?"]
    browser.open(stub.address)
    assert len(browser.script(f"return {TITLES}")) == 4 and browser.script(f"return {texts}") == ["First?"]
    for _ in range(2):  # the second click deletes
        browser.script("document.querySelector('#list .remove').click()")
    assert len(browser.script(f"return {TITLES}")) == 3 and browser.script("return !conversation.length")


@CHROMIUM
def test_settings_export_and_rate(browser, stub):
    browser.open(stub.address)
    values = dict(top_p="0.9", seed="7", most="50", stops="END\\n\\\\n\\\\n")
    browser.script("".join(f"$('{name}').value = '{value}';" for name, value in values.items()))
    browser.script("saveDraft()")
    browser.open(stub.address)
    browser.send("Now?")
    body = stub.requests[-1][1]
    assert (body["top_p"], body["seed"], body["max_tokens"]) == (0.9, 7, 50)
    assert body["stop"] == ["END", "\n\n"] and "temperature" not in body
    figures = f"return {LAST}.querySelector('.figures').textContent"
    rate = float(re.search(r"([\d.]+) tok/s", browser.script(figures))[1])
    first = int(re.search(r"first token (\d+) ms", browser.script(figures))[1])
    assert rate <= 4000 / max(1, first - 1)  # 4 tokens came at once: of the whole time
    browser.script("window.download = (...saved) => { window.saved = saved; }; $('export-json').click()")
    name, _, text = browser.script("return window.saved")
    messages = [dict(role="user", content="Now?"), dict(role="assistant", content="Yes.")]
    assert name.endswith(".json") and json.loads(text)["messages"] == messages
    browser.script("$('export-text').click()")
    name, _, text = browser.script("return window.saved")
    assert name.endswith(".md") and "## Question\n\nNow?\n\n## Answer\n\nYes.\n" in text


@CHROMIUM
def test_error_is_shown_with_its_message(browser, stub):
    browser.open(stub.address)
    browser.send("Fine?")
    stub.error = "temperature must be a number of 0 or above, got -1"
    browser.send("Not fine?")
    assert browser.script(f"return {LAST}.querySelector('.error').textContent") == stub.error
    assert browser.script("return document.querySelectorAll('.error:not([hidden])').length") == 1
    browser.check_widths()
    stub.error = ""
    browser.script(f"{LAST}.querySelector('.tools').children[1].click()")  # Try again
    browser.wait_for("running === null")
    assert browser.script(f"return {LAST}.querySelector('.text').textContent") == "Yes."
    assert browser.script("return document.querySelectorAll('.error:not([hidden])').length") == 0
    stub.close()
    browser.send("Anybody?")
    assert "does not answer" in browser.script(f"return {LAST}.querySelector('.error').textContent")
    stub.__init__()
