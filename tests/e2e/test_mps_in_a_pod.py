"""MPS where the agent is a pod: its daemons are units of the host's systemd, which it reaches from the shipped image.

The host is a container with a systemd of its own (nspawn.py), and that systemd plays the container runtime: a pod is a unit of
kubepods.slice with the image as its root, with the chart's mounts, settings and capabilities, the host's processes, and a cgroup that
can be killed. NVIDIA's program is played by one that lies on the host alone.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpumgr.sim.control import SimControl
from gpumgr.sim.library import compile_library
from tools import chart

from . import image_agent
from .agent import SIM
from .nspawn import STATE, Kubelet, Machine, booted
from .places import PROJECT
from .processes import wait_until

#: Short: sockets lie in them, or in folders that they are shown as.
KUBELET = STATE / "kubelet"
SIM_DIR = STATE / "sim"
IMAGE = Path("/opt/image")
PROGRAM = Path("/opt/data/enforcement/fake_mps_control.py")
VALUES: Mapping[str, Any] = {
    "settings": {
        "kubernetes": {"enabled": False},
        "enforcement": {"backend": "mps"},
        "mps": {"control_program": str(PROGRAM), "protocol": "2"},
        "http": {"address": "127.0.0.1"},
        "log": {"format": "json"},
    },
    "hostNetwork": True,
    "mps": {"enabled": True},
    "extraArgs": ["--sim", SIM, "--sim-dir", "/opt/sim"],
    "extraEnv": [{"name": "XDG_CACHE_HOME", "value": "/opt/cache"}],
    "extraVolumes": [{"name": name, "hostPath": {"path": f"/opt/{name}"}} for name in ("cache", "sim")],
    "extraVolumeMounts": [{"name": name, "mountPath": f"/opt/{name}"} for name in ("cache", "sim")],
}
#: As VALUES, for an agent that may do without MPS.
AUTO: Mapping[str, Any] = {**VALUES, "settings": {**VALUES["settings"], "enforcement": {"backend": "auto"}}}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's root, unpacked: it may be written to."""
    folder = tmp_path_factory.mktemp("image")
    for layer in image_agent.read_archive(image_agent.build_image())[1]:
        subprocess.run(["tar", "--extract", f"--directory={folder}"], input=layer, check=True)
    return folder


@pytest.fixture(scope="module")
def host(image: Path) -> Iterator[Machine]:
    """A host on which nothing of gpumgr is installed."""
    binds = {
        image: IMAGE,
        KUBELET: Path("/var/lib/kubelet"),
        SIM_DIR: Path("/opt/sim"),
        compile_library().parent: Path("/opt/cache/gpumgr"),
        PROJECT / "tests" / "data": Path("/opt/data"),
    }
    with booted(binds) as machine:
        machine.run("mkdir", "/run/containerd")
        yield machine


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    with Kubelet(KUBELET) as kubelet:
        yield kubelet


def unit_of(host: Machine, values: Mapping[str, Any], *prefix: str) -> list[str]:
    """The words for systemd-run that make a unit what the chart's container is to a runtime; `prefix` goes before its program.

    systemd knows one propagation for all of a unit's mounts: that of the folder of the daemons.
    """
    text = chart.render(values)
    spec, container = chart.pod_spec(text), chart.agent_container(text)
    assert spec["hostPID"]
    host.write(Path("/etc/pod/gpumgr.yaml"), chart.settings_file(text))
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    properties = [
        f"RootDirectory={IMAGE}",
        "MountAPIVFS=yes",
        "BindReadOnlyPaths=/etc/pod:/etc/gpumgr",
        "TemporaryFileSystem=/tmp",
    ]
    for name, path in {each["name"]: each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each}.items():
        host.run("mkdir", "-p", path)
        properties.append(f"Bind{'ReadOnly' if mounts[name].get('readOnly') else ''}Paths={path}:{mounts[name]['mountPath']}")
    properties.append(f"MountFlags={'slave' if mounts['run'].get('mountPropagation') == 'HostToContainer' else 'private'}")
    security = container["securityContext"]
    if not security["privileged"]:
        properties.append(f"CapabilityBoundingSet={' '.join(f'CAP_{name}' for name in security['capabilities']['add'])}")
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each} | {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "NODE_NAME": "node",
        "PATH": "/opt/gpumgr/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    return [
        "--quiet",
        "--slice=kubepods.slice",
        *(f"--property={each}" for each in properties),
        *(f"--setenv={name}={value}" for name, value in variables.items()),
        "--",
        *prefix,
        "/opt/gpumgr/bin/gpumgr",
    ]


