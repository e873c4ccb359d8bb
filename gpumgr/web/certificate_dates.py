"""Whether clients accept a certificate today, found out by a TLS handshake in memory: the standard library can't read its dates."""

import contextlib
import ssl
import time
from pathlib import Path
from typing import Final

from gpumgr.common.errors import SettingsError

#: OpenSSL's X509_V_ERR_*.
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10


def check_serves(section: str, cert_file: Path, key_file: Path) -> None:
    """Raises SettingsError if a client that trusts this very certificate refuses it: it has expired, or is not for servers."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert_file, key_file)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert_file)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(3):
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        dates = {
            _EXPIRED: "has expired; renew it",
            _NOT_YET_VALID: "is not valid yet; look at its dates (`openssl x509 -dates`) and at this machine's clock",
        }
        remedy = dates.get(error.verify_code, f"is none that clients accept: {error.verify_message}; name one for servers")
        raise SettingsError(f"{section}.tls_cert_file {cert_file} {remedy}") from error


def check_authorities(section: str, context: ssl.SSLContext, client_ca_file: Path | None) -> None:
    """Raises SettingsError if no CA certificate that `context` trusts is valid today, so that no client could connect."""
    ends = [ssl.cert_time_to_seconds(str(authority["notAfter"])) for authority in context.get_ca_certs()]
    if ends and max(ends) < time.time():
        raise SettingsError(f"{section}.client_ca_file {client_ca_file} has no CA certificate that has not expired; renew it")
