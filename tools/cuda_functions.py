"""Finds functions of CUDA's driver that the limiter does not know: `python -m tools.cuda_functions cuda.h`, with the header of a new CUDA,
prints them and fails. Add a hook (hooks.h) for each function that starts work on a GPU or takes its memory, and list the others in
cuda_functions.txt.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tools.limiter import SOURCES

#: The functions up to CUDA 13.5 that need no hook: they start no work on a GPU, or take so little of its memory that the
#: driver's figure is enough (external and graphics memory belong to others; green contexts are charged by that figure). Captures to CIG are
#: for command lists of Direct3D 12, which Linux does not have.
_WITHOUT_HOOK: Final = Path(__file__).with_suffix(".txt")
_TABLE: Final = """
#define HOOK(symbol, base, version, variant) HOOKED base symbol
#define PASS HOOK
#include "hooks.h"
"""


def unknown(header: str) -> list[str]:
    """The functions that `header`, the text of a cuda.h, declares, and that have neither a hook nor an entry in the list. A version of a
    hooked function needs a hook of its own."""
    command = ["cc", "-E", "-P", f"-I{SOURCES}", "-x", "c", "-"]
    table = subprocess.run(command, input=_TABLE, check=True, capture_output=True, text=True).stdout
    hooks = re.findall(r'HOOKED "(\w+)" (\w+)', table)
    bases, symbols = {base for base, _ in hooks}, {symbol for _, symbol in hooks}
    without, found = set(_WITHOUT_HOOK.read_text().split()), []
    for name in sorted(set(re.findall(r"CUDAAPI\s+(cu\w+)\(", header))):
        base = re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", name)
        if name not in symbols if base in bases else base not in without:
            found.append(name)
    return found


if __name__ == "__main__":
    names = unknown(Path(sys.argv[1]).read_text())
    print(*names, sep="\n")
    sys.exit(bool(names))
