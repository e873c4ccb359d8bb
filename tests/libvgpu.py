"""A stand-in for HAMi-core's library, compiled from tests/data/enforcement/libvgpu.c."""

import hashlib
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("data") / "enforcement" / "libvgpu.c"


def build(path: Path, *flags: str) -> str:
    """Compiles it to `path`; `flags` choose a wrong one. Returns its SHA-256."""
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags, "-o", path, SOURCE], check=True)
    return hashlib.sha256(path.read_bytes()).hexdigest()
