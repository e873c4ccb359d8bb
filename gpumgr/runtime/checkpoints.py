"""Runs the program that suspends and resumes processes (gpumgr.runtime.cuda_checkpoint), once for each operation."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Final

from gpumgr.common.aio import kill_program
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.suspension import Moved, Suspension, Verb

PROGRAM: Final = Path(__file__).with_name("cuda_checkpoint.py")
#: How long a suspension waits for GPU work that was submitted before it.
WORK_SECONDS: Final = 10.0
#: The time limit of one operation: a fixed part, and more for each GiB. An H200 moved 1.6 GiB/s or more.
_LIMIT_SECONDS, _LIMIT_SECONDS_PER_GIB = 60.0, 10.0


async def move(
    verb: Verb, allocation: AllocationId, suspension: Suspension, *, library: str, proc_root: Path, lock_file: Path
) -> Moved:
    """Moves the container's GPU memory to the host (suspend) or back (resume). If it is not known what the program did, `held` has all
    processes. `library`: name or path of libcuda. `lock_file` is created if missing, in a folder that exists while containers run."""
    seconds = _LIMIT_SECONDS + _LIMIT_SECONDS_PER_GIB * (suspension.size_bytes / (1 << 30))
    all_of_them = [pid for pid, _ in suspension.processes]
    try:
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(PROGRAM),
            library,
            str(proc_root),
            verb,
            str(lock_file),
            allocation,
            f"{WORK_SECONDS:g}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        why = f"the program that moves its memory can't be started: {error}"
        return Moved(held=all_of_them, error=why, untouched=True)
    request = json.dumps({"processes": suspension.processes, "required": suspension.required}).encode()
    try:
        async with asyncio.timeout(seconds):
            said, errors = await program.communicate(request)
    except TimeoutError:
        await kill_program(program)
        return Moved(held=all_of_them, error=f"the driver did not {verb} it within {seconds:g} s")
    try:
        return decode_json(said, Moved)
    except UnreadableText:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return Moved(held=all_of_them, error=f"the program that moves its memory ended: {last or 'it was killed'}")
