"""A container runtime, as far as the agent asks it, in a process of its own: CRI v1 out of a file (places.Places writes it).

`python -m tests.bench.runtime SOCKET FILE` serves until standard input ends. grpcio, like the floor: what it costs is not the agent's.
"""

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgspec

from gpumgr.ledger.node_use import Container
from tests.cri_api import cri

_SERVICE = "runtime.v1.RuntimeService"


class Runtime:
    """`file` holds a JSON list of containers, read at every call: they come and go by its replacement."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def handlers(self) -> Any:
        methods = {"ListContainers": self.list, "ContainerStatus": self.status}
        return grpc.method_handlers_generic_handler(
            _SERVICE, {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
        )

    def list(self, _request: bytes, _context: Any) -> bytes:
        answer = cri.ListContainersResponse()
        for container in self._containers().values():
            made = answer.containers.add(id=container.id, pod_sandbox_id=container.id[::-1], state=cri.CONTAINER_RUNNING)
            made.metadata.name = container.name
            made.image.image = made.image_ref = f"registry.example/inference/server@sha256:{container.id}"
            made.created_at = int(container.created_at * 1e9)
            namespace, pod = container.pod
            labels = {"pod.namespace": namespace, "pod.name": pod, "pod.uid": container.pod_uid, "container.name": container.name}
            made.labels.update({f"io.kubernetes.{key}": value for key, value in labels.items()})
            made.annotations.update({f"io.kubernetes.container.{key}": "0" for key in ("hash", "restartCount")})
        return bytes(answer.SerializeToString())

    def status(self, request: bytes, context: Any) -> bytes:
        container = self._containers().get(cri.ContainerStatusRequest.FromString(request).container_id)
        if container is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such container")
            raise AssertionError("abort raises")
        info = {"pid": container.pid or 0, "runtimeSpec": {"linux": {"cgroupsPath": container.cgroup}}}
        return bytes(cri.ContainerStatusResponse(info={"info": json.dumps(info)}).SerializeToString())

    def _containers(self) -> Mapping[str, Container]:
        return {each.id: each for each in msgspec.json.decode(self._file.read_bytes(), type=list[Container])}


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Runtime(Path(sys.argv[2])).handlers(),))
    server.add_insecure_port(f"unix:{sys.argv[1]}")
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(None).wait()


if __name__ == "__main__":
    main()
