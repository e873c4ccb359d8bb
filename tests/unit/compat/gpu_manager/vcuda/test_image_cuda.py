"""The CUDA version that an environment declares, beside any other content that a tenant gives it; and what is reported of it."""

import asyncio
import threading

import pytest
from msgspec.structs import replace

from gpumgr.agent.ports import RunningContainer
from gpumgr.compat.gpu_manager.vcuda.backend import ImageCheck, newer_cuda
from tests.unit.compat.gpu_manager.vcuda.tenants import ALLOCATION, CONTAINER, TENANT

#: As in an image of NVIDIA.
REQUIRE = (
    b"NVIDIA_REQUIRE_CUDA=cuda>=%s brand=unknown,driver>=470,driver<471 brand=grid,driver>=470,driver<471 "
    b"brand=tesla,driver>=470,driver<471"
)
NEW = b"PATH=/usr/bin\0NVIDIA_VISIBLE_DEVICES=all\0CUDA_VERSION=12.4.1\0"
RUNNING = RunningContainer(tenant=TENANT, container=CONTAINER, pids=(4711, 4712))


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (NEW, "12.4"),
        (b"CUDA_VERSION=11.3.0", "11.3"),
        (b"CUDA_VERSION=11.2.2\0", None),
        (b"CUDA_VERSION=11\0", None),
        (b"CUDA_VERSION=12\0", "12.0"),
        (b"CUDA_VERSION=9.0.176\0", None),
        (b"A=1\0" + REQUIRE % b"12.4" + b"\0B=2\0", "12.4"),
        (b"NVIDIA_REQUIRE_CUDA=brand=tesla,driver>=450 cuda>11.7", "11.7"),
        (REQUIRE % b"11.2" + b"\0", None),
        (b"CUDA_VERSION=11.0\0" + REQUIRE % b"12.1" + b"\0", "12.1"),
        (REQUIRE % b"11.0" + b"\0CUDA_VERSION=12.1.0\0", "12.1"),
        (b"", None),
        (b"PATH=/bin\0", None),
        (b"MY_CUDA_VERSION=12.4\0NOTE=CUDA_VERSION=12.4\0", None),
        (b"NVIDIA_REQUIRE_CUDA=\0cuda>=12.4\0", None),
        (b"NVIDIA_REQUIRE_CUDA=notcuda>=12.4\0", None),
        (b"CUDA_VERSION=\0CUDA_VERSION=latest\0CUDA_VERSION=-12.4\0", None),
        (b"CUDA_VERSION=99999999999999999999.1\0", None),
        (b"CUDA_VERSION=" + b"9" * 1_000_000, None),
        (b"CUDA_VERSION=\xff\xfe12.4\0", None),
        ("CUDA_VERSION=\u0661\u0662.4\0".encode(), None),
    ],
)
def test_what_an_environment_declares(environment: bytes, found: str | None) -> None:
    assert newer_cuda(environment) == found


async def test_a_container_with_a_newer_cuda_is_reported_and_read_once() -> None:
    read: list[int] = []

    def environment_of(pid: int) -> bytes:
        read.append(pid)
        return NEW

    check = ImageCheck(environment_of)
    for _ in range(3):
        (finding,) = await check.findings([RUNNING])
        assert (finding.allocation, finding.code) == (ALLOCATION, "broken")
    assert read == [4711]
    assert finding.message.startswith(
        "the image of demo/resnet (main) has CUDA 12.4, and the backend vcuda supports 11.2 and older: "
    )
    assert "Use an image with CUDA 11.2 or older, or another backend" in finding.message
    restarted = replace(RUNNING, container=replace(CONTAINER, id="c1" * 32, pid=4712, attempt=1))
    assert len(await check.findings([restarted])) == 1
    assert read == [4711, 4712]
    assert await check.findings([]) == []


async def test_a_container_is_read_again_when_it_uses_its_gpu() -> None:
    """At its start its first process may still be the runtime's own."""
    environments = iter([b"_LIBCONTAINER_INITPIPE=3\0", NEW])
    check = ImageCheck(lambda _pid: next(environments))
    assert await check.findings([RUNNING]) == []
    using = replace(RUNNING, gpu_pids=frozenset({4712}))
    assert len(await check.findings([using])) == len(await check.findings([using])) == 1


async def test_a_first_process_that_is_not_known_or_gone_is_not_read() -> None:
    """Its pid may be that of another process by now."""
    check = ImageCheck(lambda _pid: NEW)
    assert await check.findings([replace(RUNNING, pids=(4712,))]) == []
    assert await check.findings([replace(RUNNING, container=replace(CONTAINER, pid=None))]) == []
    assert len(await check.findings([RUNNING])) == 1


async def test_a_process_whose_environment_hangs_delays_no_other_container_for_long() -> None:
    """A read of /proc/PID/environ waits for the process's memory, which can be a file that its tenant serves."""
    ended = threading.Event()
    hanging = replace(RUNNING, container=replace(CONTAINER, id="ha" * 32, pid=1), pids=(1,))

    def environment_of(pid: int) -> bytes:
        if pid == 1:
            ended.wait()
        return NEW

    check = ImageCheck(environment_of)
    try:
        assert await check.findings([hanging, RUNNING]) == []
    finally:
        ended.set()
    while len(await check.findings([hanging, RUNNING])) < 2:  # noqa: ASYNC110 (until the thread has ended its call)
        await asyncio.sleep(0)
