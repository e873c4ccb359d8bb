"""What is read of a ResourceClaim, and which ones are refused."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.errors import Refusal
from gpumgr.kubelet.claim_reader import allocated_claim
from gpumgr.ledger.claims import AllocatedClaim, ClaimShare
from gpumgr.ledger.ledger import ClaimRef

Json = dict[str, Any]
REF = ClaimRef(namespace="team-a", name="p-vcuda-x7", uid="u-1")


def result(request: str = "gpu", device: str = "gpu-0a", **more: Any) -> Json:
    share = {"shareID": "s-1", "consumedCapacity": {"cores": "30", "memory": "5Gi"}}
    return {"request": request, "driver": "gpu.gpumgr.io", "pool": "node-7", "device": device, **share, **more}


def config(enforcement: str | None = "none", source: str = "FromClass", requests: list[str] | None = None, **more: Any) -> Json:
    parameters = {"apiVersion": "gpumgr.io/v1", "kind": "ShareConfig", **({"enforcement": enforcement} if enforcement else {})}
    opaque = {"driver": "gpu.gpumgr.io", "parameters": {**parameters, **more}}
    return {"source": source, "requests": requests or [], "opaque": opaque}


def claim(*results: Json, configs: tuple[Json, ...] = ()) -> Json:
    pod = {"resource": "pods", "name": "p", "uid": "pod-1"}
    allocation = {"devices": {"results": list(results), "config": list(configs)}}
    return {"metadata": {"uid": "u-1"}, "status": {"allocation": allocation, "reservedFor": [pod]}}


def read(item: Json | None) -> AllocatedClaim:
    return allocated_claim(REF, "node-7", item)


def share(request: str = "gpu", device: str = "gpu-0a", **more: Any) -> ClaimShare:
    amounts: Json = {"share_id": "s-1", "cores": 30, "memory_mebibytes": 5120, "admin": False}
    return ClaimShare(request=request, device=device, **{**amounts, **more})


def test_a_share() -> None:
    assert read(claim(result())) == AllocatedClaim(
        ref=REF, pods=((("team-a", "p"), "pod-1"),), shares=(share(),), enforcement=None
    )


def test_only_what_is_ours_on_this_node_counts() -> None:
    others = (result(driver="gpu.nvidia.com"), result(pool="node-8"))
    found = claim(others[0], result("gpus/island", "gpu-1"), others[1], result("gpus/island", "gpu-2", shareID="s-2"))
    found["status"]["reservedFor"] += [
        {"resource": "pods", "name": "q", "uid": "pod-2"},
        {"resource": "workloads", "apiGroup": "scheduling.k8s.io", "name": "w", "uid": "w-1"},
    ]
    decoded = read(found)
    assert decoded.shares == (share("gpus", "gpu-1"), share("gpus", "gpu-2", share_id="s-2"))
    assert [pod for pod, _ in decoded.pods] == [("team-a", "p"), ("team-a", "q")]


def test_admin_access_has_no_amounts() -> None:
    admin = {key: value for key, value in result(adminAccess=True).items() if key not in ("consumedCapacity", "shareID")}
    assert read(claim(admin)).shares == (share(share_id=None, cores=0, memory_mebibytes=0, admin=True),)


def test_a_device_that_is_not_shared_is_the_whole_gpu() -> None:
    whole = {key: value for key, value in result().items() if key not in ("consumedCapacity", "shareID")}
    assert read(claim(whole)).shares == (share(share_id=None, cores=100, memory_mebibytes=0),)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda item: item["metadata"].update(uid="u-2"),
            "with UID u-1 no longer exists: the present claim of this name has another UID",
        ),
        (lambda item: item.pop("status"), "is not allocated"),
        (lambda item: item["status"].pop("allocation"), "is not allocated"),
        (lambda item: item["status"].pop("reservedFor"), "is not reserved for any pod"),
        (lambda item: item["status"]["reservedFor"][0].update(resource="jobs"), "is not reserved for any pod"),
        (lambda item: item["status"]["allocation"]["devices"].pop("results"), "has no device of gpu.gpumgr.io on node node-7"),
        (lambda item: _first(item).update(pool="node-8"), "has no device of gpu.gpumgr.io on node node-7"),
        (lambda item: _first(item).update(driver="gpu.nvidia.com"), "has no device of gpu.gpumgr.io on node node-7"),
        (lambda item: _first(item).pop("consumedCapacity"), "DRAConsumableCapacity must be on"),
        (lambda item: _first(item)["consumedCapacity"].pop("cores"), "does not say how much cores it has of gpu-0a"),
        (lambda item: _first(item)["consumedCapacity"].update(cores="30m"), "is not a whole number"),
        (lambda item: _first(item)["consumedCapacity"].update(cores="-1"), "is negative or too large"),
        (lambda item: _first(item)["consumedCapacity"].update(memory="much"), "can't be read"),
        (lambda item: _first(item)["consumedCapacity"].update(memory="1Ei9"), "can't be read"),
        (
            lambda item: _first(item)["consumedCapacity"].update(memory="1Ki"),
            "has 1024 bytes of gpu-0a, which is not a whole number",
        ),
    ],
)
def test_refusals_say_what_is_wrong_and_what_to_do(change: Callable[[Json], object], sentence: str) -> None:
    item = claim(result())
    change(item)
    with pytest.raises(Refusal, match=r"^claim team-a/p-vcuda-x7 .*; delete the pod, so that it is scheduled again\Z") as refusal:
        read(item)
    assert sentence in str(refusal.value)


def test_a_claim_that_is_gone() -> None:
    with pytest.raises(Refusal, match="no longer exists"):
        read(None)


def _first(item: Json) -> Json:
    found: Json = item["status"]["allocation"]["devices"]["results"][0]
    return found


# -- the opaque configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configs", "enforcement"),
    [
        ((), None),
        ((config(),), "none"),
        ((config("hami-core", requests=["gpu", "gpus/island"]),), "hami-core"),
        ((config("mps", requests=["gpus/island"]), config("mps", requests=["gpu"])), "mps"),
        ((config("mps", requests=["gpus", "gpu"]),), "mps"),
        ((config(None), config(None, "FromClaim")), None),
        ((config("none", requests=["other"]),), None),
        (({"source": "FromClaim", "opaque": {"driver": "gpu.nvidia.com", "parameters": {"any": 1}}},), None),
        (({"source": "FromClass", "requests": None},), None),
    ],
)
def test_only_a_class_gives_the_enforcement(configs: tuple[Json, ...], enforcement: str | None) -> None:
    assert read(claim(result(), result("gpus/island", "gpu-1"), configs=configs)).enforcement == enforcement


@pytest.mark.parametrize(
    ("configs", "sentence"),
    [
        ((config("none", "FromClaim"),), "requests enforcement none itself, which only a DeviceClass may do"),
        ((config("strong"),), "enforcement limiter, mps, hami-core, vcuda, nvml-memory, none"),
        ((config("auto"),), "Invalid enum value 'auto'"),
        ((config(memory="all"),), "unknown field `memory`"),
        ((config(kind="GpuConfig"),), "`$.kind`"),
        ((config(apiVersion="gpumgr.io/v2", source="FromClaim"),), "`$.apiVersion`"),
        (
            ({"source": "FromClass", "opaque": {"driver": "gpu.gpumgr.io"}},),
            "has a configuration for gpu.gpumgr.io that can't be used",
        ),
        ((config("mps", requests=["gpu"]),), "different enforcement (mps, the node's own): use one DeviceClass"),
        ((config("mps"), config("none")), "different enforcement (mps, none): use one DeviceClass"),
    ],
)
def test_a_configuration_that_is_wrong_is_refused(configs: tuple[Json, ...], sentence: str) -> None:
    with pytest.raises(Refusal) as refusal:
        read(claim(result(), result("other", "gpu-1"), configs=configs))
    assert sentence in str(refusal.value)


def test_admin_access_needs_no_enforcement() -> None:
    found = claim(result(), result("watch", "gpu-0a", adminAccess=True), configs=(config("mps", requests=["gpu"]),))
    assert read(found).enforcement == "mps"


# -- any structure -----------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def _places(item: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    return [path, *(place for key, value in inner for place in _places(value, (*path, key)))][bool(not path) :]


WHOLE = claim(result(), configs=(config(),))


@given(st.sampled_from(_places(WHOLE)), JSON)
def test_whatever_stands_in_a_claim_it_is_read_or_refused(place: tuple[Any, ...], value: Any) -> None:
    item = copy.deepcopy(WHOLE)
    holder = item
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    with contextlib.suppress(Refusal):
        assert all(isinstance(amount, int) for each in read(item).shares for amount in (each.cores, each.memory_mebibytes))
