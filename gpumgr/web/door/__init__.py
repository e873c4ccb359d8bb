"""Who comes in: sockets, how many, TLS and tokens, which rooms, and what happens around each page."""
