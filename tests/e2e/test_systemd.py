"""The agent as a service of a real systemd, put there by its own command, with the unit's whole sandbox and every path at its default.

The host is a container (nspawn.py); the kubelet is the simulated one, on this side of the folder /var/lib/kubelet that both see.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE
from gpumgr.enforcement import cdi
from gpumgr.sim.library import compile_library
from tests.libvgpu import build

from .agent import SIM
from .nspawn import ENVIRONMENT, STATE, Kubelet, Machine, booted
from .places import PROJECT
from .processes import wait_until

#: Short: the simulated kubelet's sockets lie in it.
KUBELET = STATE / "kubelet"
UNIT = "gpumgr.service"
GPUMGR = ENVIRONMENT / "bin" / "gpumgr"
CONFIG = Path("/etc/gpumgr/gpumgr.yaml")
PLUGINS = Path("/var/lib/kubelet/device-plugins")
#: What `systemd-analyze security` of systemd 252 says. A directive that goes makes it more, and has to be argued for.
EXPOSURE = 3.2
SETTINGS = """
kubernetes: {enabled: false}
enforcement: {backend: mps}
mps: {control_program: /opt/data/enforcement/fake_mps_control.py, protocol: "2"}
nvml: {smi_program: /opt/nvidia-smi}
"""
LIBRARY = Path("/opt/hami/libvgpu.so")
SMI = f"""#!/bin/sh
exec {ENVIRONMENT}/bin/python /opt/data/nvml/fake_nvidia_smi.py "$@"
"""
#: The GPUs are simulated; all else is the unit as it is shipped.
DROP_IN = f"""[Service]
ExecStart=
ExecStart={GPUMGR} run --sim {SIM} --sim-dir /var/lib/gpumgr/sim
Environment=XDG_CACHE_HOME=/opt/cache FAKE_SMI_NODE=/var/lib/gpumgr/sim
"""
#: As docs/operations.md has it.
FOLDERS = """[Unit]
RequiresMountsFor=/data/ledger /srv/vm

[Service]
ExecStartPre=+/usr/bin/mkdir --parents /data/ledger /srv/vm
ReadWritePaths=-/data -/srv/vm
"""
#: For the one test in which the agent hangs: that is to be noticed soon. In all others a machine that stalls would be taken for it.
IMPATIENT = "[Service]\nWatchdogSec=5\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree as a wheel, in a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, check=True, cwd=PROJECT, stdout=subprocess.PIPE)
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """HAMi-core's exported symbols, in a folder of their own, and the SHA-256."""
    made = tmp_path_factory.mktemp("hami") / LIBRARY.name
    return made, build(made)


@pytest.fixture
def host(wheel: Path, library: tuple[Path, str]) -> Iterator[Machine]:
    """A host with the wheel in its environment, and the service installed by it."""
    binds = {
        wheel.parent: Path("/opt/wheels"),
        KUBELET: PLUGINS.parent,
        compile_library().parent: Path("/opt/cache/gpumgr"),
        PROJECT / "tests" / "data": Path("/opt/data"),
        library[0].parent: LIBRARY.parent,
    }
    with booted(binds) as machine:
        machine.run(ENVIRONMENT / "bin/pip", "install", "--quiet", "--no-index", "--no-deps", Path("/opt/wheels") / wheel.name)
        machine.run(GPUMGR, "install", "systemd")
        yield machine


@pytest.fixture
def service(host: Machine) -> Machine:
    """The host with the agent's settings in place; the agent does not run."""
    host.write(CONFIG, SETTINGS)
    host.write(Path(f"/etc/systemd/system/{UNIT}.d/test.conf"), DROP_IN)
    host.write(Path("/opt/nvidia-smi"), SMI)
    host.run("chmod", "+x", "/opt/nvidia-smi")
    host.run("systemctl", "daemon-reload")
    return host


@pytest.fixture
def kubelet(service: Machine) -> Iterator[Kubelet]:  # noqa: ARG001 (ends before the service does)
    with Kubelet(KUBELET) as kubelet:
        yield kubelet


def ledger(host: Machine) -> list[dict[str, Any]]:
    allocations: list[dict[str, Any]] = json.loads(host.run(GPUMGR, "checkpoint", "show", "--output", "json"))["allocations"]
    return allocations


def named_ledger(host: Machine, *pods: str) -> list[dict[str, Any]]:
    """The ledger once it names these pods and no others: where the simulated kubelet's list came too late for the start of a pod's
    container, a later sweep names the pod."""
    wait_until(f"the names of {pods}", lambda: {each["pod"] for each in ledger(host)} == {*pods}, every=0.2)
    return ledger(host)


def journal(host: Machine, *matches: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in host.journal("json", *matches).splitlines()]


