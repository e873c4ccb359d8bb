"""The agent's log lines as a spectator reads them: what was decided, and why."""

from collections.abc import Mapping

from gpumgr.demo.journal import Line


class Teller:
    """Turns log lines into sentences. `labels` says what people call a GPU, by its name and by its UUID."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._known: set[str] = set()

    def sentence(self, line: Line) -> str | None:
        """None for a line that tells a spectator nothing new."""
        match line["event"]:
            case "allocation_granted":
                return self._granted(line)
            case "allocation_freed":
                return f"freed: {line['holder']} left {self._gpus(line['gpus'])}"
            case "refused":
                return f"refused: {line['pod'] or 'somebody'}: {line['reason']}"
            case "gpu_health_changed":
                said = f": {line['message']}" if line["message"] else ""
                return f"{self._gpus([line['gpu']])} is {line['state']}{said}"
            case "gpu_event":
                xid = line["xid"]
                return f"{self._gpus([line['gpu']])} reports {'a double-bit error' if xid is None else f'XID {xid}'}"
            case "registered":
                return f"registered {line['resource']} with the kubelet"
            case "registration_lost":
                return f"lost the registration of {line['resource']}: {line['reason'].replace('_', ' ')}"
            case "gpus_found":
                return f"found {line['gpus']} GPUs, driver {line['driver']}"
            case "starting" | "ready" | "stopping" | "stopped" as event:
                return f"the agent is {event}" if event != "stopped" else "the agent has stopped"
            case "text":
                return str(line["text"])
        if line.get("level") in ("warning", "error"):
            said = line.get("reason") or line.get("error") or ""
            return f"{line['event'].replace('_', ' ')}: {said}"
        return None

    def _granted(self, line: Line) -> str | None:
        """The first call of a container decides; its other resource's call only follows."""
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
