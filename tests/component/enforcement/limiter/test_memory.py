"""The memory limit: real processes on the fake GPU, with the library preloaded."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.component.enforcement.limiter.harness import CONTEXT_BYTES, GPU_BYTES, MIB, TWO_GPUS, Container, Node, Tenant

_OUT_OF_MEMORY = 2
_LIMIT = 4096 * MIB
_ROOM = _LIMIT - CONTEXT_BYTES
_KINDS = ("alloc", "managed", "pitch", "array", "vmm", "async", "pool")
#: In which the driver takes memory.
_BLOCK = 2 * MIB
#: By which a pool grows and shrinks: so much of the limit may stay unused, and so much of the pool.
_POOL_STEP = 32 * MIB


@pytest.fixture
def container(node: Node) -> Container:
    return node.container(limit_bytes=_LIMIT)


@pytest.fixture
def tenant(node: Node, container: Container) -> Tenant:
    return node.started(container, clock=False)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("lookup", ["dlsym", "proc", "stream"])
def test_each_kind_is_granted_up_to_the_limit_and_then_out_of_memory(
    node: Node, container: Container, kind: str, lookup: str
) -> None:
    tenant = node.started(container, lookup, clock=False)
    step = 6 * MIB
    for _ in range(2):  # what is freed can be had again
        result, granted, _ = tenant.ask(f"grab {kind} {step} {2 * _LIMIT}")
        assert result == _OUT_OF_MEMORY
        assert _ROOM - granted < (2 * _POOL_STEP if kind in ("async", "pool") else step)
        assert node.used_bytes() == container.reserved_bytes() <= _LIMIT
        assert tenant.ask("free")[0] == 0
    if kind != "async":  # the device's pool keeps what it has
        assert container.by_kind() == {"context": CONTEXT_BYTES}


def test_the_last_byte_is_granted_and_not_one_more(tenant: Tenant) -> None:
    assert tenant.ask(f"grab alloc {_ROOM + 1} 1") == (_OUT_OF_MEMORY, 0, 0)
    assert tenant.ask(f"grab alloc {_ROOM} 1") == (0, _ROOM, 0)
    assert tenant.ask("grab alloc 1 1") == (_OUT_OF_MEMORY, 0, 0)


@pytest.mark.parametrize("kind", ["alloc", "managed", "pitch"])
@pytest.mark.parametrize("size", [1024, 700 * 1024, MIB + 1024, 3 * MIB + 1024])
def test_a_request_is_charged_what_the_driver_takes_for_it(
    node: Node, container: Container, tenant: Tenant, kind: str, size: int
) -> None:
    """An H200 used 4 MiB for each request of 3,145,729 bytes."""
    result, granted, _ = tenant.ask(f"grab {kind} {size} {min(3000 * size, 2 * _LIMIT)}")
    assert result == (0 if size < _BLOCK / 2 else _OUT_OF_MEMORY)
    assert node.used_bytes() == container.reserved_bytes() <= _LIMIT
    assert granted <= container.reserved_bytes() - CONTEXT_BYTES
    tenant.ask("keep 64")
    assert node.used_bytes() == container.reserved_bytes()
    assert tenant.ask("free")[0] == 0
    assert container.by_kind() == {"context": CONTEXT_BYTES}


def test_small_requests_share_blocks_and_keep_them_until_the_last_is_freed(container: Container, tenant: Tenant) -> None:
    assert tenant.ask(f"grab alloc 65536 {64 * _BLOCK}") == (0, 64 * _BLOCK, 0)
    assert container.by_kind()["alloc"] == 64 * _BLOCK
    assert tenant.ask("keep 32") == (0, 64, 0)
    assert container.by_kind()["alloc"] == 64 * _BLOCK
    assert tenant.ask(f"grab alloc {_ROOM - 64 * _BLOCK + 1} 1")[0] == _OUT_OF_MEMORY


def test_threads_that_share_blocks_leave_the_count_right(node: Node, container: Container, tenant: Tenant) -> None:
    assert tenant.ask("threads 16 100000") == (0, 0, 0)
    assert container.by_kind()["alloc"] >= _BLOCK
    assert node.used_bytes() == container.reserved_bytes() == sum(container.by_kind().values())


@pytest.mark.parametrize(
    ("shape", "block_mib"),
    [  # width, height, depth, format, channels, flags, levels; what an H200 used for each
        ("16384 1000 0 32 1 0 1", 64),
        ("1001 1000 0 32 1 0 1", 4),
        ("1024 100 50 16 4 0 1", 52),
        ("8192 1000 0 32 1 0 5", 44),
        ("65536 0 0 32 4 0 1", 8),
        ("400 400 0 32 1 0 1", 1),
        ("512 512 0 32 1 0 1", 1),
        ("640 640 0 32 1 0 1", 2),
    ],
)
def test_arrays_are_charged_what_an_h200_used_for_them(
    node: Node, container: Container, tenant: Tenant, shape: str, block_mib: int
) -> None:
    assert tenant.ask(f"shapes {shape} 5000") == (_OUT_OF_MEMORY, _ROOM // (block_mib * MIB), 0)
    assert node.used_bytes() == container.reserved_bytes()
    assert tenant.ask("free")[0] == 0
    assert container.by_kind() == {"context": CONTEXT_BYTES}


@pytest.mark.parametrize(
    "shape",
    [
        "64 64 0 32 1 0 1",
        "100 0 0 32 4 0 1",
        "3000 65 0 32 2 0 1",
        "1024 100 50 16 4 1 1",  # layers
        "1024 100 50 16 4 1 7",
        "512 512 6 16 4 4 9",  # the faces of a cube
        "300 300 300 1 1 0 9",
        "1024 1024 64 32 1 128 1",  # deferred: without memory
    ],
)
def test_arrays_of_other_shapes_agree_with_the_driver(node: Node, container: Container, tenant: Tenant, shape: str) -> None:
    assert tenant.ask(f"shapes {shape} 10")[:2] == (0, 10)
    assert node.used_bytes() == container.reserved_bytes()


def test_a_second_context_is_counted_with_its_memory_until_its_end(node: Node, container: Container, tenant: Tenant) -> None:
    tenant.ask("grab alloc 1000 1")
    own = 2 * CONTEXT_BYTES + 100 * MIB + 2 * _BLOCK
    assert tenant.ask(f"second {100 * MIB}") == (0, own, 0)
    assert node.used_bytes() == container.reserved_bytes() == CONTEXT_BYTES + _BLOCK
    assert tenant.ask(f"grab alloc {_ROOM - CONTEXT_BYTES} 1")[0] == 0
    assert tenant.ask(f"second {MIB}")[0] == _OUT_OF_MEMORY


def test_what_outlives_its_pool_stays_charged(tenant: Tenant) -> None:
    """A program may destroy a pool before it frees what it took from it; the driver keeps that memory."""
    before = tenant.ask("info")
    result, used, freed = tenant.ask(f"orphan {100 * MIB}")
    assert result == 0
    assert (used - freed, before[2] - before[1]) == (100 * MIB, freed)


@pytest.mark.parametrize("kind", ["async", "pool"])
def test_pools_are_charged_what_an_h200_reserved_for_them(node: Node, kind: str) -> None:
    container = node.container(limit_bytes=8192 * MIB)
    tenant = node.started(container, clock=False)
    assert tenant.ask(f"grab {kind} 1 1") == (0, 1, 0)
    assert container.by_kind()["pool"] == 32 * MIB
    assert tenant.ask(f"grab {kind} {40 * MIB} 1")[0] == 0
    assert container.by_kind()["pool"] == 64 * MIB
    assert tenant.ask(f"grab {kind} {64 * MIB} {8192 * MIB}") == (_OUT_OF_MEMORY, 7552 * MIB, 0)
    assert container.by_kind()["pool"] == 7616 * MIB
    assert node.used_bytes() == container.reserved_bytes()


def test_a_pool_that_grows_in_two_threads_is_charged_what_it_has(node: Node, container: Container) -> None:
    """Also if the thread that asked the driver first charges last."""
    assert node.started(container, clock=False).ask(f"pools {64 * MIB}")[0] == 0
    assert container.by_kind()["pool"] == 128 * MIB
    assert node.used_bytes() == container.reserved_bytes()


@pytest.mark.parametrize(("lookup", "own_stream"), [("proc", 0), ("proc", 1), ("stream", 0), ("stream", 1)])
@pytest.mark.parametrize(
    ("step", "number", "share"), [(100 * MIB, 3, 0), (6 * MIB, 200, 0), (6 * MIB, 200, 50), (65_536, 200, 0)]
)
def test_what_a_stream_has_yet_to_free_stays_charged(
    node: Node, step: int, number: int, share: int, lookup: str, own_stream: int
) -> None:
    container = node.container(share, limit_bytes=_LIMIT)
    tenant = node.started(container, lookup)
    assert tenant.ask(f"late {step} {number} {own_stream}") == (0, _OUT_OF_MEMORY, CONTEXT_BYTES)
    assert container.by_kind() == {"context": CONTEXT_BYTES}


@pytest.mark.parametrize("number", [1, 9])
def test_what_a_destroyed_stream_has_yet_to_free_stays_charged(node: Node, container: Container, number: int) -> None:
    """Also if the stream has as many markers as it may have."""
    assert node.started(container).ask(f"ends {6 * MIB} {number}") == (0, _OUT_OF_MEMORY, CONTEXT_BYTES)


@pytest.mark.parametrize("command", ["idles", "cut"], ids=["no request follows", "the thread is cancelled while it frees"])
def test_what_was_freed_is_credited(node: Node, command: str) -> None:
    container = node.container(50, limit_bytes=_LIMIT)
    assert node.started(container, clock=False).ask(f"{command} {100 * MIB}")[0] == 0
    while "alloc" in container.by_kind():
        time.sleep(0.001)


@pytest.mark.parametrize("when", ["instantiation", "upload", "launch"])
def test_memory_of_a_graph_is_charged_when_the_driver_takes_it(
    node: Node, container: Container, tenant: Tenant, when: str
) -> None:
    assert tenant.ask(f"graph {256 * MIB} {when}") == (0, CONTEXT_BYTES, 0)
    assert container.by_kind() == {"graph": 256 * MIB, "context": CONTEXT_BYTES}
    assert node.used_bytes() == container.reserved_bytes()
    assert tenant.ask(f"grab alloc {_ROOM - 254 * MIB} 1")[0] == _OUT_OF_MEMORY
    assert tenant.ask("trim")[0] == 0
    assert container.by_kind() == {"context": CONTEXT_BYTES}


@TWO_GPUS
@pytest.mark.parametrize("when", ["instantiation", "upload", "launch", "capture", "node", "node2", "node3"])
def test_memory_of_a_graph_is_charged_on_the_gpu_of_the_allocation(node: Node, when: str) -> None:
    """Not on the thread's current one."""
    container = node.container(gpus=2, limit_bytes=_LIMIT)
    assert node.started(container, clock=False).ask(f"graph {256 * MIB} {when} 1")[:2] == (0, CONTEXT_BYTES)
    context = CONTEXT_BYTES if when == "capture" else 0
    assert [container.reserved_bytes(gpu) for gpu in range(2)] == [CONTEXT_BYTES, context + 256 * MIB]


