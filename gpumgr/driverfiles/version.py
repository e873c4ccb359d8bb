"""The driver's version: two or three numbers ("418.67", "535.54.03"), kept as the text that file names end in."""

import re
from typing import Final

_NUMBER = r"[0-9]+(?:\.[0-9]+)+"
#: The first dotted number of the line, which libcuda-control.so uses as the suffix of the libraries that it loads.
_IN_TEXT: Final = re.compile(_NUMBER)
_IN_NAME: Final = re.compile(rf"\.so\.({_NUMBER})$")


def parse_proc_version(text: str) -> str | None:
    """From the text of /proc/driver/nvidia/version (its line "NVRM version: …"); None if it has none."""
    for line in text.splitlines():
        if line.startswith("NVRM version:") and (found := _IN_TEXT.search(line)):
            return found[0]
    return None


def version_of(library: str) -> str | None:
    """From the name of a library's file: libcuda.so.470.82.01 -> 470.82.01. None for libcuda.so.1 and libcuda.so."""
    found = _IN_NAME.search(library)
    return found[1] if found else None
