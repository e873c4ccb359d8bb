"""The version of the simulated kubelet: the differences between versions that device plugins see.

Source: the last patch release of each version (1.19.16 to 1.25.16, 1.35.4): pkg/kubelet/cm/devicemanager,
pkg/kubelet/apis/podresources, and the API descriptions of k8s.io/kubelet. 1.21 and 1.22 do not differ in these facts, nor do 1.23
and 1.24.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

Call = Literal["List", "Get"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletShape:
    """The facts of one version; the defaults are the facts of 1.35."""

    version: str = "1.35"

    # Registration and the plugins' folder

    #: Register dials the plugin and asks for its options before it answers (1.25). Earlier versions answer at once, dial in the
    #: background and report no result; the options of the Register request apply.
    connects_in_register: bool = True
    #: The end of a plugin's stream disconnects the plugin that has the resource's name at that time (1.25 to 1.35).
    stream_end_hits_successor: bool = True
    #: A start deletes every file of the folder except the checkpoint, not only sockets.
    clears_folder: bool = False
    #: The :authority of calls to plugins: "localhost" since 1.26, the socket's path before.
    authority_is_path: bool = False

    # Allocation

    #: A container is refused while a resource has no healthy device, even if it holds or could reuse devices (1.25).
    checks_health_first: bool = True
    #: Answers to Allocate may name CDI devices (1.28 behind a gate, on since 1.29). Earlier versions drop the field.
    knows_cdi: bool = True
    #: The NUMA node that is written for ids without one: -1 since 1.23, 0 before.
    no_node: int = -1
    #: The checkpoint file has a container's ids by NUMA node (1.20), not as a list.
    checkpoint_by_node: bool = True

    # The calls of PodResources v1; empty: there is no such service

    calls: frozenset[Call] = frozenset({"List", "Get"})
    #: PodResources serves 100 calls a second, for all clients together.
    limits_rate: bool = True
    #: List includes pods that ended or were refused, without ids, until they are deleted (before 1.34).
    lists_ended: bool = False
    #: List has one entry for all ids of a resource on a NUMA node, not one for each id (1.20).
    groups_ids: bool = False


V1_35: Final = KubeletShape()
V1_25: Final = replace(
    V1_35,
    version="1.25",
    clears_folder=True,
    authority_is_path=True,
    knows_cdi=False,
    calls=frozenset({"List"}),
    limits_rate=False,
    lists_ended=True,
)
V1_24: Final = replace(
    V1_25, version="1.24", connects_in_register=False, stream_end_hits_successor=False, checks_health_first=False
)
V1_23: Final = replace(V1_24, version="1.23")
V1_22: Final = replace(V1_23, version="1.22", no_node=0)
V1_21: Final = replace(V1_22, version="1.21")
V1_20: Final = replace(V1_21, version="1.20", groups_ids=True)
#: Too old for gpumgr: it has PodResources v1alpha1 only.
V1_19: Final = replace(V1_20, version="1.19", calls=frozenset(), checkpoint_by_node=False)

#: The kubelets that gpumgr supports, by version.
SUPPORTED: Final[Mapping[str, KubeletShape]] = {
    shape.version: shape for shape in (V1_20, V1_21, V1_22, V1_23, V1_24, V1_25, V1_35)
}
