"""For all tests: on CI, Hypothesis draws the same examples in each run, so that a change is judged by itself; elsewhere new ones."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
