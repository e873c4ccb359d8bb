"""A real Prometheus that scrapes one agent every second, with the rules of config/ at a pace for tests."""

import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from .places import PROJECT
from .processes import free_ports

RULES: Final = PROJECT / "config" / "prometheus" / "gpumgr.rules.yaml"
DASHBOARD: Final = PROJECT / "config" / "grafana" / "gpumgr.json"
JOB: Final = "gpumgr"
SCHEDULER_RULES: Final = PROJECT / "config" / "prometheus" / "gpumgr-scheduler.rules.yaml"
SCHEDULER_DASHBOARD: Final = PROJECT / "config" / "grafana" / "gpumgr-scheduler.json"
SCHEDULER_JOB: Final = "gpumgr-scheduler"

#: What a person should wait for, and what a test can.
PACE: Final = {
    "[10m]": "[10s]",
    "[5m]": "[10s]",
    "[1h] offset 10m": "[30s] offset 10s",
    "_timestamp_seconds > 60": "_timestamp_seconds > 3",
    "_oldest_seconds > 300": "_oldest_seconds > 3",
}


def hurried_rules() -> str:
    """The rules with shorter windows and no patience; each replacement must concern something."""
    text = RULES.read_text()
    for shipped, hurried in PACE.items():
        assert shipped in text, shipped
        text = text.replace(shipped, hurried)
    document = yaml.safe_load(text)
    for rule in rules_of(document):
        if "for" in rule:
            rule["for"] = "1s"
    return yaml.safe_dump(document)


def rules_of(document: Any) -> list[dict[str, Any]]:
    return [rule for group in document["groups"] for rule in group["rules"]]


class Prometheus:
    """Its HTTP API."""

    def __init__(self, port: int, http: aiohttp.ClientSession) -> None:
        self._url, self._http = f"http://127.0.0.1:{port}/api/v1", http

    async def query(self, expression: str) -> Sequence[Any]:
        """The samples of an instant query. Raises AssertionError with Prometheus's own words."""
        async with self._http.post(f"{self._url}/query", data={"query": expression}) as answer:
            document = await answer.json()
        assert document["status"] == "success", f"{expression}: {document['error']}"
        result: Sequence[Any] = document["data"]["result"]
        return result

    async def firing(self) -> dict[str, list[dict[str, Any]]]:
        """Alert's name -> its firing instances, as the API lists them."""
        async with self._http.get(f"{self._url}/alerts") as answer:
            document = await answer.json()
        found: dict[str, list[dict[str, Any]]] = {}
        for alert in document["data"]["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found

    async def ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, json.JSONDecodeError):
            async with self._http.get(f"{self._url}/status/runtimeinfo") as answer:
                return answer.status == 200
        return False


@contextlib.contextmanager
def _process(folder: Path, target: str, job: str, rules: str) -> Iterator[int]:
    """Its port."""
    folder.mkdir(parents=True)
    (folder / "rules.yaml").write_text(rules)
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    command = [
        "/usr/bin/prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(timeout=60)


@contextlib.asynccontextmanager
async def running_prometheus(folder: Path, target: str, *, job: str = JOB, rules: str | None = None) -> AsyncIterator[Prometheus]:
    """`target` is the agent's (scheduler's) host:port. `rules`: those of the agent by default."""
    with _process(folder, target, job, rules if rules is not None else hurried_rules()) as port:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            yield Prometheus(port, http)
