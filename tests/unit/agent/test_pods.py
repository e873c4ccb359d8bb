import pytest

from gpumgr.agent.pods import find_pod, pod_of, pods_of
from gpumgr.ledger.ledger import Allocation, ClaimRequest
from gpumgr.placement.pods import ClaimUse, PodKey, PodView
from tests.component.stage.stage import MemoryPods

WEB = ("team", "web-0")
PROXY = ("kube-system", "proxy-node-1")


@pytest.fixture
def pods() -> MemoryPods:
    web = PodView(namespace=WEB[0], name=WEB[1], uid="second")
    proxy = PodView(namespace=PROXY[0], name=PROXY[1], uid="mirror", runtime_uid="hash")
    return MemoryPods({view.key: view for view in (web, proxy)})


@pytest.mark.parametrize(
    ("pod", "uid", "found"),
    [
        pytest.param(WEB, "second", WEB, id="both known"),
        pytest.param(WEB, None, WEB, id="name alone"),
        pytest.param(None, "second", WEB, id="UID alone"),
        pytest.param(WEB, "first", None, id="the name recurs"),
        pytest.param(("team", "guess"), "second", WEB, id="the UID decides where no pod has the name"),
        pytest.param(PROXY, "second", WEB, id="the UID decides where another pod has the name"),
        pytest.param(PROXY, "mirror", PROXY, id="static pod, UID of the mirror pod"),
        pytest.param(PROXY, "hash", PROXY, id="static pod, UID of the kubelet"),
        pytest.param(None, "hash", PROXY, id="static pod, UID of the kubelet alone"),
        pytest.param(("team", "gone"), "gone", None, id="no longer there"),
        pytest.param(None, None, None, id="nothing known"),
    ],
)
def test_finds_a_pod_by_name_and_uid(pods: MemoryPods, pod: PodKey | None, uid: str | None, found: PodKey | None) -> None:
    view = find_pod(pods, pod, uid)
    assert (view.key if view else None) == found


@pytest.mark.parametrize(
    ("pod", "uid", "expected"),
    [
        pytest.param(PROXY, "hash", (PROXY, "mirror"), id="a static pod is named by its mirror pod's UID"),
        pytest.param(WEB, "first", (WEB, "first"), id="the ledger's, if the API server has only a later pod of the name"),
        pytest.param(("team", "gone"), None, None, id="unknown without a UID"),
    ],
)
def test_names_the_pod_of_an_allocation(
    pods: MemoryPods, pod: PodKey | None, uid: str | None, expected: tuple[PodKey, str] | None
) -> None:
    assert pod_of(Allocation(id="a", pod=pod, uid=uid), pods) == expected


def using(name: str, claim: str, request: str | None = None, *, namespace: str = "team", phase: str = "Running") -> PodView:
    use = ClaimUse(container="main", claim=claim, request=request)
    return PodView(namespace=namespace, name=name, uid=f"uid-{name}", phase=phase, claims=(use,))


def test_every_living_pod_that_uses_a_claim_is_one_of_its_allocation_and_its_own_is_the_first() -> None:
    views = [
        using("by-claim", "shared"),
        using("by-request", "shared", "gpu"),
        using("other-request", "shared", "other"),
        using("other-claim", "own"),
        using("elsewhere", "shared", namespace="other"),
        using("ended", "shared", phase="Succeeded"),
    ]
    pods = MemoryPods({view.key: view for view in views})
    claim = ClaimRequest(uid="c", namespace="team", name="shared", request="gpu")
    own, gone = (Allocation(id="a", pod=("team", name), uid=f"uid-{name}", claim=claim) for name in ("by-request", "ended"))
    assert pods_of(own, pods) == [(("team", name), f"uid-{name}") for name in ("by-request", "by-claim")]
    assert pod_of(gone, pods) == (("team", "by-claim"), "uid-by-claim")
    assert pods_of(gone, MemoryPods()) == [(("team", "ended"), "uid-ended")]
