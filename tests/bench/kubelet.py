"""The kubelet's side of a benchmark: grpcio both ways, the kubelet's dial options and its order of calls, nothing else.

Unlike the stand-in of `gpumgr.sim` it shares no code with the agent, and it takes the time of every call. Threads, not a loop: the
agent's own calls back (PodResources) are answered while ours wait.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tests.bench.figures import Stopwatch
from tests.kubelet_api import deviceplugin as pb
from tests.kubelet_api import deviceplugin_services, podresources, podresources_services

PodKey = tuple[str, str]
#: What was called and how many ids it was about -> seconds of each call.
Times = dict[tuple[str, int], list[float]]

PATIENCE_SECONDS = 30.0


def dial(path: Path) -> Any:
    """A channel as the kubelet makes it. Its own subchannels: a new process behind the same path must not inherit a back-off."""
    options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(f"unix:{path}", options=options)


class Plugin:
    """One device plugin as the kubelet has it: `ids` are the healthy ones of its newest list."""

    def __init__(self, path: Path) -> None:
        self.channel = dial(path)
        self.stub = deviceplugin_services.DevicePluginStub(self.channel)
        self.ids: tuple[str, ...] = ()

    def first_list(self) -> float:
        """Seconds until a new ListAndWatch has given its first list."""
        with Stopwatch() as watch:
            stream = self.stub.ListAndWatch(pb.Empty())
            next(stream)
        stream.cancel()
        return watch.seconds


def admit(plugins: Mapping[str, Plugin], wanted: Mapping[str, int], times: Times, free: Mapping[str, Sequence[str]]) -> Any:
    """One container: for each resource GetPreferredAllocation out of `free`, then Allocate. Yields (resource, ids) as they are given."""
    for resource, size in wanted.items():
        stub, available = plugins[resource].stub, free[resource]
        ask = pb.ContainerPreferredAllocationRequest(available_deviceIDs=available, allocation_size=size)
        request = pb.PreferredAllocationRequest(container_requests=[ask])
        with Stopwatch() as watch:
            answer = stub.GetPreferredAllocation(request)
        times["prefer", len(available)].append(watch.seconds)
        preferred = answer.container_responses[0].deviceIDs if answer.container_responses else ()
        ids = tuple(preferred) or tuple(available[:size])
        grant = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
        with Stopwatch() as watch:
            stub.Allocate(grant)
        times["allocate", len(ids)].append(watch.seconds)
        yield resource, ids


class Kubelet:
    """Serves Registration and PodResources in `folder`, follows every plugin that registers, and admits pods."""

    def __init__(self, folder: Path) -> None:
        self.plugin_folder = folder / "device-plugins"
        self.pod_resources_socket = folder / "pod-resources" / "kubelet.sock"
        for path in (self.plugin_folder, self.pod_resources_socket.parent):
            path.mkdir()
        self.plugins: dict[str, Plugin] = {}
        self.pods: dict[PodKey, dict[str, tuple[str, ...]]] = {}
        self.times: Times = defaultdict(list)
        self._news = threading.Condition()
        self._server: Any = None

    # -- life cycle --------------------------------------------------------------------------------------------------------

    def start(self) -> float:
        """Deletes all sockets, as a starting kubelet does, and serves. The time (monotonic) from which it can be reached."""
        for file in self.plugin_folder.glob("*.sock"):
            file.unlink()
        self._server = grpc.server(ThreadPoolExecutor(8))
        deviceplugin_services.add_RegistrationServicer_to_server(self, self._server)
        podresources_services.add_PodResourcesListerServicer_to_server(self, self._server)
        for path in (self.pod_resources_socket, self.plugin_folder / "kubelet.sock"):
            self._server.add_insecure_port(f"unix:{path}")
        self._server.start()
        return time.monotonic()

    def stop(self) -> None:
        """Goes away with all its connections; pods stay known."""
        self._server.stop(None).wait()
        for plugin in list(self.plugins.values()):
            plugin.channel.close()
        self.wait("no plugin", lambda: not self.plugins)

    def wait(self, what: str, condition: Any) -> float:
        """Until it holds; then the time (monotonic). Raises TimeoutError."""
        with self._news:
            if not self._news.wait_for(condition, PATIENCE_SECONDS):
                raise TimeoutError(f"not within {PATIENCE_SECONDS:.0f} s: {what}")
            return time.monotonic()

    def wait_offered(self, counts: Mapping[str, int]) -> float:
        """Until every resource has so many healthy ids; then the time (monotonic)."""
        return self.wait(f"{counts} offered", lambda: {name: len(plugin.ids) for name, plugin in self.plugins.items()} == counts)

    # -- pods --------------------------------------------------------------------------------------------------------------

    def admit(self, pod: PodKey, wanted: Mapping[str, int]) -> None:
        """Ids of ended pods are offered again here, as in the real one."""
        held = {resource: {text for other in self.pods.values() for text in other.get(resource, ())} for resource in wanted}
        free = {name: [text for text in self.plugins[name].ids if text not in held[name]] for name in wanted}
        self.pods[pod] = {}
        for resource, ids in admit(self.plugins, wanted, self.times, free):
            self.pods[pod][resource] = ids

    def pre_start(self, pod: PodKey) -> dict[str, float]:
        """The pod's container is about to start (again). Seconds of the call for each resource."""
        took = {}
        for resource, ids in self.pods[pod].items():
            request = pb.PreStartContainerRequest(devices_ids=ids)
            with Stopwatch() as watch:
                self.plugins[resource].stub.PreStartContainer(request)
            took[resource] = watch.seconds
        return took

    def end(self, pod: PodKey) -> None:
        del self.pods[pod]

    # -- what plugins call -------------------------------------------------------------------------------------------------

    def Register(self, request: Any, _context: Any) -> Any:  # noqa: N802 (the method's name in the API)
        plugin = Plugin(self.plugin_folder / request.endpoint)
        plugin.stub.GetDevicePluginOptions(pb.Empty(), timeout=10)
        with self._news:
            self.plugins[request.resource_name] = plugin
        threading.Thread(target=self._watch, args=(request.resource_name, plugin), daemon=True).start()
        return pb.Empty()

    def List(self, _request: Any, _context: Any) -> Any:  # noqa: N802 (the method's name in the API)
        answer = podresources.ListPodResourcesResponse()
        for (namespace, name), held in list(self.pods.items()):
            pod = answer.pod_resources.add(namespace=namespace, name=name)
            container = pod.containers.add(name="main")
            for resource, ids in list(held.items()):
                container.devices.add(resource_name=resource, device_ids=ids)
        return answer

    def _watch(self, resource: str, plugin: Plugin) -> None:
        """Follows a plugin's list until its stream ends."""
        with contextlib.suppress(grpc.RpcError, ValueError):  # ValueError: the channel is closed already
            for message in plugin.stub.ListAndWatch(pb.Empty()):
                with self._news:
                    plugin.ids = tuple(device.ID for device in message.devices if device.health == "Healthy")
                    self._news.notify_all()
        with self._news:
            if self.plugins.get(resource) is plugin:
                del self.plugins[resource]
            self._news.notify_all()
