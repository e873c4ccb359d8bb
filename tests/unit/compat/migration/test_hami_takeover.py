"""The plan for a node on which pods keep running, and the comparison afterwards."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gpumgr.common.errors import SettingsError
from gpumgr.common.units import Amounts
from gpumgr.compat.hami.config import Config, read_config
from gpumgr.compat.hami.takeover import HamiState, differences, plan_take_over, running_pods, specs
from gpumgr.compat.objects import PodSpec, parse_object
from gpumgr.compat.plan import Plan, text_of
from gpumgr.kube.hami_formats import DEVICE_CORDON, LOCK, REGISTER, RegisteredGpu, encode_register
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ids import RegisteredGpu as OwnGpu
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.placement.requests import ReplicaRequest
from gpumgr.settings.hami_resources import ReplicaResources

from .test_hami_plan import NODE, TO, UUIDS, config_map, pod, workload

DATA = Path(__file__).parents[3] / "data" / "migration"
A, B = "GPU-a", "GPU-b"
GPU = RegisteredGpu(uuid=A, count=2, memory_mebibytes=8000, cores=100, model="NVIDIA")
ALLOCATED = "hami.io/vgpu-devices-allocated"


def node(*gpus: RegisteredGpu, **annotations: str) -> dict[str, Any]:
    registered = gpus or (GPU, replace(GPU, uuid=B))
    return {"kind": "Node", "metadata": {"name": "gpu-7", "annotations": {REGISTER: encode_register(registered), **annotations}}}


def placed(
    name: str, text: str, *, on: str = "gpu-7", uid: str | None = None, phase: str = "Running", **limits: str
) -> dict[str, Any]:
    made = pod(
        name, phase=phase, annotations={"hami.io/vgpu-node": on, ALLOCATED: text}, **(limits or {"gpu": "1", "gpumem": "3000"})
    )
    made["metadata"]["uid"] = uid or f"uid-{name}"
    return made


def state(*documents: dict[str, Any], **found: Any) -> tuple[Config, HamiState]:
    objects = [parse_object(each, "a test") for each in documents]
    return read_config(objects, "gpu-7"), HamiState(node="gpu-7", objects=objects, **found)


def plan(*documents: dict[str, Any], **found: Any) -> Plan:
    return plan_take_over(*state(*documents, **found), to=TO)


ONE = f"{A},NVIDIA,3000,30:;"


def test_the_whole_plan() -> None:
    """Pods keep what HAMi's scheduler chose; HAMi's values become settings, and its plugin's label comes back."""
    text = "nvidia: {resourceCountName: acme.com/vgpu, deviceSplitCount: 6, deviceMemoryScaling: 1.5}"
    plugin = {"name": "device-plugin", "image": "projecthami/hami:v2.10.0"}
    made = plan(
        node(**{DEVICE_CORDON: UUIDS[0]}),
        config_map("device-config.yaml", text),
        workload("DaemonSet", plugin, nodeSelector={"vgpu": "yes"}),
        placed("one", ONE, **{"acme.com/vgpu": "1"}),
        placed("pair", f"{A},NVIDIA,1000,0:{B},NVIDIA,1000,0:;", **{"acme.com/vgpu": "2"}),
        pod("plain"),
        pod("waits", phase="Pending", annotations={}, **{"acme.com/vgpu": "1"}),
        folders=[Path("/usr/local/vgpu"), Path("/tmp/vgpulock")],
        library=(Path("/usr/local/vgpu/libvgpu.so.v2.10.0"), "ab" * 32),
    )
    assert text_of(made, str(TO)) == (DATA / "hami.txt").read_text()
    bare = plan(NODE)
    assert bare.pods == ("no pod of this node has a GPU from HAMi",)
    assert bare.stop[1].startswith("kubectl label node gpu-7 gpu-  "), "the label that HAMi's plugin selects by default"
    assert [line.split()[3] for line in bare.start if line.startswith("gpumgr gpu cordon")] == [*UUIDS]


def test_a_value_that_the_settings_can_not_have_is_refused() -> None:
    with pytest.raises(SettingsError, match="device_split_count"):
        plan(NODE, config_map("device-config.yaml", "nvidia: {deviceSplitCount: 0}"))


@pytest.mark.parametrize(
    ("limits", "request_"),
    [
        ({"gpu": "2", "gpumem": "3000", "gpucores": "30"}, ReplicaRequest(count=2, memory_mebibytes=3000, cores=30)),
        ({"gpumem": "3k"}, ReplicaRequest(count=1, memory_mebibytes=3000)),
        ({"gpumem-percentage": "150"}, ReplicaRequest(count=1, cores=100)),
        ({"gpu": "1", "gpumem": "0", "gpucores": "200"}, ReplicaRequest(count=1, cores=100)),
        ({"gpu": "1", "gpumem": "a lot"}, ReplicaRequest(count=1, cores=100)),
        ({"gpu": "0"}, None),
        ({"gpu": 0, "gpumem": "3000"}, None),
        ({"rdma": "1"}, None),
    ],
)
def test_requests_are_read_as_hami_reads_them(limits: dict[str, Any], request_: ReplicaRequest | None) -> None:
    (spec,) = specs(msgspec.convert(pod("one", **limits)["spec"], type=PodSpec), ReplicaResources())
    assert spec.replicas == request_


