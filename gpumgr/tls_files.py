"""Which settings of TLS files need each other. Pure; used by the settings and by the web server."""


def missing_file(cert_file: object, key_file: object, client_ca_file: object) -> tuple[str, str] | None:
    """The setting that lacks another one, and a sentence about it; None if the settings are complete. A file that is None is not set."""
    if cert_file is None and key_file is None and client_ca_file is None:
        return None
    if cert_file is None:
        named = "http.tls_key_file" if key_file is not None else "http.client_ca_file"
        return named, "is set and http.tls_cert_file is not: name the certificate, too, or none of them for plain HTTP"
    if key_file is None:
        return (
            "http.tls_cert_file",
            "is set and http.tls_key_file is not: name the file with the certificate's key (it may be the same one)",
        )
    return None
