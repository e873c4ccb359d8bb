"""Tries two certificates on each other, by a TLS handshake in memory: authority, host name, purpose and dates as OpenSSL judges them."""

import base64
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

FILES: Final = ("tls.crt", "tls.key", "ca.crt")


def handshake(server: Mapping[str, str], client: Mapping[str, str], host: str) -> dict[str, float]:
    """Connects with the data of two Secrets (base64). "server" and "client" -> when the certificate ends, in seconds of Unix time.

    Raises ValueError that says which certificate is refused, and why.
    """
    ends = {
        "server": _context("the extender's", ssl.PROTOCOL_TLS_SERVER, server),
        "client": _context("kube-scheduler's", ssl.PROTOCOL_TLS_CLIENT, client),
    }
    ends["server"].verify_mode = ssl.CERT_REQUIRED
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    peers = {
        "client": ends["client"].wrap_bio(to_client, to_server, server_hostname=host),
        "server": ends["server"].wrap_bio(to_server, to_client, server_side=True),
    }
    for _ in range(4):
        for side, peer in peers.items():
            try:
                peer.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                whose = "extender's" if side == "client" else "kube-scheduler's client"
                raise ValueError(f"the {whose} certificate is refused: {error.verify_message}") from error
            except ssl.SSLError as error:
                raise ValueError(f"no TLS connection: {error.reason or error}") from error
    found = {"server": peers["client"].getpeercert(), "client": peers["server"].getpeercert()}
    return {side: ssl.cert_time_to_seconds(str((each or {})["notAfter"])) for side, each in found.items()}


def _context(whose: str, protocol: int, data: Mapping[str, str]) -> ssl.SSLContext:
    """Raises ValueError."""
    if missing := [name for name in FILES if not data.get(name)]:
        raise ValueError(f"{whose} Secret has no {', '.join(missing)}")
    context = ssl.SSLContext(protocol)
    with tempfile.TemporaryDirectory(prefix="gpumgr-tls-") as folder:  # of mode 0700; OpenSSL loads files only
        try:
            for name in FILES:
                (Path(folder) / name).write_bytes(base64.b64decode(data[name], validate=True))
            context.load_cert_chain(Path(folder) / "tls.crt", Path(folder) / "tls.key")
            context.load_verify_locations(Path(folder) / "ca.crt")
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"{whose} Secret: its certificate, key or CA can't be used: {error}") from error
    return context
