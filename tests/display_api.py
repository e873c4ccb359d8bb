"""gpu-manager's display API through Google's protobuf and grpcio, made from proto/ when imported: an implementation that isn't ours."""

import importlib
import sys
from pathlib import Path
from typing import Any

import grpc

_PROTO = str(Path(__file__).parents[1] / "proto")
if _PROTO not in sys.path:
    sys.path.append(_PROTO)

display, display_services = grpc.protos_and_services("display/api.proto")
_empty: Any = importlib.import_module("google.protobuf.empty_pb2")
_json: Any = importlib.import_module("google.protobuf.json_format")

Empty = _empty.Empty


def as_json(message: Any) -> dict[str, Any]:
    """As grpc-gateway v1 has it: original names, zero values left out."""
    told: dict[str, Any] = _json.MessageToDict(message, preserving_proto_field_name=True)
    return told
