"""Tables of config/README.md, made from the code: `python -m tests.docs` (make docs). A test fails while the file says otherwise."""
