"""The enforcement backends as the doctor finds them: it asks each backend itself, so its reasons are those of the agent; and bursts."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.cli.examination import State, ok
from gpumgr.cli.examination.enforcement import NodeBackends, look_at_bursts
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.driver import Hardware
from gpumgr.driver.driver import Nvml
from gpumgr.settings import Settings, load_settings
from gpumgr.sim.library import prepare
from tests.component.cli.fake_agent import FakeAgent
from tests.component.driver.new_driver import NEW_NODE, lay_out_cgroups
from tests.libvgpu import build
from tests.unit.cli.node_story import NAMES, gpu

MPS = """#!/bin/sh
case "$*" in
  "-p 3 -h") echo "usage: nvidia-cuda-mps-control -p 3 [--multiuser] server|namespace|client VERB" ;;
  *) echo "  -d  -f  -multiuser-server" ;;
esac
"""


class Node:
    """A node without a driver; `settings` by dotted names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sections: dict[str, object] = {
            "checkpoint.dir": str(folder / "state"),
            "enforcement.run_dir": str(folder / "run"),
            "mps.control_program": "no-such-program",
            "nvml.library_path": str(folder / "none.so"),
        }

    def settings(self, **changed: object) -> Settings:
        """`changed`: "section__key" -> value."""
        own = {key.replace("__", "."): value for key, value in changed.items()}
        return load_settings(None, environ={}, overrides={**self._sections, **own})

    def backends(self, *, simulated: bool = False, **changed: Any) -> NodeBackends:
        nvml = Nvml(library_path=str(self.folder / "none.so"))
        hardware = Hardware(proc_root=self.folder / "proc", simulated=simulated)
        return NodeBackends(self.settings(**changed), SharedNvml(nvml), hardware)

    def mps(self) -> str:
        path = self.folder / "mps-control"
        path.write_text(MPS)
        path.chmod(0o755)
        return str(path)

    def library(self) -> dict[str, Any]:
        """Settings of a libvgpu.so that works."""
        path = self.folder / "libvgpu.so"
        return {"hami_core__library_sha256": build(path), "hami_core__library_path": str(path)}

    def empty_library(self) -> dict[str, Any]:
        """Settings of a library that exports nothing."""
        path = self.folder / "libcuda-control.so"
        subprocess.run(["cc", "-shared", "-x", "c", "-o", path, "/dev/null"], check=True)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return {"vcuda__library_path": str(path), "vcuda__library_sha256": sha256}


@pytest.fixture
def node(folder: Path) -> Node:
    (folder / "state").mkdir()
    return Node(folder)


@pytest.mark.parametrize(
    ("name", "setting", "state", "message"),
    [
        ("mps", "mps", "error", "NVIDIA's MPS control program 'no-such-program' was not found"),
        ("mps", "auto", "skipped", "this node can't use it: NVIDIA's MPS control program 'no-such-program' was not found"),
        ("mps", "nvml-memory", "skipped", "not used: enforcement.backend is nvml-memory"),
        ("limiter", "nvml-memory", "ok", "this node can use it"),
        ("mps", "none", "skipped", "not used: enforcement.backend is none"),
        ("nvml-memory", "nvml-memory", "error", "the NVML library can't be loaded: "),
        ("nvml-memory", "auto", "skipped", "this node can't use it: the NVML library can't be loaded: "),
        ("hami-core", "hami-core", "error", "no libvgpu.so is installed"),
        ("hami-core", "auto", "skipped", "this node can't use it: no libvgpu.so is installed"),
        ("vcuda", "vcuda", "error", "vcuda needs a libcuda-control.so: set vcuda.library_path and vcuda.library_sha256"),
        ("vcuda", "mps", "skipped", "not used: enforcement.backend is mps"),
    ],
)
async def test_what_a_node_lacks_is_an_error_only_for_a_backend_that_the_settings_name(
    name: str, setting: str, state: State, message: str, node: Node
) -> None:
    backends = node.backends(enforcement__backend=setting)
    found = await backends.look_at(name)
    assert (found.state, found.message.startswith(message)) == (state, True), found
    assert (found.remedy is not None) == (state == "error")


@pytest.mark.parametrize(("setting", "state"), [("auto", "skipped"), ("limiter", "ok")])
async def test_a_simulated_node_limits_only_with_a_backend_that_the_settings_name(setting: str, state: State, node: Node) -> None:
    backends = node.backends(simulated=True, enforcement__backend=setting)
    assert [(await backends.look_at("limiter")).state, (await backends.look_at_choice()).state] == ["ok", state]


async def test_an_override_names_a_backend_too(node: Node) -> None:
    found = await node.backends(enforcement__backend="none", enforcement__overrides=["team=mps"]).look_at("mps")
    assert found.state == "error"


