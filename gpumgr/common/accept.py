"""Accept and Accept-Encoding headers of HTTP requests."""


def ranked(header: str) -> list[tuple[str, float, dict[str, str]]]:
    """Entries of the header (RFC 9110, 12.4.2): name in lower case, weight 0..1, other parameters. Malformed ones weigh 0."""
    entries = []
    for entry in header.split(","):
        name, *words = (word.strip() for word in entry.split(";"))
        parameters = {key.strip().lower(): value.strip() for key, _, value in (word.partition("=") for word in words)}
        try:
            weight = float(parameters.pop("q", "1"))
        except ValueError:
            weight = 0.0
        entries.append((name.lower(), weight, parameters))
    return entries


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header allows gzip; a missing one does not."""
    weights = {name: weight for name, weight, _ in ranked(accept_encoding)}
    return weights.get("gzip", weights.get("*", 0.0)) > 0
