"""`gpumgr migrate` as a person runs it, on files, sockets and an API server."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from gpumgr.cli.migrate import command
from gpumgr.common.errors import GpumgrError, InputError
from gpumgr.ledger.store import SqliteCheckpoint
from gpumgr.settings import check_settings, load_settings
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.kubelet import SimContainer, SimPod
from tests.component.cli.examination.conftest import listening

RECORDS = {
    "PodGPUMapping": {
        "u1": {"main": {"Devices": ["/dev/nvidia0"], "Cores": 50, "Memory": 1 << 30}},
        "u2": {"main": {"Devices": ["/dev/nvidia1"], "Cores": 100, "Memory": 0}},
    }
}
KUBELET = {
    "Data": {
        "PodDeviceEntries": [
            {"PodUID": "u1", "ContainerName": "main", "ResourceName": "tencent.com/vcuda-core", "DeviceIDs": ["x"]}
        ],
        "RegisteredDevices": {"tencent.com/vcuda-core": ["a", "b"], "nvidia.com/gpu": ["c"]},
    },
    "Checksum": 1,
}


def migrate(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(command, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def planned(node: Path) -> dict[str, Any]:
    """What is printed for this node's files."""
    flags = f"--share-mode --checkpoint-path={node} --device-plugin-path={node}"
    document: dict[str, Any] = json.loads(migrate("gpu-manager", "--flags", flags, "--output", "json").stdout)
    return document


@pytest.fixture
def node(folder: Path) -> Path:
    """What gpu-manager and the kubelet leave on a node."""
    (folder / "gpumanager_internal_checkpoint").write_text(json.dumps(RECORDS))
    (folder / "kubelet_internal_checkpoint").write_text(json.dumps(KUBELET))
    pods = {"kind": "PodList", "items": [{"metadata": {"namespace": "team", "name": "a", "uid": "u1"}}]}
    (folder / "pods.json").write_text(json.dumps(pods))
    return folder


def test_gpu_manager_is_printed_and_nothing_is_written(node: Path) -> None:
    before = sorted(path.name for path in node.iterdir())
    with listening(node / "vcore.sock"), listening(node / "nvidia-gpu.sock"):
        result = migrate(
            *("gpu-manager", "--node", "gpu-7", "--pods", node / "pods.json", "--to", node / "gpumgr.yaml", "--output", "json"),
            *("--flags", f"--share-mode --query-port=5679 --checkpoint-path={node} --device-plugin-path={node}"),
        )
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["settings"] == {
        "kubelet": {"device_plugin_dir": str(node)},
        "checkpoint": {"gpu_manager_checkpoint": f"{node}/gpumanager_internal_checkpoint"},
        "http": {"port": 5679},
    }
    assert document["pods"] == [
        "team/a (main): keeps /dev/nvidia0 (vcuda-core 50, vcuda-memory 4) until it ends",
        f"left behind, as the kubelet has forgotten their pods: 1 of 2 records in {node}/gpumanager_internal_checkpoint",
    ]
    assert document["warnings"] == [
        f"gpu-manager answers at {node}/vcore.sock: stop it before gpumgr starts",
        "the kubelet has 2 ids of tencent.com/vcuda-core from gpu-manager",
    ]
    assert document["applied"] is None
    assert [path.name for path in sorted(node.iterdir()) if not path.is_socket()] == before


def test_applied_it_writes_our_settings_and_no_others(node: Path) -> None:
    to = node / "new/gpumgr.yaml"
    options = ("gpu-manager", "--flags", f"--query-port=5679 --checkpoint-path={node}", "--to", to, "--apply")
    assert migrate(*options).stdout.endswith(f"\n{to}: written\n")
    assert check_settings(to) == ()
    settings = load_settings(to, environ={}, overrides={})
    assert (settings.http.port, settings.placement.share_mode) == (5679, False)
    assert (to.stat().st_mode & 0o777, [path.name for path in to.parent.iterdir()]) == (0o644, ["gpumgr.yaml"])
    assert migrate(*options).stdout.endswith(f"\n{to}: unchanged\n")
    to.write_text("http: {port: 1}\n")
    with pytest.raises(InputError, match="exists and has other content"):
        migrate(*options)
    assert to.read_text() == "http: {port: 1}\n"


