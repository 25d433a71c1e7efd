"""The chat page: one HTML file, and the headers that let only its own script run."""

import base64
from hashlib import sha256
from pathlib import Path


def _build() -> tuple[str, dict[str, str]]:
    """Returns the page with its style and scripts inside, and headers that allow these by their hashes."""
    here = Path(__file__).parent
    page = (here / "page.html").read_text(encoding="utf-8")
    allowed = []
    scripts = ["markdown.js", "client.js", "history.js", "page.js"]
    for tag, names in (("style", ["page.css"]), ("script", scripts)):
        inside = "\n" + "".join((here / name).read_text(encoding="utf-8") for name in names)
        page = page.replace(f"<{tag}></{tag}>", f"<{tag}>{inside}</{tag}>")
        digest = base64.b64encode(sha256(inside.encode()).digest()).decode()
        allowed.append(f"{tag}-src 'sha256-{digest}'")
    allowed += [f"{name} 'none'" for name in ("default-src", "base-uri", "form-action", "frame-ancestors")]
    policy = "; ".join([*allowed, "connect-src 'self'"])
    return page, {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


PAGE, HEADERS = _build()
