"""A server that is blocked, so that its new clients hang, is found with a new client, reported, and replaced when it can be."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.common.errors import Refusal
from gpumgr.enforcement import cuda_client
from gpumgr.enforcement.mps import processes
from gpumgr.enforcement.mps.daemon import Daemon
from gpumgr.enforcement.mps.processes import CLIENT
from tests.component.enforcement.mps.place import CHECK_SECONDS, Place, Unhurried, own, running, tenant


def reconfigure(backend: Unhurried, *client: str, client_seconds: float = 0.5) -> None:
    """The program with which the agent tries its daemons."""
    assert backend._supervisor is not None
    backend._supervisor.reconfigure(replace(backend._supervisor.config, client=client, client_seconds=client_seconds))


async def for_one_user(place: Place) -> tuple[Unhurried, Daemon, Path]:
    """Without the multi-user mode. The file exists after a trial."""
    place.behave(protocols=[2], multiuser=False)
    backend = await place.started(protocol="2")
    marker = place.root / "tried"
    reconfigure(backend, "/bin/sh", "-c", f"touch {marker}; exec sleep 3600")
    (daemon,) = backend.daemons()
    return backend, daemon, marker


async def blocked(place: Place, *others: str, hangs: bool = True) -> Unhurried:
    """A client of a1 has left, its server accepts no others (if it `hangs`), and the agent has looked. `others` share the GPU."""
    backend = await place.started(protocol="2")
    reconfigure(backend, str(place.program), "attach", client_seconds=0.5 if hangs else 60.0)
    for name in others:
        await backend.start(tenant(name))
    await place.attach(backend, tenant())
    await place.pass_time(backend)
    place.behave(clients_hang=hangs)
    await place.detach()
    with capture_logs() as logs:
        # The daemon notices the end of the client when it likes. One look finds that it has left, the next one tries a new one.
        for look in range(100):
            await place.pass_time(backend)
            if (look == 1 and not hangs) or warnings(logs):
                break
        await place.pass_time(backend)  # does nothing
    assert warnings(logs) == ["mps_daemon_hangs"] * hangs
    return backend


def warnings(logs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line["event"] for line in logs if line["log_level"] == "warning"]


async def test_it_is_reported_to_its_containers_and_replaced_by_a_new_one_if_no_other_depends_on_it(place: Place) -> None:
    backend = await blocked(place)
    (finding,) = await backend.observe([running(tenant(), os.getpid())])
    assert (finding.allocation, finding.code) == ("a1", "broken")
    assert "a trial got no context within 0.5 s" in finding.message
    before = place.daemon_pid()
    with pytest.raises(Refusal, match=r"new CUDA programs hang .* replaced when the other containers on it have ended \(1\)"):
        await backend.start(tenant("b2"))
    assert place.daemon_pid() == before
    await backend.tend(lambda: {"b2"})  # a1 has ended; its record remains
    place.behave()
    await backend.start(tenant("b2"))
    assert place.daemon_pid() not in (None, before)
    _, got = await place.attach(backend, tenant("b2"))
    assert got["percentage"] == 30


async def test_it_ends_with_its_last_container_and_not_after_the_idle_time(place: Place) -> None:
    backend = await blocked(place, "b2")
    await backend.tend(lambda: {"b2"})
    assert place.daemon_pid() is not None
    await backend.tend(set)
    assert place.daemon_pid() is None


async def test_a_server_that_recovers_is_found_to_work(place: Place) -> None:
    backend = await blocked(place)
    place.behave()
    await place.pass_time(backend, CHECK_SECONDS)
    (daemon,) = backend.daemons()
    assert daemon.trial.hang is not None, "not so soon"
    await place.pass_time(backend, 60.0)
    assert daemon.trial.hang is None


@pytest.mark.parametrize("status", [1, 2, 3])
async def test_a_trial_that_does_not_get_as_far_changes_nothing(place: Place, status: int) -> None:
    """systemd-run failed (1), CUDA refused (2), or there is no libcuda (3)."""
    backend = await blocked(place)
    reconfigure(backend, "/bin/sh", "-c", f"exit {status}")
    await place.pass_time(backend, 60.0)
    (daemon,) = backend.daemons()
    assert daemon.trial.tried_at == place.seconds
    assert daemon.trial.hang is not None


async def test_a_server_that_works_is_tried_only_after_a_client_has_left_and_after_a_pause(place: Place) -> None:
    backend = await blocked(place, hangs=False)
    (daemon,) = backend.daemons()
    first = daemon.trial.tried_at
    assert (daemon.trial.hang, first) == (None, place.seconds - CHECK_SECONDS)
    daemon.trial.client_left = True
    await place.pass_time(backend, 1.0)
    assert (daemon.trial.client_left, daemon.trial.tried_at) == (True, first)
    await place.pass_time(backend, 10.0)
    assert (daemon.trial.client_left, daemon.trial.tried_at) == (False, place.seconds)


async def test_a_server_of_another_user_is_not_tried(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of the agent would wait until that user's clients have ended."""
    backend, daemon, marker = await for_one_user(place)
    await place.attach(backend, tenant(), FAKE_MPS_AS_USER=str(os.geteuid() + 1))
    monkeypatch.setattr(processes, "user_of", lambda _: os.geteuid() + 1)
    daemon.trial.client_left, daemon.trial.hang = True, "the server before it hung"
    await place.pass_time(backend)
    assert daemon.servers
    await place.pass_time(backend)
    assert (backend.daemons()[0].trial.hang, daemon.trial.client_left, marker.exists()) == (None, False, False)


async def test_a_trial_during_which_another_users_server_begins_is_no_hang(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, daemon, marker = await for_one_user(place)
    await place.attach(backend, tenant())
    await place.pass_time(backend)
    monkeypatch.setattr(processes, "user_of", lambda _: os.geteuid() + marker.exists())
    daemon.trial.client_left = True
    await place.pass_time(backend)
    assert (daemon.trial.hang, marker.exists()) == (None, True)


async def test_the_client_that_tries_a_daemon_is_not_unattributed(place: Place) -> None:
    backend = await place.started(protocol="2")
    code = "import sys; sys.stdin.read()"
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(place.folder.pipe)}
    words = [sys.executable, "-S", "-c", f"print(flush=True); {code}", str(CLIENT)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as program:  # noqa: ASYNC220
        assert program.stdout is not None
        program.stdout.readline()
        assert own(backend, program.pid) == {program.pid}
        program.communicate()


_LIBRARY = """
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int ordinal) { *device = 7 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context; return device == 7 ? %d : 1; }
"""


@pytest.mark.parametrize(("result", "status"), [(0, 0), (2, 2)])
def test_the_client_makes_a_context(tmp_path: Path, result: int, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cuda.c").write_text(_LIBRARY % result)
    library = tmp_path / "libcuda.so.1"
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=True)
    assert cuda_client.main(str(library), wait=False) == status
    assert capsys.readouterr().out == ("cuDevicePrimaryCtxRetain: CUDA error 2\n" if result else "")


def test_without_the_library_the_client_says_so(tmp_path: Path) -> None:
    assert cuda_client.main(str(tmp_path / "libcuda.so.1"), wait=False) == 3
