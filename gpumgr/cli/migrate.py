"""`gpumgr migrate`: prints what changes when gpumgr replaces another agent."""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from gpumgr.cli.formats import cleaned, printable
from gpumgr.cli.options import DEFAULT_CONFIG, ExitingCommand, effective_settings, output_option
from gpumgr.common.errors import GpumgrError, InputError, KubeletError
from gpumgr.common.foreign_text import UnreadableText, convert
from gpumgr.common.units import VCUDA_NAMES
from gpumgr.compat.gpu_manager import takeover as gpu_manager
from gpumgr.compat.gpu_manager.running_pods import read_gpu_manager_checkpoint
from gpumgr.compat.gpu_manager.takeover import GpuManagerCommand
from gpumgr.compat.hami import takeover
from gpumgr.compat.hami.config import Config, read_config
from gpumgr.compat.objects import Object, Pod, of_type, parse_object, read_objects
from gpumgr.compat.plan import Plan, settings_yaml, text_of, write_settings
from gpumgr.kube.client import ApiServer, items_of
from gpumgr.kubelet.other_plugins import answering
from gpumgr.kubelet.records import (
    FILE_NAME,
    parse_registered_devices,
    pods_with_devices,
    read_kubelet_checkpoint,
)
from gpumgr.ledger.rebuild import Holders, foreign
from gpumgr.ledger.store import read_checkpoint
from gpumgr.settings import Settings
from gpumgr.settings.schema import NodeName

_Decorated = Callable[..., Any]

_EXIT_CODES: Final = {
    0: "done",
    1: "something of this node or of the API server can't be read",
    2: "wrong usage or input, or the settings file can't be written",
}
_HAMI_EXIT_CODES: Final = {**_EXIT_CODES, 1: f"{_EXIT_CODES[1]}, or --verify found a difference"}

_HEAD: Final = (
    "# Written by `gpumgr migrate {source}`: what differs from gpumgr's defaults. Check it with `gpumgr config check`.\n"
)
_API_SERVER: Final = "the API server's answer"
#: HAMi's folders on its nodes, besides the folder of its library.
_HAMI_FOLDERS: Final = (Path("/tmp/vgpulock"), Path("/tmp/hami"))


@click.group("migrate", short_help="Migrate from gpu-manager or HAMi.")
def command() -> None:
    """Migrate a node from gpu-manager or HAMi: read its configuration, print what changes and how to go back.

    With --apply the settings file is written, too. Nothing else is changed: the output has the commands for what is to be stopped,
    labelled or removed.

    \b
    Examples:
      gpumgr migrate gpu-manager
      gpumgr migrate hami --kubeconfig /etc/kubernetes/kubelet.conf
    """


def _options(function: _Decorated) -> _Decorated:
    default_node = os.environ.get("NODE_NAME") or Settings().node.name
    for option in (
        output_option,
        click.option("--apply", is_flag=True, help="Write the settings file."),
        click.option(
            "--to", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default=True, help="The settings file to write."
        ),
        click.option(
            "--node", default=default_node, callback=_node_name, help="The node's name.  [default: $NODE_NAME or this host's]"
        ),
        click.option(
            "--pods",
            "pod_files",
            type=click.Path(path_type=Path),
            multiple=True,
            help="Output of `kubectl get pods -A -o json`; may be repeated.",
        ),
    ):
        function = option(function)
    return function


def _node_name(_context: click.Context, _option: click.Parameter, text: str) -> str:
    """Checks the name, because printed commands contain it. Raises BadParameter."""
    try:
        return convert(text, NodeName)
    except UnreadableText as error:
        raise click.BadParameter(
            f"{printable(text)!r} is not a node name: lower-case letters, digits, '-' and '.', 253 at most"
        ) from error


# -- gpu-manager -------------------------------------------------------------------------------------------------------------


