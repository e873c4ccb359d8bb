"""`python -m tools.docs`: writes the tables of docs/*.md from the code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tools import PROJECT
from tools.docs import environment, exit_codes, kubernetes, log_events, metrics, refusals, settings
from tools.docs.markdown import fill, marks

DOCUMENTS: Final = PROJECT / "docs"


def parts() -> dict[str, str]:
    """Name of the marks -> the table between them."""
    return {
        "settings": settings.settings_tables(),
        "metrics": metrics.metrics_table(),
        "the scheduler's metrics": metrics.scheduler_table(),
        "the claims controller's metrics": metrics.claims_table(),
        "gpu-manager's metrics": metrics.gpu_manager_metrics(),
        "HAMi's metrics": metrics.hami_metrics(),
        "refusals": refusals.refusals_table(),
        "exit codes": exit_codes.agent_table(),
        "environment": environment.read_table(),
        "containers' environment": environment.given_table(),
        "log events": log_events.log_events_table(),
        "annotations": kubernetes.annotations_table(),
        "labels": kubernetes.labels_table(),
        "condition": kubernetes.condition_table(),
        "events": kubernetes.events_table(),
    }


def filled() -> Mapping[Path, str]:
    """Document -> its text with the current tables. Raises ValueError unless each part has its marks in exactly one document."""
    tables = parts()
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*.md"))}
    for name in tables:
        if (number := sum(marks(name)[0] in text for text in texts.values())) != 1:
            raise ValueError(f"{marks(name)[0]} must be in one document of {DOCUMENTS}, not in {number}")
    return {
        path: fill(text, {name: part for name, part in tables.items() if marks(name)[0] in text}) for path, text in texts.items()
    }


def main() -> None:
    for path, text in filled().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