def test_programs_see_the_share(node: Node, container: Container, tenant: Tenant) -> None:
    neighbour = node.started(clock=False)
    tenant.ask(f"grab alloc {100 * MIB} 1")
    container.limits.gpu[0].uncounted_bytes = 24 * MIB
    free = _ROOM - 124 * MIB
    assert tenant.ask("info") == (0, free, _LIMIT)
    assert tenant.ask("total") == (0, 0, _LIMIT)
    assert tenant.numbers("nvml") == (0, free, _LIMIT, 1)  # one process: its own
    neighbour.ask(f"grab alloc {MIB} 1")
    assert tenant.ask("info") == (0, free, _LIMIT)
    assert tenant.ask(f"grab alloc {free + 1} 1")[0] == _OUT_OF_MEMORY


@TWO_GPUS
@pytest.mark.parametrize(
    "visible", ["0,1", "1,0", "1", "GPU-00000000-0000-0000-0000-000000000002", "GPU-00000000-0000-0000-0000-000000000002,0"]
)
def test_the_limit_is_that_of_the_gpu_in_any_order(node: Node, visible: str) -> None:
    """CUDA's numbers of GPUs depend on the environment; NVML's do not."""
    container = node.container(gpus=2, limit_bytes=_LIMIT)
    container.limits.gpu[1].memory_bytes = 2 * _LIMIT
    tenant = node.start(container, CUDA_VISIBLE_DEVICES=visible)
    limit = _LIMIT if visible.startswith("0") else 2 * _LIMIT
    assert tenant.ask("init 0")[0] == 0
    assert tenant.ask("total") == (0, 0, limit)
    assert tenant.ask(f"grab alloc {limit - CONTEXT_BYTES} 1")[0] == 0
    assert tenant.ask("grab alloc 1 1")[0] == _OUT_OF_MEMORY
    assert tenant.numbers("nvml")[2] == _LIMIT


