"""gpu-manager's display API through Google's protobuf and grpcio, and its recorded answers of tests/data/display."""

import importlib
import json
from pathlib import Path
from typing import Any

from tests.protos import json_format, protos_and_services

display, display_services = protos_and_services("display/api.proto")
Empty: Any = importlib.import_module("google.protobuf.empty_pb2").Empty


def as_json(message: Any) -> dict[str, Any]:
    """As grpc-gateway v1 has it: original names, zero values left out."""
    told: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return told


def golden(name: str) -> dict[str, Any]:
    message: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "display" / f"{name}.json").read_text())
    return message
