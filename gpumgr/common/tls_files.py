"""Which settings of TLS files need each other. Pure; used by the settings and by the servers."""


def missing_file(section: str, cert_file: object, key_file: object, client_ca_file: object) -> tuple[str, str] | None:
    """The setting that lacks another one, and a sentence about it; None if the settings are complete. A file that is None is not set."""
    if cert_file is None and key_file is None and client_ca_file is None:
        return None
    if cert_file is None:
        named = f"{section}.tls_key_file" if key_file is not None else f"{section}.client_ca_file"
        return named, f"is set and {section}.tls_cert_file is not: name the certificate, too, or none of them for plain HTTP"
    if key_file is None:
        return (
            f"{section}.tls_cert_file",
            f"is set and {section}.tls_key_file is not: name the file with the certificate's key (it may be the same one)",
        )
    return None