@pytest.mark.parametrize("text", [
    "", ";", f"{A},NVIDIA,3000;", f"{A},NVIDIA,3000,30", f"{A},NVIDIA,-1,30:;", f"{A},NVIDIA,16Gi,30:;", f"{A},NVIDIA,99999999999,30:;",
    f"{A},NVIDIA,3000,30:{A}", "nonsense", ONE + ONE,
])  # fmt: skip
def test_a_list_that_can_not_be_read_or_is_of_other_containers_prevents_it(text: str) -> None:
    made = plan(node(), placed("one", text))
    (warning,) = made.warnings
    assert warning.startswith("team/one: the annotation hami.io/vgpu-devices-allocated can't be read: ")
    assert warning.endswith("; delete it first")


@pytest.mark.parametrize(
    ("documents", "found", "warning"),
    [
        ([node(), pod("one", gpu="1")], {}, "team/one: HAMi's scheduler has chosen no GPUs of this node for it; delete it first"),
        ([node(), placed("one", ONE, on="gpu-8")], {}, "team/one: HAMi's scheduler has chosen no GPUs of this node for it"),
        ([node(), placed("one", "GPU-x,NVIDIA,1,1:;")], {}, "team/one (main): HAMi has registered no GPU GPU-x on this node"),
        (
            [node(replace(GPU, mode="mig")), placed("one", ONE)],
            {},
            "team/one (main): it has a MIG device of GPU-a",
        ),
        (
            [node(), *(placed(f"p{number}", f"{A},NVIDIA,3000,0:;") for number in range(3))],
            {},
            "GPU-a: its pods have 9000 MiB, 0 cores, 3 containers, and HAMi registered 8000 MiB, 100 cores, 2 containers; delete one",
        ),
        (
            [node(**{LOCK: "2026-01-01T00:00:00Z,team,x"})],
            {},
            "HAMi's scheduler has locked this node (hami.io/mutex.lock: 2026-01-01T00:00:00Z,team,x): wait until",
        ),
        ([node(**{REGISTER: "[1]"})], {}, f"the annotation {REGISTER} can't be read, so no GPU is compared"),
        ([placed("one", ONE)], {}, "the Node object gpu-7 was not given"),
        ([node(), placed("one", ONE)], {"kubelet": frozenset()}, "team/one (main): it has no GPU according to the kubelet"),
        (
            [node()],
            {"kubelet": frozenset({("u9", "x")})},
            "pod uid u9 (x): it has GPUs according to the kubelet, but is not among the pods above",
        ),
    ],
)
def test_what_prevents_it_is_named_with_the_remedy(documents: list[Any], found: dict[str, Any], warning: str) -> None:
    (text,) = plan(*documents, **found).warnings
    assert text.startswith(warning)


def test_an_init_container_and_the_app_count_at_their_maximum() -> None:
    made = placed("steps", f"{A},NVIDIA,8000,0:;{A},NVIDIA,7000,0:;")
    made["spec"]["initContainers"] = [{**made["spec"]["containers"][0], "name": "first"}]
    assert plan(node(), made).warnings == ()


def test_all_devices_of_one_gpu_that_a_container_has_count() -> None:
    made = plan(node(), placed("two", f"{A},NVIDIA,5000,10:{A},NVIDIA,4000,20:;", gpu="2", gpumem="4000"))
    assert made.pods == (f"team/two (main): keeps {A} (9000 MiB, 30 cores)",)
    (warning,) = made.warnings
    assert warning.startswith("GPU-a: its pods have 9000 MiB, 30 cores, 2 containers, and HAMi registered 8000 MiB")


def test_a_sidecar_and_the_app_count_together() -> None:
    made = placed("steps", f"{A},NVIDIA,5000,0:;{A},NVIDIA,4000,0:;")
    made["spec"]["initContainers"] = [{**made["spec"]["containers"][0], "name": "first", "restartPolicy": "Always"}]
    (warning,) = plan(node(), made).warnings
    assert warning.startswith("GPU-a: its pods have 9000 MiB")


def test_nothing_is_wrong_where_the_kubelet_has_the_same_containers() -> None:
    assert plan(node(), placed("one", ONE), kubelet=frozenset({("uid-one", "main")})).warnings == ()


REGISTRY = GpuRegistry((OwnGpu("first", A, 8192), OwnGpu("second", B, 8192)))


def adopted(**changes: Any) -> Ledger:
    (first, _) = REGISTRY.gpus
    made = Allocation(
        id="a",
        pod=("team", "one"),
        uid="uid-one",
        container="main",
        gpus={first.name: Amounts(30, 3000)},
        device_ids={},
        granted_at=0.0,
    )
    return Ledger(REGISTRY, {"a": replace(made, **changes)})


def test_the_comparison_names_each_difference() -> None:
    running, problems = running_pods(*state(node(), placed("one", ONE)))
    assert problems == []
    first, second = (gpu.name for gpu in REGISTRY.gpus)
    assert [*differences(running, adopted())] == []
    assert [*differences(running, Ledger(REGISTRY))] == [
        "team/one (main) is not adopted: the log has the reason (allocation_not_adopted)"
    ]
    assert [*differences(running, adopted(gpus={second: Amounts(30, 3000)}))] == [
        f"team/one (main) is adopted on {second} and not on GPU-a, which HAMi's scheduler chose"
    ]
    assert [*differences(running, adopted(gpus={first: Amounts(30, 2000)}))] == [
        "team/one (main) is adopted with 2000 MiB of GPU-a instead of 3000 MiB"
    ]
