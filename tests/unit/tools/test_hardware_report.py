"""The report of the measurements on a GPU."""

import json

from tests.hardware.measure import MechanismResult, ShareResult, TorchLoad, TorchMemory
from tests.hardware.report import as_json, as_markdown

MIB = 1 << 20
SHARE = ShareResult(
    cores=25,
    limit_bytes=5120 * MIB,
    total_bytes=5120 * MIB,
    granted_bytes=4800 * MIB,
    refusal=2,
    rate_percent=24.96,
    agent_bytes=None,
)
RESULTS = (
    MechanismResult(
        mechanism="mps",
        uses="mps (cores and memory)",
        alone=[SHARE],
        torch_loads=[
            TorchLoad(load="products", cores=75, tenants=2, rate_percent=69.04),
            TorchLoad(load="graph", cores=25, tenants=1, rate_percent=34.0),
        ],
        torch_memory=[
            TorchMemory(allocator="cudaMallocAsync", limit_bytes=5120 * MIB, granted_bytes=4864 * MIB, refusal="out of memory"),
            TorchMemory(allocator="expandable segments", limit_bytes=5120 * MIB, granted_bytes=7168 * MIB, refusal=None),
        ],
        logged=["enforcement_finding: changed"],
    ),
    MechanismResult(mechanism="hami-core", obstacle="no library was given: --hami-core FILE"),
)


def test_rows_show_limits_what_was_granted_and_why_something_was_not_measured() -> None:
    text = as_markdown({"driver": "580.159.04"}, RESULTS)
    for row in (
        "driver: 580.159.04",
        "| one | 25 % | 25.0 % | 5120 MiB | 5120 MiB | 4800 MiB | out of memory | - |",
        "**Not measured to the end:** no library was given: --hami-core FILE",
        "* enforcement_finding: changed",
        "| 2 at once | 75 % | products | 69.0 % |",
        "| one | 25 % | graph | 34.0 % |",
        "| cudaMallocAsync | 5120 MiB | 4864 MiB | out of memory |",
        "| expandable segments | 5120 MiB | 7168 MiB | no |",
    ):
        assert row in text


def test_without_pytorch_there_is_no_table_of_it() -> None:
    assert "PyTorch" not in as_markdown({}, RESULTS[1:])


def test_json_has_the_same_figures_with_units_in_their_names() -> None:
    document = json.loads(as_json({"driver": "580.159.04"}, RESULTS))
    assert document["machine"] == {"driver": "580.159.04"}
    assert document["mechanisms"][0]["alone"][0]["granted_bytes"] == 4800 * MIB
    assert document["mechanisms"][1]["obstacle"] == "no library was given: --hami-core FILE"
