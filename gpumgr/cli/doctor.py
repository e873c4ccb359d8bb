"""`gpumgr doctor`: checks this node, or with --cluster the cluster, and names the remedy of each problem."""

import asyncio
import json
import os
import sys
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

import click
from msgspec.structs import asdict, replace
from rich.text import Text

from gpumgr.cli.examination import LIMIT_SECONDS, Check, Report, api_server, enforcement, examine, folders, gpus, on_thread, peers
from gpumgr.cli.formats import open_table, show
from gpumgr.cli.options import UNREAD_FILE, ExitingCommand, output_option, settings_options, sim_option
from gpumgr.cli.topology import hardware_of
from gpumgr.common.log import configure_log
from gpumgr.driver import Hardware
from gpumgr.node.node_enforcement import make_nvml
from gpumgr.settings import Settings
from gpumgr.settings.profile import mig_offered, mig_on_demand


def checks_for(settings: Settings, hardware: Hardware, *, in_pod: bool = False, before_start: bool = False) -> tuple[Check, ...]:
    """`in_pod`: the command runs in a pod's container, which has its own file system. `before_start`: an agent with these settings is about
    to start."""
    nvml_seconds = min(settings.nvml.call_timeout_seconds, LIMIT_SECONDS * 0.8)
    nvml = gpus.SharedNvml(make_nvml(replace(settings, nvml=replace(settings.nvml, call_timeout_seconds=nvml_seconds)), hardware))
    return (
        *_gpu_checks(settings, hardware, nvml),
        *_kubelet_checks(settings, nvml, before_start=before_start),
        *_host_checks(settings, hardware, nvml, in_pod=in_pod),
        *_backend_checks(settings, hardware, nvml),
    )


def _gpu_checks(settings: Settings, hardware: Hardware, nvml: gpus.SharedNvml) -> Iterator[Check]:
    root, simulated = settings.container.device_root, hardware.simulated
    yield Check("driver", on_thread(gpus.look_at_driver, hardware.proc_root, root, simulated=simulated), gpus.IF_HUNG)
    yield Check("nvml", partial(gpus.look_at_nvml, nvml, mig_offered=mig_offered(settings)), gpus.IF_HUNG)
    if mig_on_demand(settings) is not None:
        yield Check("mig-devices", partial(gpus.look_at_mig_devices, nvml, settings.checkpoint.dir), gpus.IF_HUNG)
    yield Check("device-nodes", partial(gpus.look_at_device_nodes, nvml, root, simulated=simulated), gpus.IF_HUNG)


def _kubelet_checks(settings: Settings, nvml: gpus.SharedNvml, *, before_start: bool) -> Iterator[Check]:
    kubelet, process = settings.kubelet, settings.process
    yield Check("settings", on_thread(folders.look_at_settings, UNREAD_FILE), folders.IF_HUNG)
    yield Check("mode", partial(api_server.look_at_mode, settings.node.mode), "")
    if settings.node.mode == "dra":
        yield Check("dra-sockets", on_thread(api_server.look_at_sockets, kubelet), peers.KUBELET_HUNG)
        yield Check("dra-slice", partial(api_server.look_at_slice, settings, nvml), api_server.IF_HUNG)
        yield Check("dra-claims", partial(api_server.look_at_claims, settings), api_server.IF_HUNG)
    else:
        yield Check("kubelet", partial(peers.look_at_folder, kubelet.device_plugin_dir), peers.KUBELET_HUNG)
    pods = partial(peers.look_at_pod_resources, kubelet.pod_resources_socket, needs_cdi=folders.uses_cdi(settings))
    yield Check("pod-resources", pods, peers.KUBELET_HUNG)
    yield Check("plugins", on_thread(peers.look_at_plugins, kubelet.device_plugin_dir), folders.IF_HUNG)
    # With process.instance (a rolling update) the new agent waits for the old one, so a running agent is no error.
    alone = before_start and process.instance is None
    agent = on_thread(peers.look_at_agent, process.lock_path, kubelet.device_plugin_dir, before_start=alone)
    yield Check("agent", agent, folders.IF_HUNG)


def _host_checks(settings: Settings, hardware: Hardware, nvml: gpus.SharedNvml, *, in_pod: bool) -> Iterator[Check]:
    cri, cdi_dir, written = settings.cri, settings.enforcement.cdi_dir, dict(folders.written(settings))
    paths = on_thread(folders.look_at_host_paths, folders.of_host(settings), hardware.proc_root, in_pod=in_pod)
    yield Check("host-paths", paths, folders.IF_HUNG)
    yield Check("folders", on_thread(folders.look_at_folders, written), folders.IF_HUNG)
    yield Check("checkpoint", on_thread(folders.look_at_checkpoint, settings.checkpoint.dir), folders.IF_HUNG)
    yield Check("cri", partial(peers.look_at_runtime, cri.socket), peers.RUNTIME_HUNG)
    yield Check("cgroups", on_thread(peers.look_at_cgroups, cri.cgroup_root, hardware.proc_root), peers.RUNTIME_HUNG)
    yield Check("cdi", partial(peers.look_at_cdi, cdi_dir, cri.socket, used=folders.uses_cdi(settings)), peers.RUNTIME_HUNG)
    files = partial(peers.look_at_driver_files, settings, nvml, simulated=hardware.simulated)
    yield Check("driver-files", files, peers.RUNTIME_HUNG)


def _backend_checks(settings: Settings, hardware: Hardware, nvml: gpus.SharedNvml) -> Iterator[Check]:
    backends = enforcement.NodeBackends(settings, nvml, hardware)
    for name in ("limiter", "nvml-memory", "mps", "hami-core", "vcuda"):
        yield Check(name, partial(backends.look_at, name), enforcement.IF_HUNG)
    yield Check("burst", partial(enforcement.look_at_bursts, settings), enforcement.IF_HUNG)
    yield Check("rbac", partial(api_server.look_at_rights, settings), api_server.IF_HUNG)
    yield Check("enforcement", backends.look_at_choice, enforcement.IF_HUNG)


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
