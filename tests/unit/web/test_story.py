"""Pod details from sources that differ: a static pod, a deleted pod, two pods of one name, a name that was found late."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gpumgr.agent.api import Cordon, to_json_data
from gpumgr.agent.node_report import NodeReport
from gpumgr.ledger.history import Candidate, HistoryEntry
from gpumgr.ledger.ledger import Allocation
from gpumgr.placement.pods import ContainerSpec, PodView
from gpumgr.web.state import pod_details
from tests.unit.web.metrics.pictures import allocation, name_of, uuid_of, view_of

WEB = ("team", "web")
#: What the kubelet calls a static pod: the hash of its file.
HASH = "0123456789abcdef0123456789abcdef"


def told(view: PodView | None, *allocations: Allocation, history: Sequence[HistoryEntry] = ()) -> dict[str, Any]:
    result = pod_details(NodeReport(view=view_of(*allocations)), view, *WEB, history)
    assert result is not None
    return to_json_data(result)


def entry(number: int, uid: str | None, *, what: Any = "granted", **more: Any) -> HistoryEntry:
    """The entry `number` of the history, of a moment of the same number."""
    return HistoryEntry(number=number, at=float(number), what=what, **{"pod": WEB, "pod_uid": uid, **more})


def ids(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [row["allocation"] for row in rows]


def numbers(result: dict[str, Any]) -> list[int]:
    return [told["number"] for told in result["history"]]


def test_a_pod_that_runs() -> None:
    view = PodView(
        namespace="team",
        name="web",
        uid="uid-a",
        phase="Running",
        containers=(
            ContainerSpec(name="prepare", kind="init", cores=10),
            ContainerSpec(name="log"),
            ContainerSpec(name="main", cores=3, memory_blocks=1),
        ),
    )
    mine = allocation("a", WEB, cores={0: 0b111}, blocks={0: 0b1})
    free = Candidate(gpu=name_of(0), index=0, cores_free=100, memory_mebibytes_free=2048)
    cordoned = Candidate(gpu=name_of(1), index=1, note="cordoned")
    history = [
        entry(1, "uid-a", id="a", call="allocate", kind="core", size=3, gpus=(name_of(0),), candidates=(free, cordoned)),
        entry(2, "uid-z", pod=("team", "other"), id="z"),
        entry(3, "uid-a", what="event", code="OverLimit", why="it uses too much"),
    ]
    result = told(view, mine, allocation("z", ("team", "other"), cores={1: 0b1}), history=history)
    assert {key: result[key] for key in ("namespace", "pod", "uid", "phase", "request")} == {
        "namespace": "team",
        "pod": "web",
        "uid": "uid-a",
        "phase": "Running",
        "request": [
            {"container": "prepare", "kind": "init", "cores": 10, "memory_blocks": 0},
            {"container": "main", "kind": "app", "cores": 3, "memory_blocks": 1},
        ],
    }
    assert ids(result["allocations"]) == ["a"]
    assert numbers(result) == [1, 3]
    assert result["history"][0]["candidates"] == [
        {"gpu": name_of(0), "index": 0, "cores_free": 100, "memory_mebibytes_free": 2048, "note": None},
        {"gpu": name_of(1), "index": 1, "cores_free": 0, "memory_mebibytes_free": 0, "note": "cordoned"},
    ]


def test_an_unknown_pod_has_no_pod_details() -> None:
    report = NodeReport(view=view_of(allocation("a", ("team", "other"), cores={0: 1})))
    history = [entry(1, None, pod=None), entry(2, None, pod=("other", "web")), entry(3, None, what="gpu", pod=None)]
    assert pod_details(report, None, *WEB, history) is None


def test_a_pod_without_requests_has_its_phase() -> None:
    result = told(PodView(namespace="team", name="web", uid="u", phase="Pending"))
    assert (result["uid"], result["phase"], result["request"], result["history"]) == ("u", "Pending", [], [])


def test_a_pod_that_the_kubelet_refused_has_its_status() -> None:
    view = PodView(
        namespace="team", name="web", uid="u", phase="Failed", reason="UnexpectedAdmissionError", message="Allocate failed"
    )
    result = told(view)
    assert (result["phase"], result["reason"], result["message"]) == ("Failed", "UnexpectedAdmissionError", "Allocate failed")
    gone = told(None, history=[entry(1, "uid-a", id="a")])
    assert (gone["reason"], gone["message"]) == (None, None)


def test_health_events_of_its_gpus_during_its_allocation_are_included() -> None:
    about = {"pod": None, "what": "gpu"}
    first, second = (name_of(0),), (name_of(1),)
    history = [
        entry(1, None, **about, gpus=first, code="cordoned"),
        entry(2, "uid-a", id="a", gpus=first),
        entry(3, None, **about, gpus=first, code="lost"),
        entry(4, None, **about, gpus=second, code="lost"),
        entry(5, "uid-a", id="a", what="freed", gpus=first),
        entry(6, None, **about, gpus=first, code="back"),
        entry(7, None, **about, code="not_readable"),
    ]
    assert numbers(told(None, history=history)) == [2, 3, 5]
    living = replace(allocation("a", WEB, cores={0: 0b1}), granted_at=2.0)
    result = told(None, living, history=history[:4])
    assert numbers(result) == [2, 3]
    assert [row["name"] for row in result["gpus"]] == [name_of(0)]
    set_back = [replace(each, at=each.at - 1000 * (each.number > 2)) for each in history]
    assert numbers(told(None, history=set_back)) == [2, 3, 5], "the order of the entries counts, and no clock"
    assert numbers(told(None, living, history=set_back[:4])) == [2, 3]


def test_a_gpu_that_fails_under_a_pod_is_shown_with_its_fault_and_cordon() -> None:
    view = view_of(allocation("a", WEB, cores={0: 0b1}), failed={uuid_of(0): "XID 79"})
    result = pod_details(NodeReport(view=view, cordons={uuid_of(0): Cordon(reason="broken fan", since=7.0)}), None, *WEB, [])
    assert result is not None
    assert [(row["name"], row["healthy"], row["message"], row["cordon"]["reason"]) for row in to_json_data(result)["gpus"]] == [
        (name_of(0), False, "XID 79", "broken fan")
    ]


def test_a_pod_is_known_from_the_ledger_the_api_server_or_the_history() -> None:
    wish = ContainerSpec(name="main", cores=100)
    views = [
        PodView(namespace="demo", name=name, uid="u", phase="Failed", containers=has)
        for name, has in (("big3", (wish,)), ("web", ()))
    ]
    history = [
        entry(1, "uid-x", id="x"),
        entry(2, "uid-x", id="x", pod=("team", "right"), what="freed"),
        entry(3, None, pod=("team", "odd"), what="refused"),
        entry(4, None, pod=None, what="gpu"),
        entry(5, "uid-a", id="y", pod=("team", "wrong")),
        entry(6, "uid-a", id="y", pod=("team", "right")),
    ]
    known = [("demo", "big3"), ("team", "odd"), ("team", "right"), WEB]
    report = NodeReport(view=view_of(allocation("a", WEB, cores={0: 1}), allocation("b", None, cores={1: 1})))
    for pod in (*known, ("team", "wrong")):
        assert (pod_details(report, views[0] if pod == views[0].key else None, *pod, history) is not None) == (pod in known)


def test_of_a_pod_that_is_gone_the_history_is_left() -> None:
    result = told(None, history=[entry(1, "uid-a", id="a"), entry(2, "uid-a", what="freed", id="a")])
    assert (result["uid"], result["phase"], result["request"], result["allocations"]) == ("uid-a", None, [], [])
    assert numbers(result) == [1, 2]


def test_a_refusal_of_a_pod_without_a_known_uid() -> None:
    result = told(None, history=[entry(1, None, what="refused", id="r", code="no_fit")])
    assert (result["uid"], numbers(result)) == (None, [1])


def test_a_static_pod_is_its_mirror() -> None:
    mirror = PodView(namespace="team", name="web", uid="mirror", runtime_uid=HASH, phase="Running")
    adopted = replace(allocation("a", None, container=None, cores={0: 0b1}), uid=HASH)
    granted = replace(allocation("b", WEB, cores={0: 0b10}), uid="mirror")
    result = told(mirror, adopted, granted, history=[entry(1, HASH, pod=None, id="a"), entry(2, "mirror", id="b")])
    assert result["uid"] == "mirror"
    assert ids(result["allocations"]) == ["a", "b"]
    assert numbers(result) == [1, 2]


def test_two_pods_of_one_name_are_distinguished_by_their_uids() -> None:
    old, new = allocation("a", WEB, cores={0: 0b1}), allocation("b", WEB, cores={1: 0b1})
    history = [
        entry(1, "uid-a", id="a"),
        entry(2, "uid-b", what="refused", id="r"),
        entry(3, "uid-b", id="b"),
        entry(4, "uid-a", what="freed", id="a"),
    ]
    now = PodView(namespace="team", name="web", uid="uid-b")
    for view in (now, None):  # with the API server, and without
        result = told(view, old, new, history=history[:3])
        assert result["uid"] == "uid-b"
        assert [(row["allocation"], row["uid"]) for row in result["allocations"]] == [("a", "uid-a"), ("b", "uid-b")]
        result = told(view, new, history=history)
        assert result["uid"] == "uid-b"
        assert ids(result["allocations"]) == ["b"]
        assert [(e["number"], e["pod_uid"]) for e in result["history"]] == [
            (1, "uid-a"),
            (2, "uid-b"),
            (3, "uid-b"),
            (4, "uid-a"),
        ]


def test_a_name_found_later_applies_from_the_start() -> None:
    history = [
        entry(1, None, pod=None, id="a", call="allocate", kind="core"),
        entry(2, "uid-a", id="a", call="allocate", kind="memory"),
        entry(3, None, pod=None, id="b"),
    ]
    assert numbers(told(None, history=history)) == [1, 2]
    assert numbers(told(None, allocation("b", WEB, cores={0: 1}), history=history)) == [1, 2, 3]


def test_an_allocation_under_a_wrong_name_is_shown_for_the_right_pod() -> None:
    history = [entry(1, "uid-x", id="a"), entry(2, "uid-y", pod=("team", "right"), what="freed", id="a")]
    report = NodeReport(view=view_of())
    assert pod_details(report, None, *WEB, history) is None
    details = pod_details(report, None, "team", "right", history)
    assert details is not None
    right = to_json_data(details)
    assert (right["uid"], numbers(right)) == ("uid-y", [1, 2])
