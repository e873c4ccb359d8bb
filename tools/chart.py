"""The Helm chart as helm renders it, and the files that are generated from it and from the settings.

`python -m tools.chart` writes these files:

* the kustomize base, which is the chart rendered with its default values;
* the kustomize components for gpuManager.takeOver and for settings.node.mode dra: each adds to the base what the value adds to the chart;
* values.schema.json: the part `settings`, and the required values;
* the chart's list of the settings that take effect without a restart of the agent.

The tests check that all of them are up to date.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from gpumgr.settings.schema import is_live, sections
from tests.e2e.build import build
from tools import PROJECT

#: An object of JSON or YAML.
Json = dict[str, Any]

CHART: Final = PROJECT / "config" / "helm" / "gpumgr"
BASE: Final = PROJECT / "config" / "kustomize" / "base"
TAKE_OVER: Final = PROJECT / "config" / "kustomize" / "take-over"
DRA: Final = PROJECT / "config" / "kustomize" / "dra"
SCHEMA: Final = CHART / "values.schema.json"
LIVE: Final = CHART / "files" / "live.yaml"
NAMESPACE: Final = "kube-system"

_SOURCE: Final = re.compile(r"^# Source: gpumgr/templates/(\S+)\n", re.MULTILINE)
#: Labels of Helm, which mean nothing with kustomize, and the checksum of the settings, which is wrong if an overlay changes them.
_OF_HELM: Final = re.compile(
    r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n|^ *annotations:\n *checksum/config: .*\n", re.MULTILINE
)
_HEAD: Final = (
    "# Made from the chart in config/helm/gpumgr by `python -m tools.chart`; change that, or patch this in an overlay.\n"
)
#: Values that may be null: no limits, no priority class, and rollingUpdate, which an update with OnDelete does not use.
_MAY_BE_MISSING: Final = ("resources", "priorityClassName", "rollingUpdate")


class HelmError(Exception):
    """helm failed. The message is what it printed."""


def helm(*arguments: str | Path, stdin: str | None = None) -> str:
    """Runs helm and returns what it printed. Raises HelmError."""
    program = build() / "helm" / "helm"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, input=stdin)
    if done.returncode != 0:
        raise HelmError(done.stderr + done.stdout)
    return done.stdout


def render(values: Mapping[str, Any] | None = None, *flags: str, chart: Path = CHART, release: str = "gpumgr") -> str:
    """The output of `helm template` for the chart. `values` override the chart's values. Raises HelmError."""
    return helm("template", release, chart, f"--namespace={NAMESPACE}", "--values=-", *flags, stdin=json.dumps(values or {}))


def objects(text: str) -> dict[tuple[str, str], Json]:
    """(kind, name) -> object, from a stream of YAML documents."""
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text) if each}


def daemonset(text: str) -> Json:
    """The DaemonSet among rendered objects."""
    (found,) = (each for (kind, _), each in objects(text).items() if kind == "DaemonSet")
    return found


def pod_spec(text: str) -> Json:
    """The spec of the DaemonSet's pods."""
    spec: Json = daemonset(text)["spec"]["template"]["spec"]
    return spec


def agent_container(text: str) -> Json:
    """The only container of the DaemonSet's pods."""
    container: Json
    (container,) = pod_spec(text)["containers"]
    return container


def settings_file(text: str) -> str:
    """The agent's settings file in the ConfigMap."""
    spec = pod_spec(text)
    (name,) = (each["configMap"]["name"] for each in spec["volumes"] if "configMap" in each)
    return str(objects(text)["ConfigMap", name]["data"]["gpumgr.yaml"])


def base_files() -> dict[str, str]:
    """Name -> text of each file of the kustomize base. A template becomes one file, with its documents in their order."""
    parts = _SOURCE.split(_OF_HELM.sub("", render()))[1:]
    files: dict[str, str] = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        document = text.removesuffix("---\n")
        files[name] = f"{files[name]}---\n{document}" if name in files else _HEAD + document
    listed = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": sorted(files)}
    return {**files, "kustomization.yaml": _HEAD + yaml.safe_dump(listed, sort_keys=False)}


def take_over_files() -> dict[str, str]:
    """Name -> text of each file of the component that adds to the base what gpuManager.takeOver adds to the chart."""
    return _component({"gpuManager": {"takeOver": True}})


def dra_files() -> dict[str, str]:
    """Name -> text of each file of the component that adds to the base what settings.node.mode dra adds to the chart."""
    return _component({"settings": {"node": {"mode": "dra"}}})


