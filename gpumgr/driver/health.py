"""Decides whether a GPU is offered: a pure state machine for each GPU.

    healthy    --doubtful------------> suspect      still offered; the next readings decide
    suspect    --good reading--------> healthy
    suspect    --N doubtful in a row-> unhealthy
    any        --certain fault-------> unhealthy
    unhealthy  --good reading--------> probation    not offered yet
    probation  --N good in a row-----> healthy
    probation  --anything else-------> unhealthy

A cordoned GPU is not offered; readings still change its state. When it is uncordoned, a healthy or suspect GPU starts in probation. An XID
is an error that NVIDIA's driver reports by number. XIDs that applications cause are ignored, DOUBTFUL_XIDS are doubtful, all others are
certain faults.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

State = Literal["healthy", "suspect", "unhealthy", "probation"]
Reason = Literal["xid", "ecc", "lost", "reset", "hang", "error", "nvml_down", "mig", "operator", "missing"]

#: Source: the default list of NVIDIA's device plugin.
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
#: The GPU may still work: row remapping recorded, many corrected errors, contained error, recovery action changed.
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
    2: "a reboot of the node (NODE_REBOOT)",
    3: "peer-to-peer traffic to be drained",
    4: "draining and a GPU reset",
    5: "the IMEX domain to be recovered",
    6: "a bus reset",
    7: "a reboot of the whole system (SYSTEM_REBOOT)",
}


class HealthRules(msgspec.Struct, frozen=True, kw_only=True):
    """`good_readings` in a row make a GPU healthy, `doubtful_readings` in a row unhealthy. `ignored_xids` None: all XIDs are ignored."""

    ignored_xids: frozenset[int] | None = APPLICATION_XIDS
    good_readings: int = 3
    doubtful_readings: int = 3


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`since`: when `state` began, in seconds of the caller's clock. `streak`: doubtful (in suspect) or good (in probation) readings in a
    row. `cordon_reason`: None if the GPU is not cordoned."""

    state: State
    reason: Reason | None = None
    message: str = ""
    since: float
    streak: int = 0
    cordon_reason: str | None = None

    @property
    def healthy(self) -> bool:
        """May be offered unless it is cordoned."""
        return self.state in ("healthy", "suspect")

    @property
    def offered(self) -> bool:
        return self.healthy and self.cordon_reason is None

    @property
    def effective_reason(self) -> Reason | None:
        """Why the GPU is suspect or not offered. The reason of an unhealthy GPU takes precedence over a cordon."""
        return self.reason if self.cordon_reason is None or not self.healthy else "operator"


