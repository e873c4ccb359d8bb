"""Imports without what gpumgr never uses, each in an interpreter of its own."""

import os
import subprocess
import sys

from tests.component.web.scene import CERTIFICATES


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment).stdout.strip()


def test_the_certificates_of_the_system_are_left_to_contexts_that_gpumgr_makes() -> None:
    code = """
import ssl
from gpumgr.cli.lean_imports import lean_imports

made, make = [], ssl.create_default_context
def recorded(*args, **named):
    made.append(make(*args, **named))
    return made[-1]
ssl.create_default_context = recorded
with lean_imports():
    import aiohttp
print([len(each.get_ca_certs()) for each in made], len(make().get_ca_certs()))
"""
    assert run_python(code, SSL_CERT_FILE=str(CERTIFICATES / "ca.crt")) == "[0] 1"


def test_what_structlog_imports_for_others_can_be_imported_later() -> None:
    code = """
import sys
from gpumgr.cli.lean_imports import lean_imports
with lean_imports():
    import structlog
print(sorted({"rich", "greenlet"} & {*sys.modules}))
import rich
"""
    assert run_python(code) == "[]"


def test_the_process_is_as_before() -> None:
    code = """
import gc, os
from gpumgr.cli.lean_imports import lean_imports
before = dict(os.environ)
try:
    with lean_imports():
        assert not gc.isenabled()
        raise ImportError
except ImportError:
    print(gc.isenabled(), os.environ == before, gc.get_freeze_count() > 0)
"""
    assert run_python(code) == run_python(code, SSL_CERT_FILE="/somewhere") == "True True True"
