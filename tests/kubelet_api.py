"""The kubelet's APIs through Google's protobuf and grpcio."""

import importlib

from tests.protos import protos_and_services

deviceplugin, deviceplugin_services = protos_and_services("deviceplugin/v1beta1/api.proto")
podresources, podresources_services = protos_and_services("podresources/v1/api.proto")
dra, dra_services = protos_and_services("dra/v1/api.proto")
drahealth, drahealth_services = protos_and_services("drahealth/v1/api.proto")
pluginregistration, pluginregistration_services = protos_and_services("pluginregistration/v1/api.proto")

DecodeError: type[Exception] = importlib.import_module("google.protobuf.message").DecodeError