async def test_a_control_program_that_works_is_ok_and_the_check_writes_no_file(node: Node) -> None:
    backends = node.backends(enforcement__backend="mps", mps__control_program=node.mps())
    assert await backends.look_at("mps") == ok("this node can use it")
    assert [*(node.folder / "state").iterdir()] == []


async def test_the_librarys_path_hash_and_version_are_shown(node: Node) -> None:
    library = node.library()
    shown = f"{library['hami_core__library_path']}, SHA-256 {library['hami_core__library_sha256'][:12]}…"
    assert await node.backends(**library).look_at("hami-core") == ok(shown)
    (node.folder / "version").write_text("5091a2f\n")
    assert await node.backends(**library).look_at("hami-core") == ok(f"{shown}, version 5091a2f")


async def test_another_library_than_the_settings_name_is_an_error(node: Node) -> None:
    changed = {**node.library(), "hami_core__library_sha256": "0" * 64}
    found = await node.backends(enforcement__backend="hami-core", **changed).look_at("hami-core")
    assert (found.state, f"but {'0' * 64} is set" in found.message) == ("error", True)


async def test_a_library_without_the_drivers_functions(node: Node) -> None:
    found = await node.backends(enforcement__backend="vcuda", **node.empty_library()).look_at("vcuda")
    assert (found.state, "does not export cuInit, cuMemAlloc_v2, nvmlInit" in found.message) == ("error", True)


@pytest.mark.parametrize(("setting", "state"), [("auto", "skipped"), ("limiter", "error")])
async def test_a_package_without_the_limiters_library_for_this_machine(
    node: Node, monkeypatch: pytest.MonkeyPatch, setting: str, state: State
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    found = await node.backends(enforcement__backend=setting).look_at("limiter")
    assert (found.state, "has no libgpumgr.so for riscv64" in found.message) == (state, True)


async def test_a_limit_of_the_driver_is_tried_and_each_gpus_limits_are_shown(node: Node) -> None:
    (node.folder / "new.yaml").write_text(NEW_NODE)
    sim = prepare(str(node.folder / "new.yaml"), node.folder / "node")
    cgroups = lay_out_cgroups(node.folder / "cgroup")
    settings = node.settings(cri__cgroup_root=str(cgroups))
    gpus = SharedNvml(Nvml(library_path=sim.library_path, cgroup_root=cgroups))

    def backends(settings: Settings = settings) -> NodeBackends:
        return NodeBackends(settings, gpus, Hardware())

    found = await backends().look_at_choice()
    hard = "GPU 0-1: memory hard (nvml-memory), cores soft (limiter); measured: limiter "
    assert (found.state, found.message.startswith(hard)) == ("ok", True)
    assert "hami-core" not in found.message, "it has a check of its own"
    assert (await backends().look_at("nvml-memory")).state == "ok"
    sim.control.set_result("nvmlDeviceSetMemoryLimits_v1", 4)
    found = await backends().look_at_choice()
    assert (found.state, found.message.startswith("GPU 0-1: memory soft (limiter), cores soft (limiter)")) == ("ok", True)
    found = await backends().look_at("nvml-memory")
    obstacle = f"this node can't use it: a limit on a new cgroup below {cgroups} fails: nvmlDeviceSetMemoryLimits_v1"
    assert (found.state, found.message.startswith(obstacle)) == ("skipped", True)
    named = replace(settings, enforcement=replace(settings.enforcement, backend="nvml-memory"))
    found = await backends(named).look_at_choice()
    assert (found.state, "enforcement.backend is nvml-memory, which this node can't use" in found.message) == ("error", True)


# -- bursts ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_socket(folder: Path) -> Settings:
    default = Settings()
    return replace(default, http=replace(default.http, socket=folder / "agent.sock"))


@pytest.mark.parametrize(
    ("excess", "message"),
    [
        ([0, None], "on each GPU the memory limits of the containers are within the GPU's memory"),
        (
            [3 * (1 << 30), (1 << 30)],
            "the memory limits of the containers on GPU0 exceed its memory by 3.0 GiB; the memory limits of the "
            "containers on GPU1 exceed its memory by 1.0 GiB",
        ),
    ],
)
async def test_the_excess_of_limits(with_socket: Settings, excess: list[int | None], message: str) -> None:
    agent = FakeAgent(with_socket.http.socket)
    agent.state["gpus"] = [gpu(index, NAMES[index], limits_excess_bytes=size) for index, size in enumerate(excess)]
    await agent.start()
    assert await look_at_bursts(with_socket, timeout_seconds=30) == ok(message)
    await agent.stop()


async def test_without_an_agent_the_limits_are_not_known(with_socket: Settings) -> None:
    away = await look_at_bursts(with_socket, timeout_seconds=30)
    assert (away.state, "no agent answers on this node" in away.message) == ("skipped", True)
