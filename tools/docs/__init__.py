"""Tables of docs/*.md, generated from the code: `python -m tools.docs` (make docs). A test fails while a document is stale."""
