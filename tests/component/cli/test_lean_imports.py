"""Imports without what gpumgr never uses, each in an interpreter of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.component.web.scene import CERTIFICATES


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment).stdout.strip()


@pytest.mark.parametrize(
    ("code", "unused"),
    [
        ("import gpumgr.cli; gpumgr.cli.group(['--help'], standalone_mode=False)", {"aiohttp", "rich", "pynvml"}),
        # A container runtime starts it every few seconds.
        ("import gpumgr.cli.healthy", {"aiohttp", "grpc", "grpclib", "rich", "kubernetes_asyncio", "pynvml"}),
        # Each worker process imports it.
        ("import gpumgr.cli.simulate", {"aiohttp", "gpumgr.cluster.scheduler"}),
    ],
)
def test_a_command_imports_no_more_than_it_takes(code: str, unused: set[str]) -> None:
    assert run_python(f"import sys\n{code}\nprint({unused} & {{*sys.modules}})").endswith("set()")


def test_the_certificates_of_the_system_are_left_to_contexts_that_gpumgr_makes() -> None:
    code = """
import ssl
from gpumgr.cli.daemon import lean_imports

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


def test_stand_ins_last_as_long_as_the_imports() -> None:
    code = """
import sys
from gpumgr.cli.daemon import _STAND_INS, lean_imports
with lean_imports():
    import aiohttp.web, betterproto, prometheus_client, structlog
    from gpumgr._pb.deviceplugin.v1beta1 import Device
left = {*_STAND_INS, "typing_extensions", "zipfile", "frozenlist._frozenlist", "rich", "greenlet"} & {*sys.modules}
print(sorted(left), Device().parse(bytes(Device(id="a"))).id)
from dateutil.parser import isoparse
import pickle, rich
import typing_extensions
assert typing_extensions.TypeVar("T", default=int).__default__ is int
print(isoparse("2026-01-01").year, pickle.loads(pickle.dumps(1)))
"""
    assert run_python(code).split("\n") == ["[] a", "2026 1"]


def test_no_message_needs_the_types_that_have_stand_ins() -> None:
    generated = [path.read_text() for path in Path("gpumgr/_pb").rglob("*.py")]
    assert any("betterproto.message_field" in text for text in generated)
    assert [name for text in generated for name in ("betterproto.lib", "datetime", "timedelta", "wraps=") if name in text] == []


def test_the_process_is_as_before() -> None:
    code = """
import gc, mimetypes, os
from gpumgr.cli.daemon import lean_imports
before, files = dict(os.environ), list(mimetypes.knownfiles)
try:
    with lean_imports():
        assert not gc.isenabled()
        raise ImportError
except ImportError:
    print(gc.isenabled(), os.environ == before, mimetypes.knownfiles == files, gc.get_freeze_count() > 0)
"""
    assert run_python(code) == run_python(code, SSL_CERT_FILE="/somewhere") == "True True True True"
