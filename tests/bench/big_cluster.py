"""Nodes and pods of a large cluster as an API server has them, of the usual length (4 kB), and the command of a scheduler of it."""

import json
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from gpumgr.common.units import BLOCK_MEBIBYTES, CORE_RESOURCE, MEMORY_RESOURCE
from gpumgr.kube.cluster_annotations import (
    INVENTORY_ANNOTATION,
    PLACEMENT_ANNOTATION,
    Inventory,
    InventoryGpu,
    encode,
)
from gpumgr.placement.devices import score_matrix
from tests.topologies import topology_from_matrix

GPUS: Final = 8
GPU_MEBIBYTES: Final = 81_408
PREFIX: Final = "gpu-node-eu-west-"
#: (cores, memory blocks) of one container.
SHAPES: Final = ((10, 16), (25, 64), (50, 100), (100, 0), (200, 0), (30, 60), (40, 90), (20, 30))
_FIELDS = [{"manager": f"controller-{number}", "operation": "Update", "fieldsV1": {f"f:{'x' * 240}": {}}} for number in range(6)]
_LEVELS = score_matrix(topology_from_matrix([["X" if a == b else "NV18" for b in range(GPUS)] for a in range(GPUS)]))
Json = dict[str, Any]


def name_of(node: int) -> str:
    return f"{PREFIX}{node:05d}"


def uuid_of(node: str, gpu: int) -> str:
    return f"GPU-{abs(hash((node, gpu))) & 0xFFFFFFFF:08x}-0000-4000-8000-{node[-5:]}{gpu:07d}"


def node(name: str) -> Json:
    gpus = tuple(
        InventoryGpu(uuid=uuid_of(name, gpu), model="NVIDIA H100 80GB HBM3", memory=GPU_MEBIBYTES, numa=gpu // 4)
        for gpu in range(GPUS)
    )
    inventory = encode(Inventory(driver="580.65.06", topology_manager="none", gpus=gpus, levels=_LEVELS))
    amounts = {"cpu": "192", CORE_RESOURCE: str(100 * GPUS), MEMORY_RESOURCE: str(GPUS * GPU_MEBIBYTES // BLOCK_MEBIBYTES)}
    images = [
        {"names": [f"registry.invalid/team/image-{number}@sha256:{'0' * 64}"], "sizeBytes": 1 << 30} for number in range(40)
    ]
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "labels": {"kubernetes.io/hostname": name},
            "annotations": {INVENTORY_ANNOTATION: inventory},
            "managedFields": _FIELDS,
        },
        "status": {"capacity": amounts, "allocatable": amounts, "images": images, "conditions": [ready]},
    }


def pod(uid: str, node_name: str, wanted: dict[str, str], annotations: dict[str, str], cpu: str = "1") -> Json:
    resources = {"limits": {"cpu": cpu, **wanted}, "requests": {"cpu": cpu, **wanted}}
    environment = [{"name": f"VARIABLE_{number}", "value": "some text of usual length"} for number in range(12)]
    container = {"name": "main", "image": "registry.invalid/work:1", "resources": resources, "env": environment}
    return {
        "metadata": {
            "namespace": "bench",
            "name": uid.removeprefix("uid-"),
            "uid": uid,
            "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": annotations,
            "managedFields": _FIELDS,
        },
        "spec": {"nodeName": node_name, "containers": [container], "schedulerName": "gpumgr-scheduler"},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def gpu_pod(uid: str, node_name: str, shares: list[tuple[str, int, int]]) -> Json:
    """`shares`: UUID, cores, MiB of each GPU."""
    whole = shares[0][1] == 100
    wanted = {CORE_RESOURCE: str(sum(cores for _, cores, _ in shares))}
    if not whole:
        wanted[MEMORY_RESOURCE] = str(shares[0][2] // BLOCK_MEBIBYTES)
    placement = {"containers": {"main": [list(each) for each in shares]}, "node": node_name, "version": 1}
    return pod(uid, node_name, wanted, {PLACEMENT_ANNOTATION: json.dumps(placement)})


class Cluster:
    """Its objects by number, in the order in which they are listed."""

    def __init__(self, nodes: int, pods: int, cpu_pods: int) -> None:
        self._pods = list(_placements(nodes, pods))
        self.counts = {"nodes": nodes, "pods": len(self._pods) + cpu_pods}
        self._nodes = nodes
        self._cpu = json.dumps(pod("uid-cpu-NUMBER", "NODE", {}, {}, "CPU"))

    def text(self, kind: str, number: int) -> str:
        if kind == "nodes":
            return json.dumps(node(name_of(number)))
        if number < len(self._pods):
            return json.dumps(gpu_pod(f"uid-gpu-{number}", *self._pods[number]))
        made = self._cpu.replace("NUMBER", str(number)).replace("NODE", name_of(number % self._nodes))
        return made.replace('"CPU"', f'"{number * 7 % 1993 + 1}m"')


def _placements(nodes: int, pods: int) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Random shapes on random GPUs with the room, so that hardly two nodes are alike."""
    source, left = random.Random(5), pods
    for number in range(nodes):
        name, free = name_of(number), [(100, GPU_MEBIBYTES)] * GPUS
        for _ in range(min(left, -(-pods // nodes))):
            cores, blocks = source.choice(SHAPES)
            count, amounts = max(1, cores // 100), (min(cores, 100), blocks * BLOCK_MEBIBYTES or GPU_MEBIBYTES)
            fitting = [gpu for gpu in range(GPUS) if free[gpu][0] >= amounts[0] and free[gpu][1] >= amounts[1]]
            if len(fitting) < count:
                continue
            chosen = sorted(source.sample(fitting, count))
            for gpu in chosen:
                free[gpu] = (free[gpu][0] - amounts[0], free[gpu][1] - amounts[1])
            left -= 1
            yield name, [(uuid_of(name, gpu), *amounts) for gpu in chosen]


def scheduler_command(api: str, folder: Path, name: str, *changes: str) -> tuple[list[str], str]:
    """`gpumgr scheduler` for this API server, with changes of its settings; and its URL."""
    config = folder / f"{name}.json"
    user = {"clusters": [{"name": "a", "cluster": {"server": api}}], "users": [{"name": "a", "user": {}}]}
    context = {"contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}], "current-context": "a"}
    config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **user, **context}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [f"--kubeconfig={config}", f"--listen={address}", "--insecure-loopback"]
    words += [f"--set={each}" for each in ("log.level=error", "scheduler.http_port=0", *changes)]
    return [sys.executable, "-m", "gpumgr", "scheduler", *words], f"http://{address}"
