"""The page at /: one file that loads no other one; its Content-Security-Policy allows only its own scripts and styles."""

import base64
import gzip
import hashlib
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

from aiohttp import web

PAGE: Final = Path(__file__).with_name("page") / "index.html"


class IndexPage:
    """`plain` and `packed` (gzip) are the file's bytes. It is compressed once, with an ETag for each form; aiohttp's `enable_compression`
    would compress it for each request, and ignores the weights of Accept-Encoding."""

    def __init__(self, content: bytes) -> None:
        self.plain = content
        self.packed = gzip.compress(content, 9, mtime=0)
        digest = hashlib.sha256(content).hexdigest()[:32]
        #: By whether it is packed.
        self._tags = {False: digest, True: f"{digest}-gzip"}
        self._policy = policy(content.decode())

    @classmethod
    def read(cls, path: Path = PAGE) -> "IndexPage":
        return cls(path.read_bytes())

    def response(self, request: web.Request) -> web.Response:
        packed = takes_gzip(",".join(request.headers.getall("Accept-Encoding", ())))
        headers = self._headers(packed)
        known = {tag.value for tag in request.if_none_match or ()}
        if known & {self._tags[packed], "*"}:
            return web.Response(status=304, headers=headers)
        if packed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(
            body=self.packed if packed else self.plain, headers=headers, content_type="text/html", charset="utf-8"
        )

    def _headers(self, packed: bool) -> dict[str, str]:
        return {
            "ETag": f'"{self._tags[packed]}"',
            "Vary": "Accept-Encoding",
            "Cache-Control": "no-cache",
            "Content-Security-Policy": self._policy,
        }


def policy(html: str) -> str:
    """The Content-Security-Policy that allows this file's own scripts and styles, data from its own origin, and no frames.

    It forbids attributes (`style="..."`, `onclick="..."`); what a script sets through the DOM is allowed.
    """
    inline = _Inline()
    inline.feed(html.replace("\r\n", "\n"))
    inline.close()
    rules: Mapping[str, str] = {
        "default-src": "'none'",
        "script-src": _hashes(inline.found["script"]),
        "style-src": _hashes(inline.found["style"]),
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hashes(texts: list[str]) -> str:
    """CSP's `'sha256-...'` of each (https://www.w3.org/TR/CSP3/#framework-directive-source-list)."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


class _Inline(HTMLParser):
    """Collects the text of <script> and <style> elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.found: dict[str, list[str]] = {"script": [], "style": []}
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag in self.found:
            self._inside = tag
            self.found[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.found[self._inside][-1] += data


def takes_gzip(accept_encoding: str) -> bool:
    """By the header's weights (RFC 9110, 12.5.3); False without the header."""
    weights: dict[str, float] = {}
    for part in accept_encoding.lower().split(","):
        coding, _, parameters = part.partition(";")
        _, _, weight = parameters.replace(" ", "").partition("q=")
        try:
            weights[coding.strip()] = float(weight or 1)
        except ValueError:
            weights[coding.strip()] = 0.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0