class HealthReading(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU answered. None: not reported. `mig_instances`: UUIDs of the GPU's MIG devices."""

    mig_enabled: bool | None = None
    mig_instances: tuple[str, ...] = ()
    double_bit_errors: int | None = None
    recovery_action: int | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU answered with an error or is missing, or NVML is down. Only the reason "error" is a doubtful fault."""

    reason: Reason
    message: str


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """`number`: the error's number in NVIDIA's list. `gpu_instance`: the GPU instance (MIG) with the error, if the driver names one."""

    number: int
    gpu_instance: int | None = None


class DoubleBitError(msgspec.Struct, frozen=True, kw_only=True):
    """An uncorrectable memory error."""


Observation = HealthReading | Failed | Xid | DoubleBitError


class _Verdict(msgspec.Struct, frozen=True):
    """A certain fault, a doubtful fault, or a GPU that works (`reason` None)."""

    reason: Reason | None = None
    message: str = ""
    certain: bool = True


def new_health(now: float, cordon_reason: str | None = None) -> GpuHealth:
    """The health of a new GPU; its first reading follows at once."""
    return GpuHealth(state="healthy", since=now, cordon_reason=cordon_reason)


def uncordoned(health: GpuHealth, now: float) -> GpuHealth:
    """The health after an operator returns the GPU to service."""
    after = replace(health, cordon_reason=None)
    if health.cordon_reason is None or not health.healthy:
        return after
    return _turn(after, "probation", _Verdict("operator", "uncordoned by the operator"), now)


def step(health: GpuHealth, observation: Observation, now: float, rules: HealthRules | None = None) -> GpuHealth:
    """The health after this observation. `now`: the time of a change, in seconds of the caller's clock."""
    rules = rules or HealthRules()
    verdict = _judge(observation, rules)
    if verdict is None:
        return health
    if verdict.reason == "mig" and health.state in ("unhealthy", "probation") and health.reason != "mig":
        # Apart from MIG mode the reading is good, so it counts towards the end of the earlier fault. After that end the reason is "mig".
        health = _improve(health, now, rules)
        if not health.healthy:
            return health
    if verdict.reason is None:
        return _improve(health, now, rules)
    return _worsen(health, verdict, now, rules)


def step_mig_devices(
    faulty: Mapping[str, GpuHealth], readings: Mapping[str, Observation | None], now: float, rules: HealthRules
) -> dict[str, GpuHealth]:
    """The MIG devices that still have a fault of their own. If all GPUs answered, a device that no GPU has is dropped."""
    answers = [each for each in readings.values() if isinstance(each, HealthReading)]
    left: dict[str, GpuHealth] = {}
    for uuid, health in faulty.items():
        reading = next((each for each in answers if uuid in each.mig_instances), None)
        # MIG mode is a fault for shares, but not for a MIG device.
        after = health if reading is None else step(health, replace(reading, mig_enabled=None), now, rules)
        if after.state != "healthy" and (reading is not None or len(answers) < len(readings)):
            left[uuid] = after
    return left


def _judge(observation: Observation, rules: HealthRules) -> _Verdict | None:
    """None: the observation changes nothing."""
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
        case HealthReading():
            return _judge_reading(observation)


def _judge_reading(reading: HealthReading) -> _Verdict:
    if reading.recovery_action:
        need = _RECOVERY_ACTIONS.get(reading.recovery_action, f"recovery action {reading.recovery_action}")
        return _Verdict("reset", f"the driver asks for {need}")
    if reading.double_bit_errors and reading.recovery_action is None:
        # Only a reset clears the count. A driver with recovery actions reports whether a reset is needed, so its count is ignored.
        return _Verdict(
            "ecc", f"{reading.double_bit_errors} uncorrectable memory errors since the driver was loaded: a GPU reset is needed"
        )
    if reading.mig_enabled:
        return _Verdict("mig", "MIG is enabled: the GPU is not shared (settings node.mig_strategy, hami.operating_mode)")
    return _Verdict()


def _improve(health: GpuHealth, now: float, rules: HealthRules) -> GpuHealth:
    match health.state:
        case "healthy":
            return health
        case "suspect":
            return _turn(health, "healthy", _Verdict(), now)
        case "unhealthy" | "probation":
            streak = health.streak + 1 if health.state == "probation" else 1
            if streak >= rules.good_readings:
                return _turn(health, "healthy", _Verdict(), now)
            return replace(health, state="probation", streak=streak, since=health.since if health.state == "probation" else now)


def _worsen(health: GpuHealth, verdict: _Verdict, now: float, rules: HealthRules) -> GpuHealth:
    if verdict.certain or health.state == "probation":
        return _turn(health, "unhealthy", verdict, now)
    if health.state == "unhealthy":
        return health  # a doubtful reading changes nothing about a certain fault
    streak = health.streak + 1 if health.state == "suspect" else 1
    if streak >= rules.doubtful_readings:
        return _turn(health, "unhealthy", verdict, now)
    return replace(_turn(health, "suspect", verdict, now), streak=streak)


def _turn(health: GpuHealth, state: State, verdict: _Verdict, now: float) -> GpuHealth:
    since = health.since if health.state == state else now
    return GpuHealth(state=state, reason=verdict.reason, message=verdict.message, since=since, cordon_reason=health.cordon_reason)
