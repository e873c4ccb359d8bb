"""The first moments of `gpumgr run`."""

import subprocess
import sys
from typing import Final

#: A SIGHUP comes just when the agent's own modules begin to be imported. What it is asked to run with ends it afterwards.
_HUNG_UP: Final = """
import os, signal, sys

class HangUp:
    def find_spec(self, name, path=None, target=None):
        if name == "gpumgr.app":
            os.kill(os.getpid(), signal.SIGHUP)

sys.meta_path.insert(0, HangUp())
sys.argv = ["gpumgr", "run", "--standalone", "--set", "nonsense"]
from gpumgr.cli import main
main()
"""


def test_a_sighup_that_comes_before_anybody_listens_ends_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", _HUNG_UP], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (
        2,
        "gpumgr: --set 'nonsense': expected SECTION.KEY=VALUE, for example http.port=9000\n",
    )


def test_the_command_line_alone_does_not_import_the_agent() -> None:
    """`gpumgr --help` reads each command's first sentence."""
    told = "import sys, gpumgr.cli.run; print(*(name for name in sys.modules if name.startswith(('gpumgr.app', 'aiohttp'))))"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True).stdout == "\n"
