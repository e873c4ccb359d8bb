"""CRI through Google's protobuf, made from proto/ when imported, and the recorded answers of tests/data/cri in that form."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import grpc

_PROTO = str(Path(__file__).parents[1] / "proto")
if _PROTO not in sys.path:
    sys.path.append(_PROTO)

_json: Any = importlib.import_module("google.protobuf.json_format")
cri = grpc.protos("runtime/v1/api.proto")

_DATA = Path(__file__).parent / "data" / "cri"


def recorded_list(runtime: str) -> Any:
    """The ListContainersResponse of "containerd" or "crio"."""
    return _json.Parse((_DATA / f"{runtime}-list.json").read_text(), cri.ListContainersResponse())


def recorded_status(runtime: str) -> Any:
    """The verbose ContainerStatusResponse of "containerd" or "crio"."""
    told = json.loads((_DATA / f"{runtime}-status.json").read_text())
    answer = cri.ContainerStatusResponse(info={"info": json.dumps(told["info"])})
    _json.ParseDict(told["status"], answer.status)
    return answer
