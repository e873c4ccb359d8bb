"""A profile of samples that the test takes."""

import sys
import threading

from gpumgr.web.debug import Profile


def inner(profile: Profile) -> None:
    profile.take(sys._getframe())


def outer(profile: Profile) -> None:
    inner(profile)
    profile.take(sys._getframe())


def test_functions_stand_by_their_own_time_and_with_that_of_those_they_call() -> None:
    profile = Profile(threading.get_ident())
    for _ in range(2):
        outer(profile)
    inner(profile)
    _, first, second, *_ = profile.lines()
    assert first.split()[:3] == ["60.00", "60.00", "inner"]
    assert second.split()[:3] == ["40.00", "80.00", "outer"]
    assert (profile.samples, profile.idle) == (5, 0)
