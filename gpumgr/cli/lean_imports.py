"""Imports for a process that runs for months: without what libraries load although gpumgr never uses it."""

import gc
import mimetypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

#: structlog imports them wherever they are installed, for tracebacks in colours and for threads that gpumgr does not have. It has no
#: option against that.
_UNUSED: Final = ("rich", "greenlet")
_WRAPPED: Final = ("Bool", "Bytes", "Double", "Enum", "Float", "Int32", "Int64", "String", "UInt32", "UInt64")
#: Modules that a library imports for a part of it that gpumgr does not use, with the names that it takes from them: aiohttp's command line,
#: the validators of attrs, betterproto's version, its dates and other types of google.protobuf (no message of gpumgr has one; a test checks
#: that), and prometheus_client's server. They need 2.5 MiB.
_STAND_INS: Final = {
    "argparse": ("ArgumentParser",),
    "attr.validators": (),
    "betterproto._version": ("__version__",),
    "betterproto.lib.google.protobuf": ("Duration", "Timestamp", *(f"{kind}Value" for kind in _WRAPPED)),
    "dateutil.parser": ("isoparse",),
    "wsgiref.simple_server": ("WSGIRequestHandler", "WSGIServer", "make_server"),
}
#: OpenSSL reads the system's certificates from the file that the first one names. The second is frozenlist's option against its extension,
#: which needs 1 MiB for the C++ library and speeds up nothing that gpumgr does.
_ENVIRONMENT: Final = {"SSL_CERT_FILE": os.devnull, "FROZENLIST_NO_EXTENSIONS": "1"}


@contextmanager
def lean_imports() -> Iterator[None]:
    """Imports inside it need less time and memory. Afterwards the process is as before, except for the imported modules.

    aiohttp makes two TLS contexts with all of the system's certificates when it is imported. gpumgr makes a context for each API server
    itself, so those two get none. It also reads the system's lists of file types, and gpumgr serves no files. The garbage collector would
    read all imported objects again and again, and finds next to nothing in them: it is off until they are there, and does not read them
    later either.
    """
    replaced = {name: _stand_in(name, names) for name, names in _STAND_INS.items()} | dict.fromkeys(
        _UNUSED
    )  # None makes an import fail
    replaced = {name: module for name, module in replaced.items() if name not in sys.modules}
    sys.modules |= replaced  # type: ignore[arg-type]
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ |= _ENVIRONMENT
    known_files, mimetypes.knownfiles = mimetypes.knownfiles, []
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        mimetypes.knownfiles = known_files
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        for name in replaced:
            del sys.modules[name]


def _stand_in(name: str, names: tuple[str, ...]) -> ModuleType:
    """Each of the names is the class `object`, so that a library can derive classes from it."""
    module = ModuleType(name)
    module.__dict__.update(dict.fromkeys(names, object))
    return module