def start_pod(host: Machine, name: str) -> None:
    """The agent's pod, until it is killed."""
    arguments = chart.agent_container(chart.render(VALUES))["args"]
    host.run("systemd-run", f"--unit={name}", "--property=Type=exec", *unit_of(host, VALUES), *arguments)


def kill_pod(host: Machine, name: str) -> None:
    """As a runtime does at last: all processes of the cgroup."""
    assert host.show(name, "ControlGroup") == f"/kubepods.slice/{name}.service"
    host.run("systemctl", "kill", "--kill-whom=all", "--signal=KILL", name)
    host.run("sh", "-c", f"while systemctl is-active --quiet {name}; do sleep 0.05; done")


def doctor(host: Machine, values: Mapping[str, Any], *prefix: str) -> Mapping[str, Any]:
    """What `gpumgr doctor` says of MPS in such a pod."""
    words = ["systemd-run", "--wait", "--pipe", *unit_of(host, values, *prefix)]
    said = host.run(*words, "doctor", "--config", "/etc/gpumgr/gpumgr.yaml", "--sim", SIM, "--output", "json", check=False)
    found: Mapping[str, Any]
    (found,) = (each for each in json.loads(said) if each["check"] == "mps")
    return found


def events(host: Machine, pod: str) -> list[str]:
    """What the agent of this pod logged."""
    return [json.loads(line)["event"] for line in host.journal("cat", f"--unit={pod}").splitlines() if line.startswith("{")]


def exclusive() -> int:
    """How many GPUs are in EXCLUSIVE_PROCESS mode."""
    control = SimControl(SIM_DIR / "control.txt")
    return sum(control.compute_mode(index) == 3 for index in range(8))


def test_daemons_outlive_the_agents_pod_and_the_next_one_adopts_them(host: Machine, kubelet: Kubelet) -> None:
    start_pod(host, "agent-1")
    kubelet.run("first")
    (unit,) = host.daemons()
    pid = host.show(unit, "MainPID")
    assert host.show(unit, "ControlGroup") == f"/system.slice/{unit}"
    assert host.run("findmnt", "--noheadings", "--output=FSTYPE,SIZE", "gpumgr-mps").split() == ["tmpfs", "1G"]
    assert exclusive() == 1

    kill_pod(host, "agent-1")
    assert host.show(unit, "MainPID") == pid
    assert host.daemons() == [unit]

    start_pod(host, "agent-2")
    kubelet.run("second")
    assert host.show(unit, "MainPID") == pid
    wait_until("the adoption in the log", lambda: "mps_daemon_adopted" in events(host, "agent-2"))
    assert not {"mps_daemon_started", "mps_daemon_restarting", "mps_daemon_trouble"} & set(events(host, "agent-2"))

    kubelet.delete("first")
    kubelet.delete("second")
    # This node has neither an API server nor a container runtime: only the kubelet's lists show, after a while, that the pods have ended.
    wait_until("their ids free", lambda: events(host, "agent-2").count("allocation_freed") == 2, timeout=120, every=1)
    kubelet.run("whole", cores=800, memory_blocks=0)  # for which the daemon has to make room
    assert exclusive() == 0
    wait_until("no daemon", lambda: not host.daemons())
    wait_until("its mount gone", lambda: "gpumgr-mps" not in host.run("cat", "/proc/mounts"))
    kill_pod(host, "agent-2")


def test_doctor_reports_missing_permissions_of_the_pod(host: Machine) -> None:
    assert doctor(host, VALUES)["state"] == "ok"
    without = doctor(host, {**AUTO, "mps": {"enabled": False}})
    assert (without["state"], "mps.enabled" in without["message"]) == ("skipped", True), without
    dropped = doctor(host, {**AUTO, "mps": {"enabled": False}, "privileged": False})
    assert (dropped["state"], "Operation not permitted" in dropped["message"]) == ("skipped", True), dropped
    assert "give the pod `privileged: true`" in dropped["message"]
    alone = doctor(host, VALUES, "unshare", "--pid", "--fork", "--mount-proc", "--propagation", "unchanged")
    assert (alone["state"], "`hostPID: true`" in alone["remedy"]) == ("error", True), alone
