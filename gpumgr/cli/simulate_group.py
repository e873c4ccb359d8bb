"""`gpumgr simulate` as a command with subcommands, which are imported only when they are called: each simulation is a process of its own
that imports the command."""

from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from gpumgr.cli.exit_codes import ExitingCommand
from gpumgr.cli.options import FiniteRange
from gpumgr.settings.schema import SchedulerSettings

_LIVE: Final = "gpumgr.cli.simulate_live"
_FILE: Final = click.Path(dir_okay=False, path_type=Path)
CPUS_PER_GPU: Final = click.Option(
    ["--cpus-per-gpu"],
    type=FiniteRange(0.1, 1000),
    default=SchedulerSettings().cpus_per_gpu,
    show_default=True,
    help="The setting scheduler.cpus_per_gpu, for least-fragmentation.",
)
SOURCE: Final = (
    click.Option(["--from-cluster"], is_flag=True, help="Read nodes and pods through the API server."),
    click.Option(["--kubeconfig"], type=_FILE, help="With --from-cluster.  [default: $KUBECONFIG, ~/.kube/config]"),
    click.Option(["--snapshot"], type=_FILE, help="The file to read, or with --from-cluster to write."),
    click.Option(["--anonymise"], is_flag=True, help="Write other names, and other values of labels."),
)


class LiveGroup(ExitingCommand, click.Group):
    """A group that may be called without a subcommand, to save a snapshot or for its own function."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, invoke_without_command=True, **options)
        self.params += [CPUS_PER_GPU, *SOURCE]

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return ["fit", "defrag", "capacity"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return getattr(import_module(_LIVE), cmd_name) if cmd_name in self.list_commands(ctx) else None

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = {str(each.name): ctx.params.pop(str(each.name)) for each in SOURCE}
        return super().invoke(ctx)


def answered(context: click.Context) -> bool:
    """Whether the call of the group is for a subcommand, or the snapshot that it asks for has been saved here."""
    saves = context.invoked_subcommand is None and context.obj["from_cluster"] and context.obj["snapshot"] is not None
    if saves:
        import_module(_LIVE).document_of(**context.obj)
    return saves or context.invoked_subcommand is not None
