"""The states that the page is shown, and what is read back from it."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace
from playwright.async_api import Browser, Page, expect

from gpumgr.agent.api import to_json_data
from gpumgr.agent.inventory import HardwareHealth, Inventory
from gpumgr.agent.node_report import ApiQueueState, NodeReport
from gpumgr.agent.writer import AgentView
from gpumgr.common.units import BLOCK_BYTES
from gpumgr.ledger.gpu_share import GpuLimits
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import ALL_CORES, GpuRegistry
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.ledger.usage.node_use import ContainerUse, NodeUse, UnattributedSum
from gpumgr.placement.pods import PodKey
from gpumgr.placement.topology.devices import GpuFailure, Level, NodeSample, NodeSnapshot, Topology
from gpumgr.web.state import node_state
from tests.allocations import allocated
from tests.e2e.browser import Stage, Visit, visit
from tests.unit.web.metrics.pictures import name_of, sample_of, snapshot_of, uuid_of

Document = dict[str, Any]
GIB = 1 << 30
NOW = 1_800_000_000.0
#: An agent sends its state once in a sample period.
BEAT_SECONDS = 1.0
PODS: tuple[PodKey, ...] = (("team", "train"), ("team", "web"), ("search", "embed"), ("search", "rank"), ("batch", "night"))
HOSTILE: tuple[PodKey, ...] = (
    ("team", "<script>window.harmed = 1</script>"),
    ("team", '"><img src=x onerror="window.harmed = 1">'),
    ("team", "line\nbreak \t and 'quotes' \"twice\""),
    ("n" * 63, "x" * 253),
    ("team", "\u202egpj.exe \u062e\u062f\u0645\u0629"),
    ("team", "&lt;b&gt;&amp;${7*7}{{7*7}}"),
    ("..", "../../metrics?a=b#c"),
)

#: What of the page has too little contrast, as a script that says which.
DIM_TEXT = """() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].filter((child) => child.nodeType === 3).map((child) => child.data.trim()).join("");
    if (!text || !node.checkVisibility() || node.closest(".sr, .jump, noscript, title")) continue;
    const style = getComputedStyle(node), below = [];
    for (let at = node; at; at = at.parentElement) below.unshift(getComputedStyle(at).backgroundColor);
    const box = node.ownerSVGElement && node.parentElement.querySelector(".box");
    if (box) below.push(getComputedStyle(box).fill);
    const ground = rgb(below), ink = rgb([...below, node.ownerSVGElement ? style.fill : style.color]);
    const [a, b] = [light(ground), light(ink)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) found.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""


