"""The ledger's page for people: `status.html`, with the headers that confine it to itself.

The page shows names and messages that producers choose. It sets them as text only; should that ever fail, the
Content-Security-Policy lets no script run but the one in the file (by its hash), and nothing be loaded or sent elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

STATUS_PAGE = resources.files(__package__).joinpath("status.html").read_text(encoding="utf-8")


def _sources(tag: str) -> str:
    """The CSP sources of the page's inline elements of this kind: the hashes of exactly what stands between the tags."""
    contents = re.findall(f"<{tag}>(.*?)</{tag}>", STATUS_PAGE, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


STATUS_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_sources('script')}; style-src {_sources('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",  # an upgraded ledger on the same port brings its own page
}
