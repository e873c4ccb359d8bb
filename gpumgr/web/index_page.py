"""The page at /: one file that loads no other file; its Content-Security-Policy allows only its own scripts and styles."""

import base64
import gzip
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from aiohttp import web

from gpumgr.web.responses import accepts_gzip

PAGE: Final = Path(__file__).with_name("page") / "index.html"
#: Tag and text of the scripts and styles in the file.
_INLINE: Final = re.compile(r"<(script|style)\b[^>]*>(.*?)</\1\s*>", re.DOTALL | re.IGNORECASE)


class IndexPage:
    """The file is compressed once, with an ETag for each form; aiohttp's `enable_compression` would compress it for each request, and
    ignores the weights of Accept-Encoding."""

    def __init__(self, path: Path = PAGE) -> None:
        content = path.read_bytes()
        self.plain, self.packed = content, gzip.compress(content, 9, mtime=0)
        self._tag = hashlib.sha256(content).hexdigest()[:32]
        self._policy = policy(content.decode())

    def response(self, request: web.Request) -> web.Response:
        packed = accepts_gzip(",".join(request.headers.getall("Accept-Encoding", ())))
        body, tag = (self.packed, f"{self._tag}-gzip") if packed else (self.plain, self._tag)
        headers = {
            "ETag": f'"{tag}"',
            "Vary": "Accept-Encoding",
            "Cache-Control": "no-cache",
            "Content-Security-Policy": self._policy,
        }
        if {each.value for each in request.if_none_match or ()} & {tag, "*"}:
            return web.Response(status=304, headers=headers)
        if packed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers, content_type="text/html", charset="utf-8")


def policy(html: str) -> str:
    """The Content-Security-Policy that allows this file's own scripts and styles, data from its own origin, and no frames.

    It forbids attributes (`style="..."`, `onclick="..."`); what a script sets through the DOM is allowed.
    """
    inline = [(tag.lower(), text) for tag, text in _INLINE.findall(html.replace("\r\n", "\n"))]
    rules = {
        "default-src": "'none'",
        "script-src": _hashes(text for tag, text in inline if tag == "script"),
        "style-src": _hashes(text for tag, text in inline if tag == "style"),
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hashes(texts: Iterable[str]) -> str:
    """The source `'sha256-...'` for each text (https://www.w3.org/TR/CSP3/#framework-directive-source-list)."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