def node(count: int) -> NodeSnapshot:
    """GPUs on NVSwitch, half of them on each of two sockets."""
    half = count // 2
    levels = tuple(tuple(Level.NODE if a // half == b // half else Level.SYS for b in range(count)) for a in range(count))
    links = tuple(tuple(0 if a == b else 18 for b in range(count)) for a in range(count))
    plain = snapshot_of(count)
    gpus = tuple(replace(gpu, memory_bytes=80 * GIB, numa_node=gpu.index // half) for gpu in plain.gpus)
    return replace(plain, gpus=gpus, topology=Topology(levels, links))


def shares(pods: Iterable[PodKey], *, count: int = 8) -> list[Allocation]:
    """One share of 9 cores and 4 GiB each, round the GPUs; the first has all of GPU0."""
    found = []
    for n, pod in enumerate(pods):
        gpu, place = name_of(n % count), n // count
        found.append(
            allocated(
                id=f"{n:016x}",
                pod=pod,
                uid=f"uid-{n}",
                container="main",
                cores={gpu: ((1 << 9) - 1) << 9 * (place % 11) if n else ALL_CORES},
                blocks={gpu: ((1 << 16) - 1) << 16 * place} if n else {},
                gpus=(gpu,),
                granted_at=NOW - 60 * n,
                why="the least free room that fits",
                mechanisms=("mps",) if n % 2 else ("hami-core",),
            )
        )
    return found


def document(
    pods: Iterable[PodKey] = PODS,
    *,
    entries: Iterable[HistoryEntry] = (),
    **about: Any,
) -> Document:
    """What `picture(pods, **about)` becomes for the page."""
    return to_json_data(node_state(report(pods, **about), list(entries), clock=lambda: 0.4))


def report(
    pods: Iterable[PodKey] = PODS,
    *,
    count: int = 8,
    used_gib: float = 2.0,
    gone: int | None = None,
    unreadable: Mapping[int, str] | None = None,
    failed: Mapping[int, str] | None = None,
    at: float = NOW,
    **about: Any,
) -> NodeReport:
    """A node on which each pod but the first has a share, and every share uses so much. `gone`: a GPU that the driver does not show
    any more; `unreadable`: what the driver lists at an index without a UUID, and why."""
    allocations = shares(pods, count=count)
    snapshot = node(count)
    gpu_registry = Inventory(snapshot=snapshot).register(GpuRegistry())
    shown = [n for n in range(count) if n != gone]
    left = Topology(
        tuple(tuple(snapshot.topology.levels[a][b] for b in shown) for a in shown),
        tuple(tuple(snapshot.topology.nvlinks[a][b] for b in shown) for a in shown),
    )
    failures = tuple(GpuFailure(index=index, uuid=None, reason=why) for index, why in (unreadable or {}).items())
    inventory = Inventory(
        snapshot=replace(snapshot, gpus=tuple(snapshot.gpus[n] for n in shown), topology=left, failures=failures),
        health=HardwareHealth(failed={uuid_of(n): why for n, why in (failed or {}).items()}),
    )
    view = AgentView(
        ledger=Ledger(gpu_registry, {a.id: a for a in allocations}),
        inventory=inventory,
        node=inventory.view(gpu_registry),
    )
    used = round(used_gib * GIB)
    uses = {
        (a.id, next(iter(a.gpus))): ContainerUse(
            allocation=a.id,
            gpu=next(iter(a.gpus)),
            uuid=gpu_registry.by_name[next(iter(a.gpus))].uuid,
            cores=9,
            memory_bytes=used,
            utilization_ratio=0.05,
            processes={100 + n: used},
        )
        for n, a in enumerate(allocations)
    }
    strange = {name_of(4): UnattributedSum(memory_bytes=int(1.2 * GIB), processes=1)} if count > 4 else {}
    found = NodeReport(
        view=view,
        node="node-1",
        at=at,
        registered={"tencent.com/vcuda-core": True, "tencent.com/vcuda-memory": True},
        sample=NodeSample(gpus={uuid: replace(s, memory_used_bytes=30 * GIB) for uuid, s in sample_of(*shown).gpus.items()}),
        sampled_at=0.0,
        nvml_up=True,
        use=NodeUse(containers=uses, gpus=strange),
        over=frozenset((a.id, gpu) for a in allocations for gpu in a.gpus if a.held("memory") and used > 16 * BLOCK_BYTES),
        gpu_limits={uuid_of(n): GpuLimits(memory="hard", memory_by="nvml-memory", cores="soft", cores_by="mps") for n in shown},
        api_queue=ApiQueueState(waiting=2),
        reasons={uuid_of(n): "xid" for n in failed or {}},
    )
    return replace(found, **about)


def refusal(number: int = 1, pod: PodKey = ("team", "late"), why: str = "no GPU has 60 cores free") -> HistoryEntry:
    return HistoryEntry(number=number, at=NOW - 60, what="refused", id="c", pod=pod, kind="core", size=60, why=why, code="no_fit")


async def rows(page: Page) -> list[list[str]]:
    found: list[list[str]] = await page.evaluate(
        "[...document.querySelectorAll('#rows tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return found


async def column(page: Page, number: int) -> list[str]:
    return [row[number] for row in await rows(page)]


async def loaded(seen: Visit, containers: int = len(PODS)) -> Page:
    await expect(seen.page.locator("#rows tr")).to_have_count(containers)
    return seen.page


@asynccontextmanager
async def opened(
    browser: Browser, stage: Stage, shown: Document | None = None, *, containers: int = len(PODS), **context: Any
) -> AsyncIterator[Page]:
    """The page with so many containers. `shown`: another document than the present one; `context`: see `visit`."""
    if shown is not None:
        stage.show(shown)
    async with visit(browser, stage.url, **context) as seen:
        yield await loaded(seen, containers)
