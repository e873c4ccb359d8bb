"""The `gpumgr` command.

Exit codes: 0 done; 1 a refusal or failure, or a bug that ended the agent; 2 wrong usage, settings or input; 3 another agent runs on this
node; 4 the checkpoint can't be used; 5 the driver was replaced under the running agent (start it again).
"""

import contextlib
import importlib
import sys
from typing import Final, NoReturn

import click

from gpumgr import __version__
from gpumgr.common.errors import GpumgrError, InputError

#: Command -> its line in `gpumgr --help`, in the order of the help. So the help needs none of the commands' modules.
_COMMANDS: Final = {
    "run": "Run the agent until SIGTERM.",
    "scheduler": "Choose node and GPUs for kube-scheduler.",
    "claims": "Create claim templates, and keep quotas of DRA pods.",
    "usage": "Show the GPUs that containers hold, and what they use.",
    "why": "Explain why a pod has its GPUs, was refused, or waits.",
    "suspend": "Move a pod's GPU memory to the host's memory.",
    "resume": "Move a suspended pod's memory back to its GPU.",
    "resize": "Change how much of its GPU a running container may use.",
    "history": "Show what happened on this node.",
    "gpu": "Take a GPU out of service for maintenance, and return it.",
    "doctor": "Check this node or the cluster, and name remedies.",
    "healthy": "Check whether the agent responds.",
    "install": "Install the agent as a service, or HAMi-core's library.",
    "migrate": "Migrate from gpu-manager or HAMi.",
    "place": "Show which GPUs of a node a request would get.",
    "simulate": "Compare placement policies, or ask where a pod would fit.",
    "topology": "Show how the GPUs are connected.",
    "checkpoint": "Print the agent's checkpoint.",
    "config": "Check and show settings.",
    "demo": "Play a script on a simulated node.",
}
#: Command -> its module, if that has another name.
_MODULES: Final = {"resume": "suspend"}
#: Long-running commands. Their imports leave out unused parts of libraries.
_DAEMONS: Final = ("run", "scheduler", "claims")


class _Lazy(click.Group):
    """Imports a subcommand's module when it is called, so that the agent does not load the other commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 (click's signature)
        if cmd_name not in _COMMANDS:
            return None
        name = f"gpumgr.cli.{_MODULES.get(cmd_name, cmd_name)}"
        if cmd_name in _DAEMONS:
            from gpumgr.cli.daemon import lean_imports

            with lean_imports():
                module = importlib.import_module(name)
        else:
            module = importlib.import_module(name)
        command = getattr(module, cmd_name if cmd_name in _MODULES else "command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 (click's signature)
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpumgr")
def group() -> None:
    """Shares NVIDIA GPUs between Kubernetes pods: the node agent and its tools.

    \b
    Examples:
      gpumgr demo
      gpumgr run --config /etc/gpumgr/gpumgr.yaml
      gpumgr usage --watch
      gpumgr why demo/resnet
      gpumgr doctor
      gpumgr topology --sim dgx1-v100-8
      gpumgr place --sim hgx-h100-8 --cores 200
    """


def main() -> None:
    running = sys.argv[1:2] == ["run"]
    try:
        group()
    except InputError as error:
        _end(error, code=2)
    except GpumgrError as error:
        _end(error, code=1)
    except OSError as error:  # click itself handles a closed pipe
        if running:
            raise  # in the agent it is a bug, and its traceback belongs in the log
        # An error while the output is written names no file.
        _end(error if error.filename else f"the output can't be written: {error.strerror or error}", code=1)


def _end(why: Exception | str, *, code: int) -> NoReturn:
    """The text is made printable, because it may quote files, answers and names."""
    from gpumgr.cli.formats import printable  # here, so that `lean_imports` covers all imports of the agent

    with contextlib.suppress(OSError):
        click.echo("\n".join(map(printable, f"gpumgr: {why}".split("\n"))), err=True)
    sys.exit(code)
