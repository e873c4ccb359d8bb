"""What the page's headers are made of."""

import base64
import hashlib

from gpumgr.web.responses import page_policy


def sha(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def rules(html: str) -> dict[str, str]:
    return {name: value for rule in page_policy(html).split("; ") for name, _, value in [rule.partition(" ")]}


def test_the_policy_allows_what_stands_in_the_file() -> None:
    script = '\nconst a = "&amp;"; // <b>\n"<style>no</style>";\n'
    found = rules(f"<html><style>b{{}}</style><STYLE>i{{}}</STYLE><p>text</p><script>{script}</script></html>")
    assert found["script-src"] == sha(script)
    assert found["style-src"] == f"{sha('b{}')} {sha('i{}')}"


def test_the_policy_allows_nothing_else() -> None:
    assert rules("<p>text</p>") == {
        "default-src": "'none'",
        "script-src": "'none'",
        "style-src": "'none'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def test_browsers_hash_scripts_with_plain_newlines() -> None:
    assert rules("<script>a\r\nb</script>")["script-src"] == sha("a\nb")
