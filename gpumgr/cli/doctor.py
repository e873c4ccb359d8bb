"""`gpumgr doctor`: checks this node, or with --cluster the cluster, and names the remedy of each problem."""

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

import click
from msgspec.structs import asdict, replace
from rich.text import Text

from gpumgr.cli.examination import LIMIT_SECONDS, Check, Report, api_server, enforcement, examine, folders, gpus, peers
from gpumgr.cli.formats import open_table, show
from gpumgr.cli.options import UNREAD_FILE, ExitingCommand, output_option, settings_options, sim_option
from gpumgr.cli.topology import hardware_of
from gpumgr.common.log import configure_log
from gpumgr.driver import Hardware
from gpumgr.node.node_enforcement import make_nvml
from gpumgr.settings import Settings
from gpumgr.settings.profile import mig_offered, mig_on_demand


def checks_for(settings: Settings, hardware: Hardware, *, in_pod: bool = False, before_start: bool = False) -> tuple[Check, ...]:
    """`in_pod`: the command runs in a container with its own folders. `before_start`: an agent with these settings is about
    to start."""
    nvml_seconds = min(settings.nvml.call_timeout_seconds, LIMIT_SECONDS * 0.8)
    nvml = make_nvml(replace(settings, nvml=replace(settings.nvml, call_timeout_seconds=nvml_seconds)), hardware)
    seen = gpus.SharedNvml(nvml)
    plugin_dir, pods_socket = settings.kubelet.device_plugin_dir, settings.kubelet.pod_resources_socket
    cri = settings.cri
    in_dra = settings.node.mode == "dra"
    uses_cdi = settings.enforcement.injection == "cdi" or in_dra
    written = dict(folders.written(settings))
    # The kubelet, the runtime, other containers or the next agent read these folders, so they must be mounted from the host.
    host_folders = {"kubelet.device_plugin_dir": plugin_dir, "kubelet.pod_resources_socket": pods_socket.parent, **written}
    if in_dra:
        host_folders |= {
            "kubelet.plugins_dir": settings.kubelet.plugins_dir,
            "kubelet.plugins_registry_dir": settings.kubelet.plugins_registry_dir,
        }
    pods = partial(peers.look_at_pod_resources, pods_socket, needs_cdi=uses_cdi)
    # With process.instance (a rolling update) the second agent waits for the first, so a running agent is no error.
    alone = before_start and settings.process.instance is None
    agent = partial(peers.look_at_agent, settings.process.lock_path, plugin_dir, before_start=alone)
    paths = partial(folders.look_at_host_paths, host_folders, hardware.proc_root, in_pod=in_pod)
    cgroups = partial(peers.look_at_cgroups, cri.cgroup_root, hardware.proc_root)
    cdi = partial(peers.look_at_cdi, settings.enforcement.cdi_dir, cri.socket, used=uses_cdi)
    files = partial(peers.look_at_driver_files, settings, seen, simulated=hardware.simulated)
    backends = enforcement.NodeBackends(settings, seen, hardware)
    kubelet_folder = Check("kubelet", partial(peers.look_at_folder, plugin_dir), peers.KUBELET_HUNG)
    return (
        *_gpu_checks(settings, hardware, seen),
        Check("settings", partial(folders.look_at_settings, UNREAD_FILE), folders.IF_HUNG),
        Check("mode", partial(api_server.look_at_mode, settings.node.mode), ""),
        *(_claim_checks(settings, seen) if in_dra else [kubelet_folder]),
        Check("pod-resources", pods, peers.KUBELET_HUNG),
        Check("plugins", partial(peers.look_at_plugins, plugin_dir), folders.IF_HUNG),
        Check("agent", agent, folders.IF_HUNG),
        Check("host-paths", paths, folders.IF_HUNG),
        Check("folders", partial(folders.look_at_folders, written), folders.IF_HUNG),
        Check("checkpoint", partial(folders.look_at_checkpoint, settings.checkpoint.dir), folders.IF_HUNG),
        Check("cri", partial(peers.look_at_runtime, cri.socket), peers.RUNTIME_HUNG),
        Check("cgroups", cgroups, peers.RUNTIME_HUNG),
        Check("cdi", cdi, peers.RUNTIME_HUNG),
        Check("driver-files", files, peers.RUNTIME_HUNG),
        Check("limiter", partial(backends.look_at, "limiter"), enforcement.IF_HUNG),
        Check("nvml-memory", partial(backends.look_at, "nvml-memory"), enforcement.IF_HUNG),
        Check("mps", partial(backends.look_at, "mps"), enforcement.IF_HUNG),
        Check("hami-core", backends.look_at_hami_core, enforcement.IF_HUNG),
        Check("vcuda", partial(backends.look_at, "vcuda"), enforcement.IF_HUNG),
        Check("burst", partial(enforcement.look_at_bursts, settings), enforcement.IF_HUNG),
        Check("rbac", partial(api_server.look_at_rights, settings), api_server.IF_HUNG),
        Check("enforcement", backends.look_at_choice, enforcement.IF_HUNG),
    )


