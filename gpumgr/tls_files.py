"""Which files TLS needs, by the settings that name them. Pure, and down here because two ask: the settings, and the web server."""


def misfit(cert_file: object, key_file: object, client_ca_file: object) -> tuple[str, str] | None:
    """The setting that stands there without another that it needs, and words for that; None if all fit. None for a file: not named."""
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