def test_a_manifest_that_is_none_of_gpu_managers(folder: Path) -> None:
    manifest = folder / "ds.yaml"
    for text, said in (
        ("kind: Service\n", "has no container that runs gpu-manager"),
        ("a: 1\n", "not a Kubernetes object"),
        ("{", "neither JSON nor YAML"),
        ("", "has no Kubernetes object"),
    ):
        manifest.write_text(text)
        with pytest.raises(InputError, match=said):
            migrate("gpu-manager", "--manifest", manifest)
    with pytest.raises(InputError, match="No such file"):
        migrate("gpu-manager", "--manifest", folder / "none")


def test_a_checkpoint_that_is_named_must_be_there(node: Path) -> None:
    for wrong in (node / "nope", node):
        with pytest.raises(InputError, match=f"--checkpoint {wrong} is not a readable file"):
            migrate("gpu-manager", "--flags", "--share-mode", "--checkpoint", wrong)


@pytest.mark.parametrize("name", ["--all", "a b", "GPU-7", "-", "x" * 254])
@pytest.mark.parametrize("source", [("gpu-manager", "--flags", "--share-mode"), ("hami", "--pods", "all.json")])
def test_what_is_no_nodes_name_is_refused(source: tuple[str, ...], name: str) -> None:
    result = migrate(*source, "--node", name)
    assert result.exit_code == 2
    assert f"Invalid value for '--node': '{name}' is not a node name: lower-case letters" in result.output


def test_a_kubelet_without_device_entries_has_no_running_pods_of_gpu_manager(node: Path) -> None:
    empty = {"Data": {"PodDeviceEntries": [], "RegisteredDevices": {"tencent.com/vcuda-core": ["a"]}}}
    (node / "kubelet_internal_checkpoint").write_text(json.dumps(empty))
    document = planned(node)
    assert [line.partition(" keeps")[0] for line in document["pods"]] == ["pod uid u1 (main):", "pod uid u2 (main):"]
    assert "names no pod" in document["warnings"][0]


@pytest.mark.parametrize("registered", [[], {"tencent.com/vcuda-core": 5}, 5])
def test_a_kubelet_checkpoint_of_another_format_counts_as_unreadable(node: Path, registered: object) -> None:
    (node / "kubelet_internal_checkpoint").write_text(
        json.dumps({"Data": {"PodDeviceEntries": [], "RegisteredDevices": registered}})
    )
    assert "the kubelet's checkpoint cannot be read" in planned(node)["warnings"][0]


@pytest.mark.parametrize("output", ["text", "json"])
def test_names_in_its_checkpoint_do_nothing_to_the_terminal(node: Path, output: str) -> None:
    hostile = "\x1b[2Jmain\nrm -r /\x7f\u202e"
    record = {hostile: {"Devices": ["/dev/nvidia0"], "Cores": 50, "Memory": 1 << 30}}
    (node / "gpumanager_internal_checkpoint").write_text(json.dumps({"PodGPUMapping": {f"u{hostile}": record}}))
    flags = f"--share-mode --checkpoint-path={node} --device-plugin-path={node / 'none'}"
    said = migrate("gpu-manager", "--flags", flags, "--output", output).stdout
    assert all(line.isprintable() for line in said.split("\n"))
    assert "x1b[2Jmain" in said
    assert not any(line.startswith("rm") for line in said.splitlines())


# -- HAMi --------------------------------------------------------------------------------------------------------------------


def hami_pod() -> dict[str, Any]:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "8000", "nvidia.com/gpucores": "30"}
    return {
        "kind": "Pod",
        "metadata": {"namespace": "team", "name": "a", "uid": "u1"},
        "spec": {"nodeName": "gpu-7", "containers": [{"name": "main", "resources": {"limits": limits}}]},
    }


def test_hami_from_files(folder: Path) -> None:
    (folder / "all.json").write_text(
        json.dumps({"kind": "List", "items": [hami_pod(), {"kind": "Node", "metadata": {"name": "gpu-7"}}]})
    )
    scheduler = {"containers": [{"name": "x", "command": ["scheduler", "--gpu-scheduler-policy=spread"]}]}
    deployment = {"kind": "Deployment", "metadata": {}, "spec": {"template": {"spec": scheduler}}}
    (folder / "hami.yaml").write_text(yaml.safe_dump_all([deployment, {"kind": "ConfigMap", "metadata": {}}]))
    to = folder / "gpumgr.yaml"
    result = migrate(
        *("hami", "--node", "gpu-7", "--pods", folder / "all.json"),
        *("--manifest", folder / "hami.yaml", "--to", to, "--apply"),
    )
    assert "  team/a: HAMi's scheduler has chosen no GPUs of this node for it; delete it first\n" in result.stdout
    assert result.stdout.endswith(f"\n{to}: written\n")
    assert yaml.safe_load(to.read_text()) == {
        "node": {"profile": "both"},
        "placement": {"policy": "spread"},
        "metrics": {"hami_names": True},
    }


