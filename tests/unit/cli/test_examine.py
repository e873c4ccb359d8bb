"""How checks are run, and what is made of what they raise."""

import asyncio

import pytest

from gpumgr.cli.examination import Check, CheckResult, Look, examine, ok, skipped
from gpumgr.common.errors import CriError


def check(name: str, look: Look) -> Check:
    return Check(name, look, "restart it")


def raising(exception: Exception) -> Look:
    async def look() -> CheckResult:
        raise exception

    return look


async def well() -> CheckResult:
    return ok("as it should be")


async def test_findings_stand_in_the_order_of_the_checks() -> None:
    first = asyncio.Event()

    async def waits() -> CheckResult:
        await first.wait()
        return skipped("not used")

    async def goes_first() -> CheckResult:
        first.set()
        return await well()

    report = await examine([check("waits", waits), check("well", goes_first)])
    assert [*report.findings.items()] == [("waits", skipped("not used")), ("well", ok("as it should be"))]
    assert not report.hung


@pytest.mark.parametrize(
    ("exception", "message", "remedy"),
    [
        (CriError("nobody listens there; start it; or don't"), "nobody listens there", "start it; or don't"),
        (CriError("nobody\n  listens"), "nobody listens", "restart it"),
        (ConnectionResetError(), "ConnectionResetError", "restart it"),
        (ZeroDivisionError("by zero"), "the check failed: ZeroDivisionError: by zero", "report this bug of gpumgr"),
    ],
)
async def test_what_a_check_raises_is_an_error_of_its_own(exception: Exception, message: str, remedy: str) -> None:
    report = await examine([check("bad", raising(exception)), check("well", well)])
    assert report.findings["bad"] == CheckResult(state="error", message=message, remedy=remedy)
    assert report.findings["well"].state == "ok"
    assert report.exit_code == 1


async def test_a_check_that_ignores_cancellation_delays_no_other_check() -> None:
    released = asyncio.Event()

    async def stubborn() -> CheckResult:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return ok("at last")

    report = await examine([check("stubborn", stubborn), check("well", well)], limit_seconds=0.02)
    assert report.hung
    assert report.findings["stubborn"] == CheckResult(state="error", message="no answer within 0.02 s", remedy="restart it")
    assert report.findings["well"].state == "ok"
    released.set()
    await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "stubborn"])
