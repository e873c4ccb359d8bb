"""Imports for a process that runs for months: without what libraries load although gpumgr never uses it."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: structlog imports them wherever they are installed, for tracebacks in colours and for threads that gpumgr does not have. It has no
#: option against that.
_UNUSED: Final = ("rich", "greenlet")
#: OpenSSL reads the system's certificates from the file that this environment variable names.
_CERTIFICATES: Final = "SSL_CERT_FILE"


@contextmanager
def lean_imports() -> Iterator[None]:
    """Imports inside it need less time and memory. Afterwards the process is as before, except for the imported modules.

    aiohttp makes two TLS contexts with all of the system's certificates when it is imported. gpumgr makes a context for each API server
    itself, so those two get none. The garbage collector would read all imported objects again and again, and finds next to nothing in them:
    it is off until they are there, and does not read them later either.
    """
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]  # None makes an import fail
    before = os.environ.get(_CERTIFICATES)
    os.environ[_CERTIFICATES] = os.devnull
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        del os.environ[_CERTIFICATES]
        if before is not None:
            os.environ[_CERTIFICATES] = before
        for name in hidden:
            del sys.modules[name]
