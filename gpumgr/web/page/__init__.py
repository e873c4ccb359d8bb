"""The page at `/`: one file, read by whoever serves it."""
