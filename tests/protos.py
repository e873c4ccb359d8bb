"""Google's protobuf and grpcio for the interfaces in proto/, made when imported: an implementation that isn't ours."""

import importlib
import sys
from pathlib import Path
from typing import Any

import grpc

sys.path.append(str(Path(__file__).parents[1] / "proto"))

protos, protos_and_services = grpc.protos, grpc.protos_and_services
json_format: Any = importlib.import_module("google.protobuf.json_format")
