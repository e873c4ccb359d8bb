"""MPS's program and the operator's libraries, as files."""

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gpumgr.cli.examination.backends import look_at_hami_core, look_at_library, look_at_mps
from gpumgr.cli.examination.choice import look_at_choice
from gpumgr.cli.examination.examine import State
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.driver.driver import Nvml
from gpumgr.enforcement.mps import launcher, probe
from gpumgr.enforcement.mps.commands import CAVEATS
from gpumgr.settings import Settings
from gpumgr.settings.schema import CheckpointSettings, CriSettings, EnforcementSettings, MpsSettings
from gpumgr.sim.library import prepare
from tests.component.driver.new_driver import NEW_NODE, lay_out_cgroups

NEW = """#!/bin/sh
case "$*" in
  "-p 3 -h") echo "usage: nvidia-cuda-mps-control -p 3 [--multiuser] server|namespace|client VERB" ;;
  *) echo "  -d  -f  -multiuser-server" ;;
esac
"""
OLD = "#!/bin/sh\necho 'usage: nvidia-cuda-mps-control [-d]'\nexit 1\n"
HERE: dict[str, Any] = {"run_dir": Path("/run/gpumgr"), "state_dir": Path("/nonexistent"), "in_pod": False, "timeout_seconds": 5}
HUNG = "#!/bin/sh\nexec sleep 60\n"
#: e_machine of this host's programs.
MACHINE = {"x86_64": 62, "aarch64": 183}[platform.machine()]


#: What is said of the limits themselves, by protocol.
MIND = {each: f"; mind: {'; '.join(CAVEATS[each])}" for each in CAVEATS}


def put_nsenter(folder: Path, script: str, patch: pytest.MonkeyPatch) -> None:
    (folder / "nsenter").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nsenter").chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def program(folder: Path, text: str) -> MpsSettings:
    path = folder / "mps-control"
    path.write_text(text)
    path.chmod(0o755)
    return MpsSettings(control_program=str(path))


@pytest.mark.parametrize(
    ("failure", "state", "said"),
    [(None, "ok", ", a daemon was tried and works"), ("an MPS daemon was tried and does not work: no GPU", "warning", "no GPU")],
)
async def test_the_agents_try_of_a_daemon_is_shown(tmp_path: Path, failure: str | None, state: State, said: str) -> None:
    mps = program(tmp_path, NEW)
    tried = probe.identify(Path(mps.control_program), 3, launcher.best_method())
    tried_before = probe.ProbeResult(program=tried, boot="b", failure=failure)
    (tmp_path / probe.RESULT_NAME).write_bytes(msgspec.json.encode(tried_before))
    result = await look_at_mps(mps, ["auto"], **HERE | {"state_dir": tmp_path})
    assert (result.state, said in result.message) == (state, True)
    (tmp_path / "mps-control").touch()
    changed = await look_at_mps(program(tmp_path, NEW + "\n"), ["auto"], **HERE | {"state_dir": tmp_path})
    assert "tried" not in changed.message


@pytest.mark.parametrize(
    ("text", "protocol", "state", "said"),
    [
        (NEW, "auto", "ok", f"speaks protocol 2 and 3 (3 is used), one server for all users{MIND[3]}"),
        (NEW, "2", "ok", f"speaks protocol 2 and 3 (2 is used), one server for all users{MIND[2]}"),
        (
            OLD,
            "auto",
            "warning",
            f"speaks protocol 2 (2 is used), a server for one user at a time: containers of other users wait{MIND[2]}",
        ),
        (OLD, "3", "error", "speaks protocol 2, mps.protocol is 3"),
    ],
)
async def test_what_the_program_can(text: str, protocol: str, state: State, said: str, tmp_path: Path) -> None:
    settings = replace(program(tmp_path, text), protocol=protocol)
    found = await look_at_mps(settings, {"auto"}, **HERE)
    assert (found.state, found.message) == (state, f"{settings.control_program} {said}")
    assert (found.remedy is None) == (state == "ok")


@pytest.mark.parametrize(("words", "state"), [({"auto"}, "warning"), ({"none", "mps"}, "error")])
async def test_a_program_that_hangs_or_is_missing(words: set[str], state: State, tmp_path: Path) -> None:
    found = await look_at_mps(program(tmp_path, HUNG), words, **{**HERE, "timeout_seconds": 0.1})
    assert (found.state, "did not end" in found.message) == (state, True)
    found = await look_at_mps(MpsSettings(control_program="no-such-program"), words, **HERE)
    assert (found.state, found.message) == (state, "NVIDIA's MPS control program 'no-such-program' was not found")
    assert "mps.control_program" in (found.remedy or "")


