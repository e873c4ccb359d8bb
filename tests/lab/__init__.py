"""The real enforcement programs, in runc containers over a fake GPU, with the real agent: see tests/README.md."""