@pytest.mark.parametrize("limit_mib", [1, 519, 4096, 143_156, 143_771, 200_000])
def test_a_program_sees_no_more_than_there_is(node: Node, limit_mib: int) -> None:
    """For any limit; CUDA's figures and NVML's agree, except for what the driver keeps for itself."""
    container = node.container(limit_bytes=limit_mib * MIB)
    tenant = node.start(container)
    if tenant.ask("init 0")[0] == _OUT_OF_MEMORY:
        assert limit_mib * MIB < CONTEXT_BYTES
        return
    tenant.ask(f"grab alloc {64 * MIB} {128 * MIB}")
    used = container.reserved_bytes()
    for command, most in (("info", GPU_BYTES - 615 * MIB), ("nvml", GPU_BYTES)):
        total = min(limit_mib * MIB, most)
        assert tenant.numbers(command)[1:3] == (total - used, total)


def test_a_program_whose_first_start_failed_is_limited(node: Node, container: Container) -> None:
    gpu, hidden = node.folder / "gpu", node.folder / "hidden"
    gpu.rename(hidden)
    tenant = node.start(container)
    assert tenant.ask("init 0")[0] != 0
    assert tenant.ask(f"grab vmm {2 * MIB} 1")[0] not in (0, _OUT_OF_MEMORY)
    hidden.rename(gpu)
    assert tenant.ask("init 0")[0] == 0
    assert tenant.ask("total") == (0, 0, _LIMIT)
    assert tenant.ask(f"grab alloc {_ROOM + 1} 1")[0] == _OUT_OF_MEMORY


