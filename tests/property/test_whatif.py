"""Plans of moves on random small clusters, checked by placing pods one by one."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpumgr.cluster.simulation.defrag import Defrag
from gpumgr.cluster.simulation.live import LivePod, Spot
from tests.unit.cluster.simulation.live_states import cluster, contents, live_pod

COUNTS = {"a": 2, "b": 1, "c": 2}
CPU = 8000
SHARES = st.tuples(st.sampled_from([20, 40, 50, 60]), st.integers(0, 4000))


@st.composite
def pods_at_home(draw: st.DrawFn) -> list[LivePod]:
    """No GPU and no CPU is used beyond its capacity."""
    gpus = {(name, gpu): 100 for name, number in COUNTS.items() for gpu in range(number)}
    cpu = dict.fromkeys(COUNTS, CPU)
    found: list[LivePod] = []
    for cores, wanted in draw(st.lists(SHARES, max_size=7)):
        name, gpu = draw(st.sampled_from(sorted(gpus)))
        if gpus[name, gpu] >= cores and cpu[name] >= wanted:
            gpus[name, gpu] -= cores
            cpu[name] -= wanted
            fixed = draw(st.sampled_from(["", "", "has no controller"]))
            found.append(live_pod(f"p{len(found)}", cores, name, gpu, cpu=wanted, why_not_movable=fixed))
    return found


NEW = st.tuples(st.sampled_from([50, 70, 100]), st.integers(0, 6000)).map(lambda new: live_pod("new", new[0], cpu=new[1]))


def free(pods: Sequence[tuple[LivePod, Spot]]) -> tuple[dict[tuple[str, int], int], dict[str, int]]:
    """Counted from the UUIDs alone."""
    gpus = {(name, gpu): 100 for name, number in COUNTS.items() for gpu in range(number)}
    cpu = dict.fromkeys(COUNTS, CPU)
    for pod, spot in pods:
        (((uuid, amounts),),) = spot.shares or ()
        _, name, gpu = str(uuid).split("-")
        assert name == spot.node
        gpus[name, int(gpu)] -= amounts.cores
        cpu[name] -= pod.requests["cpu"]
    return gpus, cpu


@given(pods_at_home(), NEW)
def test_each_step_of_a_plan_is_possible_and_one_move_is_found_if_it_is_enough(pods: list[LivePod], new: LivePod) -> None:
    found = cluster(pods, **COUNTS)
    before = contents(found)
    plan = Defrag(found, most_moves=2).plan(new)
    assert contents(found) == before
    places = {pod.uid: (pod, pod.home) for pod in pods if pod.home is not None}
    for pod, spot in plan or ():
        assert not pod.why_not_movable
        assert places.get(pod.uid, (pod, None))[1] is pod.home, "each pod moves once"
        places[pod.uid] = (pod, spot)
        gpus, cpu = free(list(places.values()))
        assert min(gpus.values()) >= 0 <= min(cpu.values())
    assert plan is None or plan[-1][0] is new
    moves = None if plan is None else len(plan) - 1
    assert (moves == 0) == fits(pods, new)
    if moves != 0:
        assert (moves == 1) >= any(fits(moved, new) for moved in after_one_move(pods))


def fits(pods: Sequence[LivePod], new: LivePod) -> bool:
    gpus, cpu = free([(pod, pod.home) for pod in pods if pod.home is not None])
    cores = new.request.containers[0].cores
    return any(left >= cores and cpu[name] >= new.requests["cpu"] for (name, _), left in gpus.items())


def after_one_move(pods: Sequence[LivePod]) -> list[list[LivePod]]:
    """Every move to another node that is possible now."""
    found = []
    for pod in pods:
        rest = [each for each in pods if each is not pod]
        cores = pod.request.containers[0].cores
        for name, number in COUNTS.items():
            for gpu in range(number):
                moved = live_pod(pod.uid, cores, name, gpu, cpu=pod.requests["cpu"])
                gpus, cpu = free([(each, each.home) for each in [*rest, moved] if each.home is not None])
                if (
                    not pod.why_not_movable
                    and pod.home is not None
                    and pod.home.node != name
                    and min(*gpus.values(), *cpu.values()) >= 0
                ):
                    found.append([*rest, moved])
    return found


@given(pods_at_home(), NEW)
def test_a_wider_search_finds_no_longer_plan(pods: list[LivePod], new: LivePod) -> None:
    short, long = (Defrag(cluster(pods, **COUNTS), most_moves=most).plan(new) for most in (1, 2))
    assert short is None or (long is not None and len(long) == len(short))