def test_a_take_over_is_planned_and_its_result_compared(folder: Path) -> None:
    pod = hami_pod()
    pod["metadata"]["annotations"] = {"hami.io/vgpu-node": "gpu-7", "hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,8000,30:;"}
    (folder / "all.json").write_text(json.dumps({"kind": "List", "items": [pod]}))
    to = folder / "gpumgr.yaml"
    options = ("hami", "--node", "gpu-7", "--pods", folder / "all.json", "--to", to)
    result = migrate(*options, "--apply")
    assert "  team/a (main): keeps GPU-a (8000 MiB, 30 cores)\n" in result.stdout
    assert yaml.safe_load(to.read_text())["node"] == {"profile": "both"}
    to.write_text(f"checkpoint: {{dir: {folder}/state}}\n")
    with pytest.raises(GpumgrError, match=r"no checkpoint of a running agent in .*/state: "):
        migrate(*options, "--verify")
    asyncio.run(SqliteCheckpoint.open(folder / "state").close())
    result = migrate(*options, "--verify")
    assert (result.exit_code, result.stdout) == (
        1,
        "team/a (main) is not adopted: the log has the reason (allocation_not_adopted)\n",
    )


def test_hami_wants_to_know_the_pods() -> None:
    with pytest.raises(InputError, match="give --kubeconfig FILE, or --pods FILE"):
        migrate("hami")


def changed(each: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with this at the dotted path."""
    copy: dict[str, Any] = json.loads(json.dumps(each))
    *above, last = path.split(".")
    inner: Any = copy
    for key in above:
        inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[int(key)]
    inner[last] = value
    return copy


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Pod", "metadata", []),
        ("Pod", "spec.containers", [5]),
        ("Pod", "spec.containers.0.resources.limits", []),
        ("Pod", "spec.containers.0.env", [5]),
        ("Pod", "metadata.name", "--all"),
        ("Node", "metadata.annotations", {"--all": ""}),
        ("DaemonSet", "spec.template.spec.nodeSelector", []),
        ("DaemonSet", "spec.template.spec.containers", [{"args": ["\0"]}]),
    ],
)
def test_an_object_of_another_shape_is_named_with_its_key(folder: Path, kind: str, path: str, value: object) -> None:
    each = hami_pod() if kind == "Pod" else {"kind": kind, "metadata": {"name": "gpu-7"}}
    file = folder / "all.json"
    file.write_text(json.dumps({"kind": "List", "items": [changed(each, path, value)]}))
    where = re.sub(r"\.(\d+)", r"[\1]", path)
    with pytest.raises(InputError) as caught:
        migrate("hami", "--node", "gpu-7", "--pods", file)
    said = str(caught.value)
    assert said.startswith(f"{file}: {kind} ")
    assert where in said.replace("`", "") or "key in" in said


def test_a_missing_kubeconfig_is_an_error_message_of_this_command(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InputError) as caught:
        migrate("hami", "--node", "gpu-7", "--kubeconfig", folder / "nope")
    said = str(caught.value)
    assert said.startswith(f"the kubeconfig {folder}/nope can't be used: No such file or directory; ")
    assert "--kubeconfig" in said
    assert "kubernetes." not in said
    assert caplog.records == []


async def test_hami_from_the_api_server(folder: Path) -> None:
    async with SimApiServer("gpu-7") as api:
        api.written.annotations["hami.io/node-handshake"] = "Requesting"
        api.put(SimPod(namespace="team", name="plain", uid="u9", containers=(SimContainer(name="main"),)))
        kubeconfig = api.kubeconfig(folder / "kubeconfig")
        arguments = ("hami", "--node", "gpu-7", "--kubeconfig", kubeconfig, "--output", "json")
        document = json.loads((await asyncio.to_thread(migrate, *arguments)).stdout)
        assert document["pods"] == ["no pod of this node has a GPU from HAMi"]
        api.forbidden.add(("get", "nodes"))
        with pytest.raises(GpumgrError, match="403"):
            await asyncio.to_thread(migrate, *arguments)
    with pytest.raises(GpumgrError, match=r"the API server of .* did not answer"):
        await asyncio.to_thread(migrate, *arguments)