@command.command("gpu-manager", cls=ExitingCommand, exit_codes=_EXIT_CODES)
@click.option("--manifest", type=click.Path(path_type=Path), help="gpu-manager's DaemonSet, as YAML or JSON.")
@click.option("--flags", "text", help="gpu-manager's flags, as one text.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="gpu-manager's checkpoint.  [default: gpumanager_internal_checkpoint below its --checkpoint-path]",
)
@_options
def migrate_gpu_manager(
    manifest: Path | None,
    text: str | None,
    checkpoint: Path | None,
    pod_files: tuple[Path, ...],
    node: str,
    to: Path,
    apply: bool,
    output: str,
) -> None:
    """Turn gpu-manager's flags into settings, and plan how its running pods keep their GPUs.

    The flags are taken from --flags, from --manifest, or from the gpu-manager that runs here. Run the command on the node, as root.

    \b
    Examples:
      gpumgr migrate gpu-manager
      gpumgr migrate gpu-manager --manifest gpu-manager.yaml --pods pods.json
      gpumgr migrate gpu-manager --flags "--share-mode=true --query-port=5679" --apply
    """
    if checkpoint is not None and not os.path.isfile(checkpoint):
        raise InputError(
            f"--checkpoint {checkpoint} is not a readable file, and without it no running pod keeps its GPUs; gpu-manager's default is "
            f"{Settings().checkpoint.gpu_manager_checkpoint} unless its --checkpoint-path names another folder"
        )
    found, objects = _command_of(manifest, text), _read(pod_files)
    asked = dict(found.flags)
    place = Path(asked.get("checkpoint-path") or Settings().checkpoint.gpu_manager_checkpoint.parent)
    checkpoint = (checkpoint or place / Settings().checkpoint.gpu_manager_checkpoint.name).absolute()
    folder = Path(asked.get("device-plugin-path") or Settings().kubelet.device_plugin_dir)
    live, holders, registered = asyncio.run(_kubelets_view(folder))
    plan = gpu_manager.plan_gpu_manager(
        found,
        gpu_manager.GpuManagerState(
            node=node,
            checkpoint=checkpoint,
            records=read_gpu_manager_checkpoint(checkpoint),
            live=live,
            holders=holders,
            names={pod.metadata.uid: pod.full_name for pod in of_type(objects, Pod) if pod.metadata.uid is not None},
            answering=[path for path in answering(folder) if not path.name.startswith("nvidia")],
            registered=registered,
        ),
        to=to,
    )
    _finish(plan, "gpu-manager", to, apply=apply, as_json=output == "json")


def _command_of(manifest: Path | None, text: str | None) -> GpuManagerCommand:
    if text is not None:
        return gpu_manager.from_text(text)
    if manifest is not None:
        found = gpu_manager.from_objects(read_objects(manifest))
        if found is None:
            raise InputError(f"{manifest} has no container that runs gpu-manager; give its DaemonSet, or its flags (--flags)")
        return found
    found = gpu_manager.from_process()
    if found is None:
        raise InputError("no gpu-manager was found on this host (run this as root); give its flags with --manifest or --flags")
    return found


async def _kubelets_view(folder: Path) -> tuple[frozenset[str] | None, Holders, Mapping[str, int]]:
    """From the kubelet's checkpoint: the UIDs of the pods with devices (None: unknown), the containers with ids of gpu-manager, and the
    number of registered ids by resource."""
    try:
        entries = await read_kubelet_checkpoint(folder / FILE_NAME)
        counts = parse_registered_devices((folder / FILE_NAME).read_bytes())
    except (KubeletError, OSError):
        return None, {}, {}
    holders = foreign(((e.pod_uid, e.container, e.device_ids) for e in entries or () if e.resource in VCUDA_NAMES), ())
    return pods_with_devices(entries), holders, {name: counts[name] for name in VCUDA_NAMES if name in counts}


# -- HAMi --------------------------------------------------------------------------------------------------------------------