def _edges(node: Node, container: Container | None, *words: str) -> Sequence[str]:
    """What a program says that does what programs do seldom or by mistake (edges.c)."""
    environment = {**os.environ, **node.environment(limited=container is not None)}
    folder = container.folder if container else node.folder
    command = [str(node.programs / "edges"), *words]
    done = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_calls_that_are_rare_or_wrong_have_the_drivers_answers_and_the_count_is_right(node: Node) -> None:
    bare = _edges(node, None)
    assert len(bare) > 150
    # What a module takes is not counted here.
    counted = [line.replace(f", +{4 * MIB}", ", +0") if line.startswith("attributes") else line for line in bare]
    container = node.container(50, limit_bytes=2 * _LIMIT)
    assert _edges(node, container) == counted
    assert container.use.slot[0].gpu[0].unknown == 1


def test_sizes_beyond_64_bits_are_out_of_memory(node: Node, container: Container) -> None:
    assert _edges(node, container, "sizes") == ["more than there is: 2 2 2 2 2 2, +0"]


@pytest.mark.parametrize("node", [{"gpu_bytes": 3072 * MIB}], indirect=True, ids=["3 GiB"])
def test_a_refusal_of_the_driver_leaves_nothing_reserved(node: Node, container: Container, tenant: Tenant) -> None:
    for kind in _KINDS:
        result, granted, _ = tenant.ask(f"grab {kind} {50 * MIB} {2 * _LIMIT}")
        assert (result, granted > 0 or kind != "alloc") == (_OUT_OF_MEMORY, True)
        assert node.used_bytes() == container.reserved_bytes()


