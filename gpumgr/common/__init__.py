"""General tools (event loop, files, log, parsers), the errors and units that all parts share, and gRPC over unix sockets."""