@pytest.mark.parametrize(("words", "state"), [({"auto"}, "warning"), ({"none", "mps"}, "error")])
async def test_a_pod_that_may_not_enter_its_host(
    words: set[str], state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nsenter(tmp_path, "echo 'nsenter: cannot open /proc/1/ns/mnt: Permission denied' >&2\nexit 1", monkeypatch)
    found = await look_at_mps(program(tmp_path, NEW), words, **{**HERE, "in_pod": True})
    assert (found.state, "cannot open /proc/1/ns/mnt: Permission denied" in found.message) == (state, True)
    assert "privileged: true" in (found.remedy or "")


async def test_in_a_pod_the_daemons_are_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_nsenter(tmp_path, 'shift 4; exec "$@"', monkeypatch)
    monkeypatch.setattr("gpumgr.enforcement.mps.control.obstacle", lambda *_: None)  # this host is no other host
    found = await look_at_mps(program(tmp_path, NEW), {"auto"}, **{**HERE, "in_pod": True})
    assert "one server for all users, daemons are units of the host's systemd; mind" in found.message


async def test_mps_that_is_not_configured_is_skipped() -> None:
    found = await look_at_mps(MpsSettings(control_program="no-such-program"), {"hami-core", "none"}, **HERE)
    assert (found.state, found.message) == ("skipped", "not used: enforcement.backend is hami-core and none")


# -- the choice --------------------------------------------------------------------------------------------------------------


async def test_a_limit_of_the_driver_is_tried_and_each_gpus_limits_are_shown(tmp_path: Path) -> None:
    (tmp_path / "new.yaml").write_text(NEW_NODE)
    sim = prepare(str(tmp_path / "new.yaml"), tmp_path / "node")
    cgroups = lay_out_cgroups(tmp_path / "cgroup")
    settings = Settings(
        checkpoint=CheckpointSettings(dir=tmp_path / "checkpoint"),
        cri=CriSettings(cgroup_root=cgroups),
        enforcement=EnforcementSettings(run_dir=tmp_path / "run"),
        mps=MpsSettings(control_program="no-such-program"),
    )
    gpus = SharedNvml(Nvml(library_path=sim.library_path, cgroup_root=cgroups))
    found = await look_at_choice(settings, gpus, in_pod=False)
    assert found.state == "ok"
    assert found.message.startswith("GPU 0-1: memory hard (nvml-memory), cores none; not: hami-core (no libvgpu.so is installed")
    sim.control.set_result("nvmlDeviceSetMemoryLimits_v1", 4)
    found = await look_at_choice(settings, gpus, in_pod=False)
    assert found.state == "warning"
    assert f"nvml-memory (a limit on a new cgroup below {cgroups} fails: nvmlDeviceSetMemoryLimits_v1" in found.message
    named = replace(settings, enforcement=replace(settings.enforcement, backend="nvml-memory"))
    found = await look_at_choice(named, gpus, in_pod=False)
    assert (found.state, "enforcement.backend is nvml-memory, which this node can't carry" in found.message) == ("error", True)


# -- libraries ---------------------------------------------------------------------------------------------------------------


def library(folder: Path, *, elf_class: int = 2) -> tuple[Path, str]:
    """The header of a shared library and nothing behind it, and its SHA-256."""
    identity = b"\x7fELF" + bytes([elf_class, 1, 1]) + bytes(9)
    content = identity + (3).to_bytes(2, "little") + MACHINE.to_bytes(2, "little") + bytes(44)
    path = folder / "libvgpu.so"
    path.write_bytes(content)
    return path, hashlib.sha256(content).hexdigest()


async def test_the_right_library(tmp_path: Path) -> None:
    path, digest = library(tmp_path)
    found = await look_at_library("hami-core", path, digest, {"auto"})
    assert (found.state, found.message) == ("ok", f"{path}, SHA-256 {digest[:12]}…")


async def test_an_installed_library_has_its_version(tmp_path: Path) -> None:
    path, digest = library(tmp_path)
    (tmp_path / "version").write_text("5091a2f\n")
    found = await look_at_library("hami-core", path, digest, {"auto"})
    assert (found.state, found.message) == ("ok", f"{path}, SHA-256 {digest[:12]}…, version 5091a2f")


async def test_a_library_that_is_needed_and_missing_can_be_installed() -> None:
    found = await look_at_library("hami-core", None, None, {"hami-core"})
    assert (found.remedy or "").startswith("install it with `gpumgr install library`, or set hami_core.library_path")
    found = await look_at_library("vcuda", None, None, {"vcuda"})
    assert (found.remedy or "").startswith("set vcuda.library_path")


async def test_another_library_than_was_meant(tmp_path: Path) -> None:
    path, digest = library(tmp_path)
    found = await look_at_library("vcuda", path, "0" * 64, {"auto"})
    assert found.state == "error"
    assert f"{path} has SHA-256 {digest}, but {'0' * 64} is set" in found.message
    assert found.remedy == "put the right file there, or change vcuda.library_path and library_sha256"


@pytest.fixture
def empty_library(tmp_path: Path) -> Path:
    path = tmp_path / "libcuda-control.so"
    subprocess.run(["cc", "-shared", "-x", "c", "-o", path, "/dev/null"], check=True)
    return path


async def test_a_library_without_the_drivers_functions(empty_library: Path) -> None:
    path = empty_library
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    found = await look_at_library("vcuda", path, digest, {"auto"})
    assert (found.state, "does not export cuInit, cuMemAlloc_v2, nvmlInit" in found.message) == ("error", True)
    assert (await look_at_library("hami-core", path, digest, {"auto"})).state == "ok"


SHARED = "661 641 0:24 /gpumgr {} rw shared:5 - tmpfs tmpfs rw"


@pytest.mark.parametrize(
    ("plain", "mount", "words", "said"),
    [
        (False, SHARED, {"auto"}, None),
        (True, SHARED, {"auto"}, "the regions of 1 containers lie in plain folders, such as {}/hami-core/00112233445566ff"),
        (False, SHARED.replace("shared", "master"), {"mps", "hami-core"}, "mounts below {} do not reach the host"),
        (False, SHARED.replace("shared:5 ", ""), {"auto"}, "mounts below {} do not reach the host"),
        (True, "", {"mps"}, None),
    ],
)
async def test_regions_that_can_fill_run_dir_are_shown(
    tmp_path: Path, *, plain: bool, mount: str, words: set[str], said: str | None
) -> None:
    path, digest = library(tmp_path)
    run_dir, proc = tmp_path / "run", tmp_path / "proc"
    for folder in (run_dir / "hami-core", proc / "self"):
        folder.mkdir(parents=True)
    (proc / "self/mountinfo").write_text(f"640 1 0:53 / / rw - overlay overlay rw\n{mount.format(run_dir)}\n")
    if plain:
        (run_dir / "hami-core/00112233445566ff").mkdir()
    found = await look_at_hami_core(path, digest, words, run_dir, proc, in_pod=True)
    assert found.message.startswith(f"{path}, SHA-256 {digest[:12]}…")
    if said is None:
        assert found.state == "ok"
    else:
        assert (found.state, said.format(run_dir) in found.message) == ("warning", True)
        assert "Bidirectional" in (found.remedy or "")
    assert (await look_at_hami_core(path, digest, words, run_dir, proc, in_pod=False)).state == (
        "warning" if said and plain else "ok"
    )


async def test_a_library_for_32_bits_or_none_at_all(tmp_path: Path) -> None:
    path, digest = library(tmp_path, elf_class=1)
    found = await look_at_library("hami-core", path, digest, set())
    assert found.state == "error"
    assert "64-bit" in found.message
    found = await look_at_library("hami-core", tmp_path / "none.so", digest, set())
    assert found.state == "error"
    assert "No such file" in found.message


@pytest.mark.parametrize(
    ("path", "sha256", "words", "state", "message"),
    [
        (None, None, {"auto"}, "skipped", "hami_core.library_path is not set"),
        (None, "0" * 64, {"auto"}, "skipped", "hami_core.library_path is not set"),
        (None, None, {"auto", "hami-core"}, "error", "hami_core.library_path is not set"),
        (Path("/lib/libvgpu.so"), None, {"auto"}, "error", "hami_core.library_sha256 is not set"),
    ],
)
async def test_settings_that_are_incomplete(
    path: Path | None, sha256: str | None, words: set[str], state: State, message: str
) -> None:
    found = await look_at_library("hami-core", path, sha256, words)
    assert (found.state, found.message) == (state, message)