def test_without_a_limit_memory_is_counted_only(node: Node) -> None:
    container = node.container()
    tenant = node.started(container, clock=False)
    assert tenant.ask(f"grab alloc {1024 * MIB} {8192 * MIB}") == (0, 8192 * MIB, 0)
    assert container.by_kind() == {"alloc": 8192 * MIB, "context": CONTEXT_BYTES}
    assert tenant.ask("total")[2] > _LIMIT


def test_containers_count_for_themselves(node: Node) -> None:
    for _ in range(2):
        assert node.started(node.container(limit_bytes=_LIMIT), clock=False).ask(f"grab alloc {_ROOM} 1")[0] == 0


def test_forty_processes_at_once_get_the_limit_and_no_byte_more(node: Node) -> None:
    limit = 40 * CONTEXT_BYTES + 1000 * MIB
    container = node.container(limit_bytes=limit)
    tenants = [node.started(container, clock=False) for _ in range(40)]
    for number, tenant in enumerate(tenants):
        tenant.send(f"grab {_KINDS[number % 5]} {2 * MIB} {limit}")
    answers = [tenant.answer() for tenant in tenants]
    assert {result for result, _, _ in answers} == {_OUT_OF_MEMORY}
    assert sum(granted for _, granted, _ in answers) == 1000 * MIB
    assert node.used_bytes() == container.reserved_bytes() == limit


def test_a_context_that_does_not_fit_is_out_of_memory(node: Node) -> None:
    container = node.container(limit_bytes=CONTEXT_BYTES + MIB)
    node.started(container, clock=False)
    assert node.start(container).ask("init 0")[0] == _OUT_OF_MEMORY
    assert node.used_bytes() == container.reserved_bytes() == CONTEXT_BYTES


