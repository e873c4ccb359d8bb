"""The kubelet's APIs through Google's protobuf and grpcio, made from proto/ when imported: an implementation that isn't ours."""

import importlib
import sys
from pathlib import Path

import grpc

_PROTO = str(Path(__file__).parents[1] / "proto")
if _PROTO not in sys.path:
    sys.path.append(_PROTO)

deviceplugin, deviceplugin_services = grpc.protos_and_services("deviceplugin/v1beta1/api.proto")
podresources, podresources_services = grpc.protos_and_services("podresources/v1/api.proto")

DecodeError: type[Exception] = importlib.import_module("google.protobuf.message").DecodeError
