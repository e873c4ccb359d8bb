"""CRI through Google's protobuf, and the recorded answers of tests/data/cri in that form."""

import json
from pathlib import Path
from typing import Any

from tests.protos import json_format, protos

cri = protos("runtime/v1/api.proto")

_DATA = Path(__file__).parent / "data" / "cri"


def recorded_list(runtime: str) -> Any:
    """The ListContainersResponse of "containerd" or "crio"."""
    return json_format.Parse((_DATA / f"{runtime}-list.json").read_text(), cri.ListContainersResponse())


def recorded_status(runtime: str) -> Any:
    """The verbose ContainerStatusResponse of "containerd" or "crio"."""
    told = json.loads((_DATA / f"{runtime}-status.json").read_text())
    answer = cri.ContainerStatusResponse(info={"info": json.dumps(told["info"])})
    json_format.ParseDict(told["status"], answer.status)
    return answer


def recorded_runtime(runtime: str, **config: Any) -> Any:
    """The verbose StatusResponse of "containerd" or "crio"; `config` replaces values in the object under the key "config"."""
    told = json.loads((_DATA / f"{runtime}-runtime.json").read_text())
    answer = cri.StatusResponse(info={"config": json.dumps(told["info"]["config"] | config)})
    for handler in told.get("runtimeHandlers", ()):
        answer.runtime_handlers.add(name=handler["name"])
    return answer
