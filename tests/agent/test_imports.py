"""What the running agent has imported: nothing that only tests or other commands need."""

import re
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

import gpumgr
from gpumgr.sim.demo.process import AgentProcess
from tools.sbom import at_run_time

from .stage import app, run, stage

#: Python's own account, one line for each module (its documentation, `-X importtime`).
_TOLD: Final = re.compile(r"import time:\s+\d+ \|\s+\d+ \|\s+(\S+)")
#: Not for a daemon: a terminal's colours, the tools of tests, gRPC's C core, generated models by the hundred; and not for a node in mode
#: plugin that has never been in mode dra: the DRA driver.
UNWANTED: Final = (
    *("rich", "pygments", "markdown_it", "pytest", "hypothesis", "playwright", "psutil", "jsonschema", "requests", "jinja2"),
    *("grpc", "google", "kubernetes_asyncio.client.models", "kubernetes_asyncio.client.api_client", "setuptools", "pip"),
    *(
        "dateutil.parser._parser",
        "zipfile",
        "argparse",
        "difflib",
        "attr.validators",
        "betterproto.lib.std",
        "http.server",
        "wsgiref",
    ),
    *(
        "urllib3",
        "html.entities",
        "pickle",
        "aiohttp.tracing",
        "aiohttp.web_ws",
        "aiohttp._websocket",
        "typing_extensions",
        "multiprocessing",
        "gpumgr.kubelet.dra_side",
        "gpumgr.kubelet.dra_registration",
        "gpumgr.agent.claims",
        "gpumgr._pb.drahealth",
    ),
    *(
        "gpumgr.sim.demo",
        "gpumgr.cli.examination",
        "gpumgr.compat.plan",
        "gpumgr.compat.objects",
        "gpumgr.compat.hami.takeover",
        "gpumgr.cli.usage",
        "gpumgr.cli.doctor",
        "gpumgr.cli.demo",
    ),
)
#: structlog imports them, and gpumgr.cli.daemon makes these imports fail.
_ASKED_FOR: Final = {"rich", "greenlet"}
#: Imported where installed: setuptools has a hook in each interpreter's start, and aiohttp looks for zstd in the folder of backports.
_IF_THERE: Final = {"setuptools", "backports-tarfile"}
#: The start of the agent is for the most part the import of its modules: what needs more must be worth the time and memory, or be
#: imported only where a run needs it.
_MOST_MODULES: Final = 718


def imported(agent: AgentProcess) -> set[str]:
    """All modules that it asked for, those of the interpreter's start among them."""
    lines = (line["text"] for line in agent.agent_log.lines if line["event"] == "text")
    return {found[1] for found in map(_TOLD.match, lines) if found}


def test_values_are_structs() -> None:
    """A dataclass takes half a millisecond of each start to define, a msgspec.Struct a twentieth of it."""
    sources = [path for path in Path(gpumgr.__file__).parent.rglob("*.py") if "_pb" not in path.parts]
    assert len(sources) > 200
    assert [path for path in sources if "@dataclass(frozen=True" in path.read_text()] == []


async def test_the_agent_imports_what_it_needs_and_no_more(folder: Path) -> None:
    async with stage(folder) as node:
        await node.start_agent()
        assert (
            await node.agent.stop() == 0
        )  # the first start on a node looks for claims that a lost checkpoint may have contained
        await node.start_agent({"PYTHONPROFILEIMPORTTIME": "1"})
        await run(node, "a", app(30, 4))
        await node.metrics()
        assert await node.agent.stop() == 0
    modules = imported(node.agent)
    assert {"gpumgr.node.lifecycle", "gpumgr.kube.publisher.publisher", "aiohttp.web", "grpclib.server"} - modules == set()
    assert {each for each in modules if f"{each}.".startswith(tuple(f"{name}." for name in UNWANTED))} - _ASKED_FOR == set()
    assert len(modules) <= _MOST_MODULES
    homes = packages_distributions()
    packages = {canonicalize_name(home) for module in modules - _ASKED_FOR for home in homes.get(module.partition(".")[0], ())}
    assert packages - {*at_run_time(), "gpumgr", *_IF_THERE} == set()
