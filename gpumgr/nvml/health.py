"""When a GPU is offered: a pure state machine, one state for each GPU.

    healthy    --doubtful------------> suspect      still offered; the next looks decide
    suspect    --good look-----------> healthy
    suspect    --N doubtful in a row-> unhealthy
    any        --certain fault-------> unhealthy
    unhealthy  --good look-----------> probation    not offered yet
    probation  --N good in a row-----> healthy
    probation  --anything else-------> unhealthy

What an operator holds is not offered until he releases it, whatever its state, which the looks go on judging; then a well one
begins in probation. Not every XID is a fault of the GPU's: those that an application causes are ignored (the list that NVIDIA's
device plugin uses), some only say that something was recorded and leave the verdict to the next look.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

State = Literal["healthy", "suspect", "unhealthy", "probation"]
Reason = Literal["xid", "ecc", "lost", "reset", "error", "nvml_down", "mig", "operator", "missing"]

#: XIDs that an application causes. Source: NVIDIA's device plugin, its default list.
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
#: Row remapping recorded, many corrected errors, contained error, recovery action changed: the GPU may well go on.
DOUBTFUL_XIDS: Final = frozenset({63, 92, 94, 154})

_XID_MEANINGS: Final = {
    48: "double-bit ECC error",
    63: "row remapping recorded",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    140: "unrecovered ECC error",
    154: "the needed recovery action changed",
}
_RECOVERY_ACTIONS: Final = {
    1: "a GPU reset",
    2: "a reboot",
    3: "peer-to-peer traffic to be drained",
    4: "draining and a GPU reset",
    5: "the IMEX domain to be recovered",
    6: "a bus reset",
    7: "a reboot of the system",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRules:
    """`good_looks` in a row bring a GPU back, `doubtful_looks` in a row make it unhealthy. `ignored_xids` None ignores all."""

    ignored_xids: frozenset[int] | None = APPLICATION_XIDS
    good_looks: int = 3
    doubtful_looks: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """`reason` is a bounded label, `message` a sentence, `since` the seconds (of the caller's clock) when `state` began.

    `streak` counts the looks in a row that speak for leaving suspect or probation. `held`: why an operator holds the GPU (None: he
    does not). `xid` is the first that was reported since it was last healthy: what the driver says later is mostly what came of it.
    """

    state: State
    reason: Reason | None = None
    message: str = ""
    since: float
    streak: int = 0
    held: str | None = None
    xid: int | None = None

    @property
    def well(self) -> bool:
        """Whether nothing but an operator may keep this GPU from being handed out."""
        return self.state in ("healthy", "suspect")

    @property
    def offered(self) -> bool:
        """Whether the kubelet may hand this GPU out."""
        return self.well and self.held is None

    @property
    def word(self) -> Reason | None:
        """Why it is not offered, or doubted; what ails the GPU itself goes before a hold."""
        return self.reason if self.held is None or not self.well else "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The GPU answered. None = the driver does not tell."""

    mig_enabled: bool | None = None
    double_bit_errors: int | None = None
    recovery_action: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The GPU answered with an error, or is not there, or NVML as a whole isn't. Reason "error" is doubtful, others are certain."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """The driver reported an error by NVIDIA's number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleBitError:
    """The driver reported an uncorrectable memory error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An operator takes the GPU out of service."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """An operator gives it back."""


Observation = Looked | Failed | Xid | DoubleBitError | Held | Released


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What an observation means: `certain` faults, doubts, or (reason None) all well."""

    reason: Reason | None = None
    message: str = ""
    certain: bool = True


def new_health(now: float) -> GpuHealth:
    """Of a GPU seen for the first time: the first look follows at once."""
    return GpuHealth(state="healthy", since=now)


def step(health: GpuHealth, observation: Observation, now: float, rules: HealthRules | None = None) -> GpuHealth:
    """The next state. `now` is by any one clock; it only dates the states."""
    rules = rules or HealthRules()
    if isinstance(observation, Held):
        return replace(health, held=observation.message)
    if isinstance(observation, Released):
        released = replace(health, held=None)
        if health.held is None or not health.well:
            return released
        return _turn(released, "probation", _Verdict("operator", "released by the operator"), now)
    verdict = _judge(observation, rules)
    if verdict is None:
        return health
    if isinstance(observation, Xid) and health.xid is None and (health.well or verdict.certain):
        health = replace(health, xid=observation.number)
    if verdict.reason is None:
        return _improve(health, now, rules)
    return _worsen(health, verdict, now, rules)


def _judge(observation: Looked | Failed | Xid | DoubleBitError, rules: HealthRules) -> _Verdict | None:
    """None = no news."""
    match observation:
        case Xid(number=number):
            if rules.ignored_xids is None or number in rules.ignored_xids:
                return None
            meaning = _XID_MEANINGS.get(number)
            return _Verdict("xid", f"XID {number}" + (f": {meaning}" if meaning else ""), certain=number not in DOUBTFUL_XIDS)
        case DoubleBitError():
            return _Verdict("ecc", "uncorrectable memory error (double-bit ECC)")
        case Failed(reason=reason, message=message):
            return _Verdict(reason, message, certain=reason != "error")
        case Looked():
            return _judge_look(observation)


def _judge_look(look: Looked) -> _Verdict:
    if look.mig_enabled:
        return _Verdict("mig", "MIG is enabled: the GPU is not offered as vcuda")
    if look.recovery_action:
        need = _RECOVERY_ACTIONS.get(look.recovery_action, f"recovery action {look.recovery_action}")
        return _Verdict("reset", f"the driver asks for {need}")
    if look.double_bit_errors and look.recovery_action is None:
        # The count falls to zero with the reset that cures it. A driver that knows recovery actions says when none is needed.
        return _Verdict(
            "ecc", f"{look.double_bit_errors} uncorrectable memory errors since the driver was loaded: a GPU reset is needed"
        )
    return _Verdict()


def _improve(health: GpuHealth, now: float, rules: HealthRules) -> GpuHealth:
    match health.state:
        case "healthy":
            return health
        case "suspect":
            return _turn(health, "healthy", _Verdict(), now)
        case "unhealthy" | "probation":
            streak = health.streak + 1 if health.state == "probation" else 1
            if streak >= rules.good_looks:
                return _turn(health, "healthy", _Verdict(), now)
            return replace(health, state="probation", streak=streak, since=health.since if health.state == "probation" else now)


def _worsen(health: GpuHealth, verdict: _Verdict, now: float, rules: HealthRules) -> GpuHealth:
    if verdict.certain or health.state == "probation":
        return _turn(health, "unhealthy", verdict, now)
    if health.state == "unhealthy":
        return health  # a doubt adds nothing to a certainty
    streak = health.streak + 1 if health.state == "suspect" else 1
    if streak >= rules.doubtful_looks:
        return _turn(health, "unhealthy", verdict, now)
    return replace(_turn(health, "suspect", verdict, now), streak=streak)


def _turn(health: GpuHealth, state: State, verdict: _Verdict, now: float) -> GpuHealth:
    since = health.since if health.state == state else now
    xid = health.xid if state != "healthy" else None
    told_by_itself = verdict.reason in ("operator", "mig") or verdict.message.partition(":")[0] == f"XID {xid}"
    message = verdict.message if xid is None or told_by_itself else f"XID {xid}, then: {verdict.message}"
    return GpuHealth(state=state, reason=verdict.reason, message=message, since=since, held=health.held, xid=xid)
