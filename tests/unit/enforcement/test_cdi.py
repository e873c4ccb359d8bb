"""CDI specs: valid against the interface's own schema, and saying all that the answer would have said."""

import json
from pathlib import Path

import jsonschema
from referencing import Registry
from referencing.jsonschema import DRAFT7

from gpumgr.common.units import Amounts
from gpumgr.enforcement import cdi
from gpumgr.ledger.answer import ContainerResponse, DeviceNode, Mount
from gpumgr.ledger.ledger import Allocation, ClaimRequest

SCHEMAS = Path(__file__).parents[2] / "data" / "cdi"
ID = "00112233445566ff"
FULL = ContainerResponse(
    envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1", "A": "x=y"},
    mounts=(Mount(container_path="/etc/vcuda", host_path="/vm/1", read_only=True), Mount(container_path="/w", host_path="/w1")),
    devices=(DeviceNode(container_path="/dev/nvidia0", host_path="/host/dev/nvidia0", permissions="rw"),),
    annotations={"tencent.com/vcuda-core": "10"},
)


def validator() -> jsonschema.Draft7Validator:
    load = {name: json.loads((SCHEMAS / name).read_text()) for name in ("schema.json", "defs.json")}
    registry: Registry = Registry().with_resource("defs.json", DRAFT7.create_resource(load["defs.json"]))
    return jsonschema.Draft7Validator(load["schema.json"], registry=registry)


def test_everything_of_the_answer_is_there() -> None:
    validator().validate(json.loads(cdi.spec(Allocation(id=ID), ContainerResponse())))
    document = json.loads(cdi.spec(Allocation(id=ID), FULL))
    validator().validate(document)
    (device,) = document["devices"]
    assert f"{document['kind']}={device['name']}" == cdi.device_name(ID)
    edits = device["containerEdits"]
    assert edits["env"] == ["A=x=y", "NVIDIA_VISIBLE_DEVICES=GPU-1"]
    assert edits["deviceNodes"] == [{"path": "/dev/nvidia0", "hostPath": "/host/dev/nvidia0", "permissions": "rw"}]
    assert [(mount["containerPath"], mount["hostPath"], mount["options"][0]) for mount in edits["mounts"]] == [
        ("/etc/vcuda", "/vm/1", "ro"),
        ("/w", "/w1", "rw"),
    ]


def test_files_name_their_owner() -> None:
    assert cdi.allocation_of(cdi.file_name(ID)) == ID
    assert cdi.allocation_of("nvidia.yaml") is None


def test_a_claim_has_a_device_for_each_gpu() -> None:
    claim = ClaimRequest(uid="u", namespace="team", name="c", request="gpu")
    allocation = Allocation(id=ID, gpus={"aa": Amounts(100, 1024), "bb": Amounts(100, 1024)}, claim=claim)
    document = json.loads(cdi.spec(allocation, FULL))
    validator().validate(document)
    names = [f"{document['kind']}={device['name']}" for device in document["devices"]]
    assert names == [cdi.device_name(ID, "aa"), cdi.device_name(ID, "bb")]
    assert document["devices"][0]["containerEdits"] == document["devices"][1]["containerEdits"]