def _component(values: Json) -> dict[str, str]:
    """Name -> text of the files: patches of the DaemonSet and of other changed objects, and the added objects."""
    plain, wanted = (_OF_HELM.sub("", render(each)) for each in ({}, values))
    before, after = objects(plain), objects(wanted)
    files: dict[str, Json] = {}
    for (kind, name), each in after.items():
        if (kind, name) in before and before[kind, name] != each:
            head = {"apiVersion": each["apiVersion"], "kind": kind, "metadata": {"name": name}}
            files[f"{kind.lower()}.yaml"] = {**head, **(_daemonset_patch(plain, wanted) if kind == "DaemonSet" else _body(each))}
    patched = [{"path": file, "target": {"kind": each["kind"], "name": each["metadata"]["name"]}} for file, each in files.items()]
    made = {f"{kind.lower()}.yaml": each for (kind, name), each in after.items() if (kind, name) not in before}
    listed = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        **({"resources": list(made)} if made else {}),
        "patches": patched,
    }
    files = {**files, **made, "kustomization.yaml": listed}
    return {file: _HEAD + yaml.safe_dump(each, sort_keys=False) for file, each in files.items()}


def _body(item: Json) -> Json:
    return {key: value for key, value in item.items() if key not in ("apiVersion", "kind", "metadata")}


def _daemonset_patch(plain: str, wanted: str) -> Json:
    before, after = agent_container(plain), agent_container(wanted)
    added = {key: _added(before[key], after[key]) for key in ("env", "volumeMounts")}
    container = {"name": before["name"], **{key: each for key, each in added.items() if each}}
    pod = {"containers": [container], "volumes": _added(pod_spec(plain)["volumes"], pod_spec(wanted)["volumes"])}
    before, after = (daemonset(each)["spec"] for each in (plain, wanted))
    changed = {key: after[key] for key in ("updateStrategy", "minReadySeconds") if before[key] != after[key]}
    return {"spec": {**changed, "template": {"spec": pod}}}


def _added(before: list[Json], after: list[Json]) -> list[Json]:
    return [each for each in after if each not in before]


def settings_schema() -> Json:
    """JSON schema of the value `settings`: the agent's own sections and keys; each may be null."""
    return _closed(
        {section: _closed({key: _or_null(kind) for key, kind in keys.items()}) for section, keys in sections().items()}
    )


def _path(kind: type) -> Json:
    if kind is not Path:
        raise NotImplementedError(kind)
    return {"type": "string", "pattern": "^/"}


def _closed(properties: Json) -> Json:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _or_null(kind: Any) -> Json:
    """Types are in one list wherever that says it all: then helm's message has one line."""
    schema = msgspec.json.schema(kind, schema_hook=_path)
    if "anyOf" in schema:
        (schema,) = (each for each in schema["anyOf"] if each != {"type": "null"})
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]}


def _require(schema: Json, defaults: Json) -> None:
    """Lists the required values of each block in the schema. For a value that is null, Helm also removes the default, so a template that
    reads the value would fail."""
    required = []
    for key, default in defaults.items():
        kind = schema["properties"][key]
        is_block = "properties" in kind
        if is_block and key != "settings":  # a missing setting of the agent has its default
            _require(kind, default)
        may_be_empty = default == "" or (kind.get("type") in ("array", "object") and not is_block)
        if not may_be_empty and key not in _MAY_BE_MISSING:
            required.append(key)
    schema.pop("required", None)
    if required:
        schema["required"] = required


def schema_text() -> str:
    """values.schema.json with the current part `settings` and the current required values."""
    schema = json.loads(SCHEMA.read_text())
    schema["properties"]["settings"] = settings_schema()
    _require(schema, yaml.safe_load((CHART / "values.yaml").read_text()))
    return json.dumps(schema, indent=2) + "\n"


def live_text() -> str:
    """Section -> the keys that take effect without a new pod."""
    keys = {section: [key for key, kind in keys.items() if is_live(kind)] for section, keys in sections().items()}
    listed = {section: keys for section, keys in keys.items() if keys}
    return "# Made from gpumgr/settings/schema.py by `python -m tools.chart`.\n" + yaml.safe_dump(listed, sort_keys=False)


def generated() -> Iterator[tuple[Path, str]]:
    """Each generated file with its text. The files of the chart are first, because the others are rendered from it."""
    yield SCHEMA, schema_text()
    yield LIVE, live_text()
    for name, text in base_files().items():
        yield BASE / name, text
    for folder, files in ((TAKE_OVER, take_over_files()), (DRA, dra_files())):
        for name, text in files.items():
            yield folder / name, text


if __name__ == "__main__":
    for path, text in generated():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(path.relative_to(PROJECT))
