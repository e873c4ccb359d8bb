"""Metrics of the agent itself: driver, API server, readers, mechanisms, and clocks that jump."""

import pytest
from msgspec.structs import replace

from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.ledger.ledger import Allocation

from .pages import families, metrics_of, ours, series
from .pictures import allocation, sample_of, uuid_of, view_of, whole

WEB = ("team", "web")
API = ("api_server_up", "api_queue_waiting", "api_queue_oldest_seconds", "api_queue_dropped_total", "api_writes_total")


def share(letter: str = "a", *, mechanisms: tuple[str, ...] = ("hami-core",)) -> Allocation:
    return replace(allocation(letter, WEB, cores={0: 0b11111}, blocks={0: 0b11}), mechanisms=mechanisms)


def test_the_agent_is_ready_with_a_picture_and_without_a_reason_against_it() -> None:
    before = metrics_of(None)
    assert series(before, "gpumgr_nvml_up") == series(before, "gpumgr_agent_ready") == {(): 0.0}
    assert series(before, "gpumgr_nvml_last_sample_timestamp_seconds") == {}
    for not_ready, ready in (((), 1.0), (("no driver was found yet",), 0.0)):
        assert ours(NodeReport(view=view_of(), not_ready=not_ready), "agent_ready") == {(): ready}


@pytest.mark.parametrize(
    ("now", "unix_now", "told"),
    [
        pytest.param(110.0, 5000.0, 4990.0, id="ten seconds old"),
        pytest.param(110.0, 5000.0 - 3600, 4990.0 - 3600, id="the wall clock was set back"),
        pytest.param(99.0, 5000.0, 5000.0, id="never from the future"),
    ],
)
def test_the_age_of_a_sample_does_not_follow_the_wall_clock(now: float, unix_now: float, told: float) -> None:
    report = NodeReport(view=view_of(), sample=sample_of(0), sampled_at=100.0, nvml_up=True)
    metrics = metrics_of(report, clock=lambda: now, wall_clock=lambda: unix_now)
    assert series(metrics, "gpumgr_nvml_last_sample_timestamp_seconds") == {(): told}


def test_calls_streams_and_connections_are_exported() -> None:
    report = NodeReport(
        view=view_of(),
        nvml_errors={("nvmlDeviceGetMemoryInfo", 15): 3},
        streams={"tencent.com/vcuda-core": 1},
        connections=4,
        connections_refused=2,
        disconnects=3,
    )
    assert ours(report, "nvml_call_errors_total") == {("15", "nvmlDeviceGetMemoryInfo"): 3.0}
    assert ours(report, "listandwatch_streams") == {("tencent.com/vcuda-core",): 1.0}
    assert ours(report, "http_connections") == {(): 4.0}
    assert ours(report, "http_connections_refused_total") == {(): 2.0}
    assert ours(report, "http_disconnects_total") == {(): 3.0}


def test_without_an_api_server_its_metrics_are_absent() -> None:
    told = families(metrics_of(NodeReport(view=view_of())))
    assert not [name for name in told if name.startswith("gpumgr_api_")]


def test_what_waits_for_the_api_server() -> None:
    api_queue = ApiQueueState(
        waiting=3,
        oldest_seconds=-0.5,
        dropped=2,
        written={("event", "refused"): 4, ("lease", "what"): 1},
        away=True,
        eviction_retries=7,
        unreadable=5,
    )
    report = NodeReport(view=view_of(), api_queue=api_queue)
    assert ours(report, "eviction_retries_total") == {(): 7.0}
    assert ours(report, "api_objects_unreadable") == {(): 5.0}
    found = {name: ours(report, name) for name in API[:-1]}
    assert found == dict(zip(API[:-1], ({(): 0.0}, {(): 3.0}, {(): 0.0}, {(): 2.0}), strict=True))
    writes = dict(ours(report, "api_writes_total"))
    assert writes.pop(("other", "other")) == 1.0
    assert writes.pop(("refused", "event")) == 4.0
    zeros = {(outcome, what) for outcome in ("ok", "refused") for what in ("pod", "event", "node", "eviction")}
    assert writes == dict.fromkeys(zeros - {("refused", "event")}, 0.0)
    assert ours(replace(report, api_queue=ApiQueueState()), "api_server_up") == {(): 1.0}


@pytest.mark.parametrize(
    ("held", "count"),
    [
        pytest.param([share(mechanisms=("none",))], 1, id="none"),
        pytest.param([share(mechanisms=())], 1, id="granted before there were any"),
        pytest.param([share(mechanisms=("nvml-memory", "limiter"))], 0, id="two"),
        pytest.param([whole("t", ("team", "train"), 0)], 0, id="a whole GPU"),
        pytest.param([replace(share(mechanisms=()), anonymous=True)], 0, id="gpu-manager's"),
        pytest.param(
            [replace(share("a", mechanisms=("none",)), init=True), replace(share("b", mechanisms=("none",)), uid="uid-a")],
            1,
            id="an init container that is over",
        ),
    ],
)
def test_shares_that_nothing_keeps_are_counted(held: list[Allocation], count: int) -> None:
    assert ours(NodeReport(view=view_of(*held)), "containers_without_enforcement") == {(): count}


def test_the_mechanisms_export_their_counters() -> None:
    report = NodeReport(
        view=view_of(),
        vcuda_registrations={"ok": 3, "permission_denied": 1},
        mps_daemon_restarts={uuid_of(0): 2},
    )
    assert ours(report, "vcuda_registrations_total") == {("ok",): 3.0, ("permission_denied",): 1.0}
    assert ours(report, "mps_daemon_restarts_total") == {(uuid_of(0),): 2.0}
