"""The simulated NVML answers what an H200 answered, for each query that gpumgr uses."""

import ast
import ctypes
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gpumgr
from gpumgr.driver.binding import Binding, CallError
from gpumgr.sim.library import prepare

_DATA: Final = Path(__file__).parents[2] / "data/nvml"
_RECORDED: Final[dict[str, Any]] = json.loads((_DATA / "h200-580.159.04.json").read_text())
#: Queries that the recording lacks: of MIG devices, of pairs, by other names, or of calls that need a structure.
_NOT_RECORDED: Final = {
    "nvmlDeviceGetGpuInstanceById",
    "nvmlDeviceGetGpuInstancePossiblePlacements",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetMemoryLimits_v1",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetProcessesUtilizationInfo",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlGpuInstanceGetComputeInstanceById",
    "nvmlGpuInstanceGetComputeInstanceProfileInfo",
    "nvmlGpuInstanceGetInfo",
    "nvmlComputeInstanceGetInfo",
}
#: The fields of structures that are compared: fields that gpumgr reads, and the rest of a PCI address.
_FIELDS: Final = {
    *("total", "used", "free", "reserved", "version", "gpu", "memory"),
    *("busId", "busIdLegacy", "domain", "bus", "device"),
    *("id", "name", "instanceCount", "isP2pSupported", "memorySizeMB", "sliceCount"),
    *("fieldId", "nvmlReturn"),
}


def used_queries() -> set[str]:
    """The names of NVML's queries in the source of gpumgr."""
    texts = (path.read_text() for path in Path(gpumgr.__file__).parent.rglob("*.py"))
    return {name for text in texts for name in re.findall(r'"(nvml[A-Za-z]*Get\w+)"', text)}


def recorded_calls() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Key, function and arguments of each recorded query that gpumgr uses."""
    used = used_queries()
    for key in _RECORDED:
        function, _, arguments = key.partition("(")
        if function in used:
            yield key, function, ast.literal_eval(f"({arguments}") if arguments else ()


def answer(nvml: Binding, function: str, arguments: tuple[Any, ...]) -> Any:
    system = function.startswith("nvmlSystem") or function == "nvmlDeviceGetCount"
    try:
        return plain(nvml.call(function, *(() if system else (nvml.call("nvmlDeviceGetHandleByIndex", 0),)), *arguments))
    except CallError as error:
        return error.code


def plain(value: Any) -> Any:
    """An answer of the binding in the form of the recording, structures with the fields that gpumgr reads."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [plain(each) for each in value]
    if fields := getattr(value, "_fields_", None):
        return {name: plain(getattr(value, name)) for name, *_ in fields if name in _FIELDS}
    return value


def recorded(key: str) -> Any:
    value = _RECORDED[key]
    if isinstance(value, str) and (error := re.fullmatch(r"ERR NVMLError_\w+\((\d+)\)", value)):
        return int(error[1])
    return reduced(value)


def reduced(value: Any) -> Any:
    if isinstance(value, list):
        return [reduced(each) for each in value]
    return {name: each for name, each in value.items() if name in _FIELDS} if isinstance(value, dict) else value


def test_every_answer_is_that_of_the_h200(tmp_path: Path) -> None:
    nvml = Binding(prepare(str(_DATA / "h200.yaml"), tmp_path / "node").library_path)
    nvml.open()
    try:
        calls = list(recorded_calls())
        assert {key: answer(nvml, function, arguments) for key, function, arguments in calls} == {
            key: recorded(key) for key, _, _ in calls
        }
    finally:
        nvml.close()


def test_every_query_of_gpumgr_is_recorded_or_named_here() -> None:
    assert used_queries() - {function for _, function, _ in recorded_calls()} == _NOT_RECORDED
