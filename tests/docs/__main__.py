"""`python -m tests.docs`: config/README.md with tables of what the code says now."""

from pathlib import Path
from typing import Final

from tests.docs import exit_codes, kubernetes, metrics, settings
from tests.docs.markdown import fill

README: Final = Path(__file__).parents[2] / "config" / "README.md"


def parts() -> dict[str, str]:
    """Name of the marks -> what belongs between them."""
    return {
        "settings": settings.settings_tables(),
        "metrics": metrics.metrics_table(),
        "gpu-manager's metrics": metrics.gpu_manager_table(),
        "exit codes": exit_codes.agent_table(),
        "exit codes of commands": exit_codes.commands_table(),
        "annotations": kubernetes.annotations_table(),
        "labels": kubernetes.labels_table(),
        "condition": kubernetes.condition_table(),
        "events": kubernetes.events_table(),
    }


def main() -> None:
    README.write_text(fill(README.read_text(encoding="utf-8"), parts()), encoding="utf-8")


if __name__ == "__main__":
    main()
