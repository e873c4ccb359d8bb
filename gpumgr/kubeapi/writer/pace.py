"""How fast the writer goes, and how long it waits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """`capacity`: so many events may wait. `per_second` and `burst` are what the kubelet allows itself by default (kubeAPIQPS 50,
    kubeAPIBurst 100): an API server that carries its kubelets carries as much again from a node that starts a hundred pods at once,
    which is the only time when it comes to that; and where it does not, it says so (429) and is obeyed.

    `window_seconds`: equal events are one within this time. `recount_seconds`: how often the count of one is written at most.
    `heartbeat_seconds`: what the node shows is looked at again, and its condition's heartbeat written, so often. Trouble and its end are
    written at once; `news_seconds`: a condition that tells of other trouble is written so often at most (a GPU may flutter);
    `reword_seconds`: one that has the gist of before.

    Pauses grow from the first to the longest: `pause_seconds` after any failure, `job_seconds` for the one thing that failed;
    `conflicts`: after so many conflicts in a row a pod's annotations are given up.
    """

    capacity: int = 512
    per_second: float = 50.0
    burst: int = 100
    window_seconds: float = 600.0
    recount_seconds: float = 60.0
    heartbeat_seconds: float = 600.0
    news_seconds: float = 10.0
    reword_seconds: float = 60.0
    pause_seconds: tuple[float, float] = (0.5, 30.0)
    job_seconds: tuple[float, float] = (2.0, 60.0)
    conflicts: int = 5
    max_retry_after_seconds: float = 120.0