def test_an_installation_is_sound_and_can_be_repeated(host: Machine) -> None:
    unit = Path("/etc/systemd/system") / UNIT
    assert host.run("systemd-analyze", "verify", unit) == ""
    said = host.run("systemd-analyze", "security", "--no-pager", UNIT)
    overall = next(line for line in said.splitlines() if "Overall exposure level" in line)
    assert float(overall.partition(f"{UNIT}: ")[2].split()[0]) <= EXPOSURE, said
    assert host.run("cat", unit) == (PROJECT / "systemd" / UNIT).read_text()
    said = host.run(GPUMGR, "install", "systemd")
    assert said.startswith(f"unchanged  {unit}\nunchanged  {CONFIG}\n")
    assert "systemctl restart --no-block gpumgr" in said
    said = host.run("setpriv", "--reuid=65534", "--clear-groups", GPUMGR, "install", "systemd", check=False)
    assert said == "gpumgr: only root may install: run it with sudo\n"
    host.write(CONFIG, SETTINGS)
    assert "docs/operations.md" in host.run(GPUMGR, "install", "systemd", "--uninstall")
    assert host.run("sh", "-c", f"test ! -e {unit} && cat {CONFIG}") == SETTINGS
    host.run("systemctl", "mask", UNIT)
    assert "systemctl unmask gpumgr.service" in host.run(GPUMGR, "install", "systemd", check=False)
    host.run("systemctl", "unmask", UNIT)
    host.run(GPUMGR, "install", "systemd")
    host.run("systemctl", "daemon-reload")


def test_the_service_from_its_start_to_its_stop(service: Machine) -> None:
    """READY comes with the registration. Sockets, state and journal are in place; a reload and a restart keep the ledger; a stop is clean
    and leaves what running pods need."""
    service.run("systemctl", "start", "--no-block", UNIT)
    wait_until("a status", lambda: "registered 0/2" in service.show(UNIT, "StatusText"), every=0.1)
    assert service.show(UNIT, "ActiveState") == "activating"
    with Kubelet(KUBELET) as kubelet:
        wait_until("READY", lambda: service.show(UNIT, "ActiveState") == "active", every=0.1)
        assert set(kubelet.sim.registrations) == {CORE_RESOURCE, MEMORY_RESOURCE}
        said = "registered 2/2, 8 of 8 GPUs offered"
        wait_until(said, lambda: service.show(UNIT, "StatusText") == said, every=0.1)
        kubelet.run("seen")
        kubelet.run("other")
        sockets = [PLUGINS / path.name for path in kubelet.sim.plugin_folder.glob("gpumgr-*.sock")]
        assert len(sockets) == 2
        for path in (Path("/run/gpumgr/agent.sock"), Path("/run/gpu-manager.sock"), *sockets):
            service.run("test", "-S", path)
        assert service.run("stat", "-c", "%a %U", "/var/lib/gpumgr") == "700 root\n"
        wait_until("the pod in the usage", lambda: "demo" in service.run(GPUMGR, "usage"), every=0.2)
        # There is no container runtime, and there was no kubelet before.
        expected = {"cri_unavailable", "pod_resources_unavailable", "registration_failed"}
        wait_until("the warning of the runtime", lambda: "cri_unavailable" in warnings(service), every=0.2)
        assert set(warnings(service)) <= expected
        check_journal(service)
        agent = service.show(UNIT, "MainPID")
        service.run("systemctl", "reload", UNIT)
        wait_until("the settings read", lambda: journal(service, "GPUMGR_EVENT=config_reloaded"), every=0.1)
        assert service.show(UNIT, "MainPID") == agent
        before = named_ledger(service, "seen", "other")
        service.run("systemctl", "restart", UNIT)
        assert ledger(service) == before
        kubelet.run("next")
        named_ledger(service, "seen", "other", "next")
        service.run("systemctl", "stop", UNIT)
        state = {name: service.show(UNIT, name) for name in ("ActiveState", "Result", "ExecMainStatus")}
        assert state == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}
        assert not list(kubelet.sim.plugin_folder.glob("gpumgr-*.sock"))
        assert "mps" in service.run("ls", "/run/gpumgr")
        assert len(ledger(service)) == 3


def warnings(host: Machine) -> list[str]:
    """The agent's warnings in the journal; but for the one that a slow machine earns."""
    found = [str(each["GPUMGR_EVENT"]) for each in journal(host, f"_SYSTEMD_UNIT={UNIT}", "--priority=warning")]
    return [event for event in found if event != "background_call_takes_long"]


def check_journal(service: Machine) -> None:
    """The entries of demo/seen have fields to find them by."""
    granted = ("GPUMGR_POD=demo/seen", "GPUMGR_EVENT=allocation_granted")
    wait_until("both in the journal", lambda: len(journal(service, *granted)) > 1, every=0.2)
    entries = journal(service, *granted)
    assert {each["GPUMGR_RESOURCE"] for each in entries} == {"core", "memory"}
    (allocation,) = {each["GPUMGR_ALLOCATION"] for each in entries}
    assert {(each["PRIORITY"], each["SYSLOG_IDENTIFIER"], each["_SYSTEMD_UNIT"]) for each in entries} == {("6", "gpumgr", UNIT)}
    assert json.loads(entries[0]["MESSAGE"])["allocation"] == allocation
    found = journal(service, f"GPUMGR_ALLOCATION={allocation}")
    assert {each["GPUMGR_POD"] for each in found if "GPUMGR_POD" in each} == {"demo/seen"}