@pytest.mark.parametrize("seed", range(6))
def test_what_killed_processes_held_can_be_had_again(node: Node, container: Container, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(4):
        victims = [node.start(container) for _ in range(3)]
        for victim in victims:
            victim.send("init 0")
            victim.send(f"random {chance.randrange(1 << 30)} 1000000 {_LIMIT}")
        time.sleep(chance.random() / 20)  # any point of their run: the law holds at each
        for victim in victims:
            victim.kill()
    tenant = node.started(container, clock=False)
    assert tenant.ask(f"grab alloc {_ROOM} 1")[0] == 0
    assert node.used_bytes() == container.reserved_bytes() == _LIMIT


def test_what_a_process_held_before_an_exec_can_be_had_again(node: Node, container: Container, tenant: Tenant) -> None:
    """By itself, if it uses CUDA again, and by others."""
    assert tenant.ask(f"grab alloc {_ROOM} 1")[0] == 0
    tenant.send("exec")
    assert tenant.ask("init 0")[0] == 0
    assert tenant.ask("info") == (0, _ROOM, _LIMIT)
    assert container.reserved_bytes() == CONTEXT_BYTES
    assert tenant.ask(f"grab alloc {_ROOM} 1")[0] == 0
    tenant.send("sleep")
    tenant.await_program("sleep")
    other = node.started(container, clock=False)
    assert other.ask(f"grab alloc {_ROOM} 1")[0] == 0
    assert node.used_bytes() == container.reserved_bytes()


def test_a_slot_that_another_process_empties_is_left_to_it(node: Node, container: Container) -> None:
    """It has the pid of that process, but the stack of a dead one."""
    first = node.started(container, clock=False)
    assert first.ask(f"grab alloc {2 * MIB} 1")[0] == 0
    slot = container.use.slot[0]  # as if its process had taken it from a dead one, and not emptied it yet
    slot.state, slot.gpu[0].stack = 0, 1
    assert node.started(container, clock=False).ask(f"grab alloc {_ROOM} 1")[0] == _OUT_OF_MEMORY
    assert container.by_kind() == {"alloc": 2 * MIB, "context": 2 * CONTEXT_BYTES}


#: In an inner pid namespace, a process takes memory and stays until another one has asked for the rest.
_NESTED = """
mkfifo stays
{ echo "init 0"; echo "grab alloc $3 1"; cat stays; } | "$2" proc > first &
until [ "$(wc -l < first)" = 2 ]; do sleep 0.01; done
{ echo "init 0"; echo "grab alloc 1 1"; } | "$2" proc
echo > stays
wait
"""


@pytest.mark.parametrize("seconds", ["infinity", "0"], ids=["running", "ended"])
def test_a_process_keeps_its_memory_if_proc_shows_another_pid_namespace(node: Node, container: Container, seconds: str) -> None:
    """There its number is another process, here `sleep`."""
    (container.folder / "nested").write_text(_NESTED)
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    outer = 'for i in 1 2 3 4 5 6 7 8 9; do sleep $1 & done; exec unshare --pid --fork --kill-child sh nested "$@"'
    words = [seconds, str(node.programs / "tenant"), str(_ROOM - CONTEXT_BYTES)]
    done = subprocess.run(
        ["unshare", *rights, "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", outer, "-", *words],
        env={**os.environ, **node.environment(limited=True)},
        cwd=container.folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"0 0 0\n{_OUT_OF_MEMORY} 0 0\n" or "unshare failed" in done.stderr  # some hosts give users none


def test_what_a_zombie_held_can_be_had_again(node: Node, container: Container, tenant: Tenant) -> None:
    """Many containers have a first process that does not wait for its children."""
    assert tenant.ask(f"grab alloc {_ROOM} 1")[0] == 0
    os.kill(tenant.pid, signal.SIGKILL)
    os.waitid(os.P_PID, tenant.pid, os.WEXITED | os.WNOWAIT)
    assert node.started(container, clock=False).ask(f"grab alloc {_ROOM} 1")[0] == 0
    assert container.reserved_bytes() == _LIMIT


def test_a_process_whose_first_thread_has_ended_keeps_its_memory(node: Node, container: Container, tenant: Tenant) -> None:
    """It looks like a zombie."""
    assert tenant.ask(f"grab alloc {_ROOM} 1")[0] == 0
    tenant.send("leave")
    while ") Z " not in Path(f"/proc/{tenant.pid}/stat").read_text():
        time.sleep(0.001)
    assert node.start(container).ask("init 0")[0] == _OUT_OF_MEMORY


@pytest.mark.parametrize("seed", range(4))
def test_operations_of_all_kinds_agree_with_a_model(node: Node, container: Container, tenant: Tenant, seed: int) -> None:
    assert tenant.ask(f"random {seed} 25000 {_LIMIT}") == (0, 25_000, 0)
    assert node.used_bytes() == container.reserved_bytes() == sum(container.by_kind().values())


def test_a_forked_child_counts_anew_and_is_credited_when_it_ends(node: Node, container: Container) -> None:
    tenant = node.start(container)
    tenant.ask("info")  # the library has looked for the pages; CUDA is not initialized
    assert tenant.ask(f"fork alloc {_ROOM} {_ROOM}")[0] == 0
    assert tenant.ask("init 0")[0] == 0
    assert tenant.ask(f"grab alloc {_ROOM} 1")[0] == 0


def test_the_reset_of_a_context_frees_its_memory(node: Node, container: Container, tenant: Tenant) -> None:
    tenant.ask(f"grab managed {100 * MIB} {1000 * MIB}")
    assert tenant.ask("reset")[0] == 0
    assert container.reserved_bytes() == node.used_bytes() == 0


def test_a_stream_capture_goes_on_as_without_the_library(node: Node, tenant: Tenant) -> None:
    for each in (tenant, node.started(clock=False)):
        assert each.numbers("capture") == (0, 0, 900, 901)
