"""The agent's log lines as sentences for a user of the demo."""

from collections.abc import Mapping
from typing import Final

from gpumgr.sim.demo.process import Line

#: Log events with a fixed sentence.
_PLAIN: Final = {
    "container_within_limit": "{holder} is within its memory again",
    "gpu_process_unattributed_gone": "process {pid} has left the GPUs",
    "gpus_found": "found {gpus} GPUs, driver {driver}",
    "ready": "the agent is ready",
    "registered": "registered {resource} with the kubelet",
    "starting": "the agent is starting",
    "stopped": "the agent has stopped",
    "stopping": "the agent is stopping",
    "text": "{text}",
    "web_listening": "the page is at {url}/",
}


class LogSentences:
    """Turns log lines into sentences. `labels` maps a GPU's name and UUID to its label ("GPU3")."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._known: set[str] = set()

    def sentence(self, line: Line) -> str | None:
        """The sentence; None for a line without new information."""
        match line["event"]:
            case "allocation_granted":
                return self._granted(line)
            case "allocation_freed":
                return f"freed: {line['holder']} left {self._gpus(line['gpus'])}"
            case "refused":
                return f"refused: {line['pod'] or 'an unknown pod'}: {line['reason']}"
            case "gpu_health_changed":
                said = f": {line['message']}" if line["message"] else ""
                return f"{self._gpus([line['gpu']])} is {line['state']}{said}"
            case "gpu_event":
                xid = line["xid"]
                return f"{self._gpus([line['gpu']])} reports {'a double-bit error' if xid is None else f'XID {xid}'}"
            case "registration_lost":
                return f"lost the registration of {line['resource']}: {line['reason'].replace('_', ' ')}"
            case "container_over_limit":
                used, granted = (f"{line[key] / (1 << 30):.1f}" for key in ("memory_bytes", "memory_limit_bytes"))
                return (
                    f"over its limit: {line['holder']} uses {used} GiB on {self._gpus([line['gpu']])} and was granted {granted}"
                )
            case "gpu_process_unattributed":
                return f"process {line['pid']} uses {self._gpus(line['gpus'])} and belongs to no container"
            case event if event in _PLAIN:
                return _PLAIN[event].format(**line)
        if line.get("level") in ("warning", "error"):
            said = next((line[key] for key in ("reason", "error", "because") if line.get(key)), "")
            return f"{line['event'].replace('_', ' ')}: {said}"
        return None

    def _granted(self, line: Line) -> str | None:
        """A sentence for a container's first grant. The grant of its other resource has the same GPUs, so it has no sentence."""
        if line["allocation"] in self._known:
            return None
        self._known.add(line["allocation"])
        unit = "cores" if line["resource"] == "core" else "memory blocks"
        by = f" by {line['evaluator']}" if line["evaluator"] else ""
        return (
            f"granted: {line['pod']} ({line['container']}) {line['size']} {unit} on {self._gpus(line['gpus'])}{by}: {line['why']}"
        )

    def _gpus(self, names: list[str]) -> str:
        return ", ".join(self._labels.get(name, name) for name in names)
