"""`python -m tests.docs`: config/README.md with tables of what the code says now."""

from pathlib import Path
from typing import Final

from tests.docs import environment, exit_codes, kubernetes, log_events, metrics, refusals, settings
from tests.docs.markdown import fill

README: Final = Path(__file__).parents[2] / "config" / "README.md"


def parts() -> dict[str, str]:
    """Name of the marks -> what belongs between them."""
    return {
        "settings": settings.settings_tables(),
        "metrics": metrics.metrics_table(),
        "gpu-manager's metrics": metrics.gpu_manager_table(),
        "HAMi's metrics": metrics.hami_table(),
        "refusals": refusals.refusals_table(),
        "exit codes": exit_codes.agent_table(),
        "exit codes of commands": exit_codes.commands_table(),
        "environment": environment.read_table(),
        "containers' environment": environment.given_table(),
        "log events": log_events.log_events_table(),
        "annotations": kubernetes.annotations_table(),
        "labels": kubernetes.labels_table(),
        "condition": kubernetes.condition_table(),
        "events": kubernetes.events_table(),
    }


def main() -> None:
    README.write_text(fill(README.read_text(encoding="utf-8"), parts()), encoding="utf-8")


if __name__ == "__main__":
    main()