@command.command("hami", cls=ExitingCommand, exit_codes=_HAMI_EXIT_CODES)
@click.option(
    "--manifest",
    "manifests",
    type=click.Path(path_type=Path),
    multiple=True,
    help="HAMi's ConfigMaps, DaemonSet and Deployment, and the Node, as YAML or JSON; may be repeated.",
)
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Read the node and its pods from the API server.")
@click.option("--verify", is_flag=True, help="After a take-over: compare the agent's checkpoint with the pods of HAMi.")
@_options
def migrate_hami(
    manifests: tuple[Path, ...],
    kubeconfig: Path | None,
    verify: bool,
    pod_files: tuple[Path, ...],
    node: str,
    to: Path,
    apply: bool,
    output: str,
) -> None:
    """Plan how gpumgr takes the place of HAMi's device plugin while HAMi's running pods keep their GPUs.

    Prints which GPUs the agent will adopt for each pod, what prevents an adoption, and the steps. Run the command on the
    node, as root.

    \b
    Examples:
      gpumgr migrate hami --kubeconfig /etc/kubernetes/kubelet.conf
      gpumgr migrate hami --kubeconfig /etc/kubernetes/kubelet.conf --verify
      kubectl get pods -A --field-selector spec.nodeName=gpu-7 -o json > pods.json && kubectl get node gpu-7 -o json > node.json
      kubectl -n kube-system get cm,ds,deploy -l app.kubernetes.io/name=hami -o yaml > hami.yaml
      gpumgr migrate hami --node gpu-7 --pods pods.json --manifest node.json --manifest hami.yaml --apply
    """
    if kubeconfig is None and not pod_files:
        raise InputError(
            f"the node's pods are not known: give --kubeconfig FILE, or --pods FILE with what "
            f"`kubectl get pods -A --field-selector spec.nodeName={node} -o json` prints"
        )
    objects = _read((*pod_files, *manifests))
    if kubeconfig is not None:
        objects += asyncio.run(_fetch_node_and_pods(kubeconfig, node))
    config = read_config(objects, node)
    folder = Path(str(config.settings.get("kubelet.device_plugin_dir", Settings().kubelet.device_plugin_dir)))
    found = takeover.HamiState(
        node=node,
        objects=objects,
        answering=[path for path in answering(folder) if path.name.startswith("nvidia")],
        folders=[folder for folder in (config.library_dir, *_HAMI_FOLDERS) if folder.is_dir()],
        library=_library(config.library_dir),
        kubelet=asyncio.run(_given_by_kubelet(folder, config.resources.count_resource)),
    )
    if verify:
        _verify(config, found, to, as_json=output == "json")
    else:
        plan = takeover.plan_take_over(config, found, to=to)
        _finish(plan, "hami", to, apply=apply, as_json=output == "json")


async def _given_by_kubelet(folder: Path, resource: str) -> frozenset[tuple[str, str]] | None:
    """(pod UID, container) of each container with devices of this resource; None if unknown."""
    try:
        entries = await read_kubelet_checkpoint(folder / FILE_NAME)
    except (KubeletError, OSError):
        return None
    return None if entries is None else frozenset((each.pod_uid, each.container) for each in entries if each.resource == resource)


def _verify(config: Config, found: takeover.HamiState, to: Path, *, as_json: bool) -> None:
    """Exits with 1 if there are differences."""
    folder = effective_settings(to if to.exists() else None).checkpoint.dir
    loaded = read_checkpoint(folder)
    if loaded.lost:
        raise GpumgrError(f"no checkpoint of a running agent in {folder}: {loaded.why}")
    running, problems = takeover.running_pods(config, found)
    wrong = [printable(each) for each in (*problems, *takeover.differences(running, loaded.ledger))]
    if as_json:
        click.echo(json.dumps({"adopted": [printable(each.describe()) for each in running], "differences": wrong}, indent=2))
    else:
        click.echo("\n".join(wrong) or f"all {len(running)} containers with GPUs of HAMi are adopted with their GPUs")
    if wrong:
        raise SystemExit(1)


async def _fetch_node_and_pods(kubeconfig: Path, node: str) -> tuple[Object, ...]:
    """Raises GpumgrError."""
    async with ApiServer.session(kubeconfig, remedy="name another one with --kubeconfig, or the pods with --pods") as server:
        pods = await server.read("GET", "/api/v1/pods", query={"fieldSelector": f"spec.nodeName={node}"})
        return (
            parse_object({**await server.read("GET", f"/api/v1/nodes/{node}"), "kind": "Node"}, _API_SERVER),
            *(parse_object({**pod, "kind": "Pod"}, _API_SERVER) for pod in convert(items_of(pods), list[dict[str, Any]])),
        )


def _library(folder: Path) -> tuple[Path, str] | None:
    """The last library by file name (which has the version), and its SHA-256."""
    for path in sorted(folder.glob("libvgpu.so.*"), reverse=True):
        if path.is_file():
            with path.open("rb") as file:
                return path, hashlib.file_digest(file, "sha256").hexdigest()
    return None


# -- both --------------------------------------------------------------------------------------------------------------------


def _read(files: tuple[Path, ...]) -> tuple[Object, ...]:
    return tuple(each for file in files for each in read_objects(file))


def _finish(plan: Plan, source: str, to: Path, *, apply: bool, as_json: bool) -> None:
    """Prints the plan; with `apply` writes the settings. Names from files are made printable; the YAML encoder escapes the settings."""
    plan, done = plan.written(printable), None
    if not as_json:
        click.echo(text_of(plan, str(to)))
    if apply:
        done = write_settings(to, _HEAD.format(source=source) + settings_yaml(plan.settings))
    if as_json:
        click.echo(json.dumps(cleaned({**plan.document(), "file": str(to), "applied": done}), indent=2))
    elif done is not None:
        click.echo(f"{to}: {done}")
