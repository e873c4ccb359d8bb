"""The cluster page, a single file."""
