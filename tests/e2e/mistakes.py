"""Mistakes in the installed DaemonSet, and what is seen of them where people look: the pod, its events, the log, the doctor."""

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from .agent import SIM
from .cluster import Cluster
from .daemonset import NAME, NAMESPACE, Installed
from .manifests import Json
from .processes import wait_until

ROLE: Final = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{NAME}"


@contextmanager
def installed_with(
    agent: Installed, settings: Mapping[str, Mapping[str, Any]] | None = None, *, without_mount: str | None = None, **values: Any
) -> Iterator[None]:
    """With these settings and values of the chart, and less one of the host's folders. Begins when there is a new pod, however it
    fares; ends with everything as it was."""
    agent.configure(settings or {})
    objects = agent.objects(**values)
    if without_mount is not None:
        _take_mount_out(objects, without_mount)
    try:
        agent.apply(objects)
        wait_until("the next pod", lambda: agent.only() is not None, 120)
        yield
    finally:
        agent.configure({})
        agent.start()


def _take_mount_out(objects: Iterable[Json], name: str) -> None:
    for each in objects:
        if each["kind"] == "DaemonSet":
            spec = each["spec"]["template"]["spec"]
            spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != name]
            for container in spec["containers"]:
                container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != name]


def status(agent: Installed, *, init: bool = False) -> Json:
    """Of the container in its newest pod: of the agent's, or the preflight's. Empty before the kubelet has reported it."""
    statuses = agent.newest()["status"].get("initContainerStatuses" if init else "containerStatuses", [])
    return statuses[0] if statuses else {}


def last_words(agent: Installed, *, init: bool = False) -> Json:
    """How the container ended: its exit code, and as message what `kubectl describe pod` shows. Waits until it has."""
    ended: list[Json] = []

    def has_ended() -> bool:
        found = status(agent, init=init)
        ended[:] = [each["terminated"] for each in (found.get("state", {}), found.get("lastState", {})) if "terminated" in each]
        return bool(ended)

    wait_until("the container's end", has_ended, 120)
    return ended[0]


def event(cluster: Cluster, agent: Installed, reason: str, wanted: str) -> str:
    """The message of its newest pod's event with this reason that has the wanted words. Waits for it: others may come before, of a
    probe that was earlier than the agent, or of a volume that the kubelet had not received yet."""
    about = f"involvedObject.uid={agent.newest()['metadata']['uid']},reason={reason}"
    messages: list[str] = []

    def told() -> bool:
        items = cluster.api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector={about}")["items"]
        messages[:] = [str(each["message"]) for each in items]
        return any(wanted in each for each in messages)

    try:
        wait_until(f"event {reason} with {wanted!r}", told, 120, every=0.2)
    except TimeoutError as error:
        raise AssertionError(f"{error}, but {messages}") from None
    return next(each for each in messages if wanted in each)


def doctor(agent: Installed) -> dict[str, tuple[str, str]]:
    """What `gpumgr doctor` says in the agent's container: check -> its state, and message and remedy in one."""
    command = ("gpumgr", "doctor", "--config", "/etc/gpumgr/gpumgr.yaml", "--sim", SIM, "--json")
    try:
        text = agent.run_inside(*command)
    except subprocess.CalledProcessError as error:  # it found an error, or could not be run
        text = error.stdout
    return {each["check"]: (each["state"], f"{each['message']}; {each['remedy']}") for each in json.loads(text)}


def lines(agent: Installed, event: str) -> list[dict[str, Any]]:
    """The lines of this kind in its newest pod's log, all lives of the container together."""
    return [line for line in agent.log() if line["event"] == event]


@contextmanager
def denied(cluster: Cluster, *rights: tuple[str, str]) -> Iterator[None]:
    """Without these of its rights (verb, resource), for a while."""
    rules = cluster.api.request("GET", ROLE)["rules"]
    left = [
        {**rule, "resources": [resource], "verbs": [verb]}
        for rule in rules
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if (verb, resource) not in rights
    ]
    _put_rules(cluster, left)
    try:
        yield
    finally:
        _put_rules(cluster, rules)


def _put_rules(cluster: Cluster, rules: list[Json]) -> None:
    patch = [{"op": "replace", "path": "/rules", "value": rules}]
    cluster.kubectl("patch", "clusterrole", NAME, "--type=json", f"--patch={json.dumps(patch)}")
