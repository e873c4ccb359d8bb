"""The page at `/`, a single file."""