def _gpu_checks(settings: Settings, hardware: Hardware, seen: gpus.SharedNvml) -> tuple[Check, ...]:
    device_root = settings.container.device_root
    driver = partial(gpus.look_at_driver, hardware.proc_root, device_root, simulated=hardware.simulated)
    mig_devices = partial(gpus.look_at_mig_devices, seen, settings.checkpoint.dir)
    nodes = partial(gpus.look_at_device_nodes, seen, device_root, simulated=hardware.simulated)
    return (
        Check("driver", driver, gpus.IF_HUNG),
        Check("nvml", partial(gpus.look_at_nvml, seen, mig_offered=mig_offered(settings)), gpus.IF_HUNG),
        *([] if mig_on_demand(settings) is None else [Check("mig-devices", mig_devices, gpus.IF_HUNG)]),
        Check("device-nodes", nodes, gpus.IF_HUNG),
    )


def _claim_checks(settings: Settings, seen: gpus.SharedNvml) -> tuple[Check, ...]:
    return (
        Check("dra-sockets", partial(api_server.look_at_sockets, settings.kubelet), peers.KUBELET_HUNG),
        Check("dra-slice", partial(api_server.look_at_slice, settings, seen), api_server.IF_HUNG),
        Check("dra-claims", partial(api_server.look_at_claims, settings), api_server.IF_HUNG),
    )


_COLORS: Final = {"ok": "green", "warning": "yellow", "error": "red", "skipped": "bright_black"}

_EXIT_CODES: Final = {0: "no errors; there may be warnings", 1: "at least one error", 2: "wrong usage or settings"}
_EPILOG = """
\b
Examples:
  gpumgr doctor --config /etc/gpumgr/gpumgr.yaml
  gpumgr doctor --standalone --sim hgx-h100-8
  gpumgr doctor --before-start                        (in an init container of the agent's pod)
  gpumgr doctor --cluster --kubeconfig admin.conf    (the scheduler's side, from any machine)
  gpumgr doctor --json | jq '.[] | select(.state == "error")'
"""


@click.command(
    "doctor",
    cls=ExitingCommand,
    epilog=_EPILOG,
    exit_codes=_EXIT_CODES,
)
@settings_options
@sim_option
@click.option("--standalone", is_flag=True, help="Check for an agent that runs without an API server.")
@click.option("--before-start", is_flag=True, help="The agent is about to start: a running agent is an error.")
@click.option(
    "--cluster", is_flag=True, help="Check the scheduler, claims and all nodes through the API server, and nothing of this node."
)
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="With --cluster: credentials of an administrator.")
@click.option(
    "--scheduler-config",
    type=click.File(encoding="utf-8", errors="replace"),
    metavar="PATH",
    help="With --cluster: kube-scheduler's configuration file, if it is not the chart's.",
)
@output_option
@click.option("--json", "as_json", is_flag=True, help="Short for --output json.")
def command(
    settings: Settings,
    sim: str | None,
    before_start: bool,
    cluster: bool,
    kubeconfig: Path | None,
    scheduler_config: TextIO | None,
    output: str,
    as_json: bool,
) -> None:
    """Check what the agent needs on this node, or with --cluster what the scheduler needs in the cluster. Nothing is changed.

    Each check prints one line: its state, what it found, and what to do. The states are ok, warning (the agent runs, but something will be
    missing), error (the settings ask for something that can't work) and skipped. Run it as the agent's user, root.
    """
    configure_log("error", "auto", cache_loggers=False)
    as_json = as_json or output == "json"
    if cluster:
        report_cluster(kubeconfig or settings.kubernetes.kubeconfig, scheduler_config, as_json=as_json)
    if kubeconfig or scheduler_config:
        raise click.UsageError("--kubeconfig and --scheduler-config need --cluster")
    with hardware_of(sim, settings.nvml.library_path) as hardware:
        in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
        report(examine(checks_for(settings, hardware, in_pod=in_pod, before_start=before_start)), as_json=as_json)


def report_cluster(kubeconfig: Path | None, config: TextIO | None, *, as_json: bool) -> NoReturn:
    """Raises SettingsError for credentials that can't be used."""
    from gpumgr.cli.examination import cluster  # the checks of a node do not need it
    from gpumgr.kube.client import ApiServer

    text = config.read() if config is not None else None

    async def examined() -> Report:
        remedy = "give --kubeconfig FILE, or run in a pod with a service account"
        async with ApiServer.session(kubeconfig, remedy=remedy) as server:
            return await examine(cluster.checks_for_cluster(server, text), limit_seconds=cluster.LIMIT_SECONDS)

    report(examined(), as_json=as_json)


def report(examination: Coroutine[Any, Any, Report], *, as_json: bool) -> NoReturn:
    with asyncio.Runner() as runner:
        done = runner.run(examination)
        if as_json:
            click.echo(json.dumps([{"check": name, **asdict(finding)} for name, finding in done.findings.items()], indent=2))
        else:
            # `kubectl describe pod` shows the last 2 KiB of a failed container's output, so errors are last.
            table = open_table(("", False), ("", False), ("", False), header=False)
            for name, finding in sorted(done.findings.items(), key=lambda found: found[1].state == "error"):
                text = "; ".join(filter(None, (finding.message, finding.remedy)))
                table.add_row(Text(finding.state, style=_COLORS[finding.state]), Text(name), Text(text))
            show(table)
        if done.hung:
            sys.stdout.flush()
            os._exit(done.exit_code)  # the runner would wait for threads that hang
    sys.exit(done.exit_code)
