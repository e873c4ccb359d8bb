"""Metrics of the agent itself and its connections: driver, kubelet, API server, web server, enforcement. Pure functions of a report."""

from collections.abc import Iterator
from typing import Final

from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.common.prometheus_text import RenderedFamily, counter, gauge, label_text, render
from gpumgr.ledger.ledger import current_shares

_UP: Final = gauge("nvml_up", "1 while the driver's library answers.")
_READY: Final = gauge("agent_ready", "1 while the node can take pods with GPUs.")
_TAKEN: Final = gauge("nvml_last_sample_timestamp_seconds", "When the GPUs were last sampled, in unix time.")
_ERRORS: Final = counter("nvml_call_errors_total", "Failed calls of the driver's library.", "function", "code")
_STREAMS: Final = gauge("listandwatch_streams", "Open ListAndWatch calls of the kubelet.", "resource")
_CONNECTIONS: Final = gauge("http_connections", "Connections that the web server has open.")
_REFUSED: Final = counter("http_connections_refused_total", "Connections that the web server refused at its limit.")
_DISCONNECTS: Final = counter("http_disconnects_total", "Requests that the client ended before they were answered.")
_SERVER_UP: Final = gauge("api_server_up", "1 while the API server answers.")
_WAITING: Final = gauge("api_queue_waiting", "Objects to be written to the API server.")
_OLDEST: Final = gauge(
    "api_queue_oldest_seconds", "How long the oldest object has waited to be written to the API server; 0 without any."
)
_DROPPED: Final = counter("api_queue_dropped_total", "Dropped events: too many, or of an unknown pod.")
_WRITES: Final = counter("api_writes_total", "Writes to the API server, by object and outcome.", "what", "outcome")
_RETRIES: Final = counter(
    "eviction_retries_total", "Eviction requests after the first for a pod, for example because of its PodDisruptionBudget."
)
_UNREADABLE: Final = gauge("api_objects_unreadable", "Pods that can't be read; their last readable state is used.")
_UNENFORCED: Final = gauge("containers_without_enforcement", "Containers that share a GPU without enforced limits.")
_REGISTRATIONS: Final = counter("vcuda_registrations_total", "Registrations of processes with the backend vcuda.", "result")
_RESTARTS: Final = counter("mps_daemon_restarts_total", "Crashed MPS daemons that were started again.", "gpu")

FAMILIES: Final = (
    *(_UP, _READY, _TAKEN, _ERRORS, _STREAMS, _CONNECTIONS, _REFUSED, _DISCONNECTS),
    *(_SERVER_UP, _WAITING, _OLDEST, _DROPPED, _WRITES, _RETRIES, _UNREADABLE),
    *(_UNENFORCED, _REGISTRATIONS, _RESTARTS),
)

#: Kinds of writes to the API server and their outcomes; others are counted as "other".
WRITES: Final = ("pod", "event", "node", "eviction")
OUTCOMES: Final = ("ok", "refused")


def render_agent(report: NodeReport | None, *, sampled_at: float | None) -> Iterator[RenderedFamily]:
    """`report` is None before the first report. `sampled_at`: the unix time of the report's sample, None without a sample."""
    yield render(_UP, {"": report is not None and report.nvml_up})
    yield render(_READY, {"": report is not None and not report.not_ready})
    if report is None:
        return
    if sampled_at is not None:
        yield render(_TAKEN, {"": round(sampled_at, 3)})
    yield render(_ERRORS, {label_text(_ERRORS.labels, (call, str(code))): n for (call, code), n in report.nvml_errors.items()})
    yield render(_STREAMS, {label_text(_STREAMS.labels, (resource,)): number for resource, number in report.streams.items()})
    yield render(_CONNECTIONS, {"": report.connections})
    yield render(_REFUSED, {"": report.connections_refused})
    yield render(_DISCONNECTS, {"": report.disconnects})
    if report.api_queue is not None:
        yield from _api_server(report.api_queue)
    yield from _mechanisms(report)


def _api_server(api_queue: ApiQueueState) -> Iterator[RenderedFamily]:
    yield render(_SERVER_UP, {"": not api_queue.away})
    yield render(_WAITING, {"": api_queue.waiting})
    yield render(_OLDEST, {"": max(0.0, api_queue.oldest_seconds)})
    yield render(_DROPPED, {"": api_queue.dropped})
    yield render(_RETRIES, {"": api_queue.eviction_retries})
    yield render(_UNREADABLE, {"": api_queue.unreadable})
    # All series exist from the start, so that a first refusal shows as an increase.
    writes = dict.fromkeys(((what, outcome) for what in WRITES for outcome in OUTCOMES), 0)
    for (what, outcome), times in api_queue.written.items():
        key = (what if what in WRITES else "other", outcome if outcome in OUTCOMES else "other")
        writes[key] = writes.get(key, 0) + times
    yield render(_WRITES, {label_text(_WRITES.labels, key): times for key, times in writes.items()})


def _mechanisms(report: NodeReport) -> Iterator[RenderedFamily]:
    free = [s for s in current_shares(report.view.ledger) if not s.anonymous and not _enforced(s.mechanisms)]
    yield render(_UNENFORCED, {"": len(free)})
    results = report.vcuda_registrations.items()
    yield render(_REGISTRATIONS, {label_text(_REGISTRATIONS.labels, (result,)): times for result, times in results})
    restarts = report.mps_daemon_restarts.items()
    yield render(_RESTARTS, {label_text(_RESTARTS.labels, (uuid,)): times for uuid, times in restarts})


def _enforced(mechanisms: tuple[str, ...]) -> bool:
    return any(name not in ("none", "mps-open") for name in mechanisms)