def test_a_hung_agent_is_killed_and_started_again(service: Machine, kubelet: Kubelet) -> None:
    service.write(Path(f"/etc/systemd/system/{UNIT}.d/zz-impatient.conf"), IMPATIENT)
    service.run("systemctl", "daemon-reload")
    service.run("systemctl", "start", UNIT)
    kubelet.run("running")
    before = named_ledger(service, "running")
    hung = service.show(UNIT, "MainPID")
    service.run("systemctl", "kill", "--signal=STOP", UNIT)
    wait_until("a new agent", lambda: service.show(UNIT, "MainPID") not in ("0", hung), every=0.1)
    wait_until("READY", lambda: service.show(UNIT, "ActiveState") == "active", every=0.1)
    assert "Watchdog timeout" in service.journal("cat", f"--unit={UNIT}")
    assert ledger(service) == before


def test_the_sandbox_lets_the_agent_do_its_work_and_no_more(service: Machine, kubelet: Kubelet) -> None:
    """MPS daemons are units of their own. The files of a running container are kept, a GPU is reset, secrets of pods are hidden, and a
    drop-in allows the folders of the settings."""
    elsewhere = "checkpoint: {dir: /data/ledger}\nprocess: {lock_path: /data/agent.lock}\ncontainer: {allocation_dir: /srv/vm}\n"
    service.write(CONFIG, SETTINGS.replace("{backend: mps}", "{backend: mps, orphan_grace_seconds: 1}") + elsewhere)
    service.write(Path(f"/etc/systemd/system/{UNIT}.d/folders.conf"), FOLDERS)
    service.run("systemctl", "daemon-reload")
    assert service.run("systemd-analyze", "verify", f"/etc/systemd/system/{UNIT}") == ""
    secret = PLUGINS.parent / "pods/uid/volumes/secret/token"
    service.write(secret, "s3cret")
    living, gone = "00112233445566ff", "ffeeddccbbaa9988"
    for each in (living, gone):
        service.write(Path("/run/cdi") / cdi.file_name(each), "{}")
    service.run("mkdir", f"/opt/{living}")
    # Type=exec: it is back when the process has its mounts.
    of_another_user = ("--property=Type=exec", "--property=User=nobody", f"--property=BindReadOnlyPaths=/opt/{living}:/mnt")
    service.run("systemd-run", "--unit=tenant", *of_another_user, "/usr/bin/sleep", "infinity")
    service.run("systemctl", "start", UNIT)
    wait_until("the removal", lambda: cdi.file_name(gone) not in service.run("ls", "/run/cdi"), every=0.2)
    assert service.run("ls", "/run/cdi") == f"{cdi.file_name(living)}\n"
    kubelet.run("far")
    assert service.run("ls", "/data", "/data/ledger").split()[:3] == ["/data:", "agent.lock", "ledger"]
    service.run("test", "-f", "/data/ledger/gpumgr.sqlite3")
    assert len(service.run("ls", "/srv/vm").split()) == 1
    inside = ("nsenter", f"--target={service.show(UNIT, 'MainPID')}", "--mount", "--")
    assert service.run(*inside, "ls", PLUGINS.parent / "pods") == ""
    assert service.run("cat", secret) == "s3cret"
    (daemon,) = service.daemons()
    assert "gpumgr-mps /run/gpumgr/mps/" in service.run(*inside, "cat", "/proc/mounts")
    service.run("systemctl", "restart", UNIT)
    kubelet.run("second")
    assert service.daemons() == [daemon]
    service.run(GPUMGR, "gpu", "cordon", "3", "--reason", "ECC errors")
    assert "successfully reset" in service.run(GPUMGR, "gpu", "reset", "3")
    assert service.show(UNIT, "ActiveState") == "active"


def test_a_region_of_hami_core_is_on_a_tmpfs_that_the_host_has(
    service: Machine, kubelet: Kubelet, library: tuple[Path, str]
) -> None:
    hami_core = f"hami_core: {{library_path: {LIBRARY}, library_sha256: {library[1]}}}\n"
    changed = SETTINGS.replace("{backend: mps}", "{backend: hami-core, orphan_grace_seconds: 1}")
    service.write(CONFIG, changed + hami_core)
    service.run("systemctl", "start", UNIT)
    kubelet.run("tenant")
    (mount,) = regions(service)
    assert "size=2560k" in mount
    service.run("systemctl", "restart", UNIT)
    assert regions(service) == [mount]
    kubelet.delete("tenant")
    # Without API server and container runtime only the kubelet's lists show, after a while, that the pod has ended.
    wait_until("the unmount", lambda: not regions(service), timeout=120, every=0.2)
    assert "container_files_not_bounded" not in warnings(service)


def regions(host: Machine) -> list[str]:
    """Lines of the mount table that a container runtime on the host uses."""
    return [line for line in host.run("cat", "/proc/1/mountinfo").splitlines() if " /run/gpumgr/hami-core/" in line]
