"""Findings of checks of running containers."""

from collections.abc import Collection

import pytest
from msgspec.structs import replace

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.enforcement.mps.findings import View, judge, processes_outside, unserved
from gpumgr.enforcement.mps.limits import Tampering
from gpumgr.ledger.ledger import AllocationId
from gpumgr.ledger.node_use import Container
from tests.shares import gpu_share

TENANT = gpu_share(pod=("demo", "resnet"))
CONTAINER = Container(id="c", pod=("demo", "resnet"), pod_uid="u", name="main")
RUNNING = RunningContainer(tenant=TENANT, container=CONTAINER, pids=(10, 11), gpu_pids=frozenset({11}))


def findings_of(view: View, *, users: Collection[int] = (1000,), lasting: Collection[int] = ()) -> list[Finding]:
    return list(judge(RUNNING, view, users, lasting))


def changed(allocation: AllocationId) -> Tampering:
    return Tampering("changed the limits", frozenset({allocation}), root_only=True)


def test_a_container_of_a_user_that_is_not_served_is_broken_with_a_remedy() -> None:
    (finding,) = findings_of(View(protocol=2, multiuser=False, server_user=0, clients={99: None}))
    assert (finding.allocation, finding.code) == ("a1", "broken")
    assert "demo/resnet (main) runs as user 1000" in finding.message
    assert "serves user 0" in finding.message
    assert "runAsUser" in finding.message


def test_users_do_not_matter_in_multi_user_mode_without_a_server_or_to_a_container_that_is_served() -> None:
    assert findings_of(View(protocol=3, multiuser=True, server_user=0)) == []
    assert findings_of(View(protocol=2, multiuser=False)) == []
    assert findings_of(View(protocol=2, multiuser=False, server_user=0, clients={11: None})) == []
    assert findings_of(View(protocol=2, multiuser=False, server_user=0), users={0, 1000}) == []
    assert findings_of(View(protocol=2, multiuser=False, server_user=0), users=set()) == []


def test_users_are_checked_only_if_the_container_may_wait() -> None:
    assert unserved(RUNNING, View(protocol=2, multiuser=False, server_user=0))
    assert not unserved(RUNNING, View(protocol=2, multiuser=True, server_user=0))
    assert not unserved(RUNNING, View(protocol=2, multiuser=False))
    assert not unserved(RUNNING, View(protocol=2, multiuser=False, server_user=0, clients={10: None}))


@pytest.mark.parametrize(
    ("suspects", "who"),
    [
        ((), "a process that has ended"),
        (("evil",), "demo/evil (main), the only container with a process that could do it when gpumgr looked,"),
        (("a", "b"), "one of demo/a (main), demo/b (main)"),
    ],
)
def test_tampering_is_reported_with_the_containers_that_may_have_done_it(suspects: tuple[str, ...], who: str) -> None:
    tenants = [gpu_share(pod=("demo", name)) for name in suspects]
    (finding,) = findings_of(View(protocol=3, multiuser=True, tampering=changed("a1"), suspects=tenants, clients={11: "a1"}))
    assert finding.code == "tampered"
    assert finding.message.startswith(f"{who} changed the limits of MPS on GPU 0fe1c342 through the daemon's control socket;")


def test_tampering_is_reported_to_the_containers_that_it_concerns() -> None:
    view = View(protocol=3, multiuser=True, tampering=changed("b2"), clients={11: "a1"})
    assert findings_of(view) == []
    (finding,) = findings_of(replace(view, suspects=[TENANT]))
    assert finding.code == "tampered"


def test_an_error_of_the_daemon_is_the_only_finding() -> None:
    (finding,) = findings_of(View(protocol=2, multiuser=False, trouble="it hangs", server_user=0), lasting=(11,))
    assert finding.code == "broken"
    assert finding.message.endswith("starts now fail: it hangs")


def test_a_client_in_the_namespace_of_another_container_is_a_finding() -> None:
    assert processes_outside(RUNNING, View(protocol=2, multiuser=True)) == {11}
    assert processes_outside(RUNNING, View(protocol=3, multiuser=True, clients={11: "b2"})) == {11}
    assert processes_outside(RUNNING, View(protocol=3, multiuser=True, clients={11: "a1"})) == frozenset()
    assert processes_outside(RUNNING, View(protocol=2, multiuser=True, clients={11: None})) == frozenset()
