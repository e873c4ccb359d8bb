"""The README names every metric of ours, and no other."""

import re
from pathlib import Path

from gpumgr.metrics.live import catalogue

README = Path(__file__).parents[3] / "README.md"
CALLS = ("allocate", "prefer", "prestart")


def test_the_readme_names_every_metric_and_no_other() -> None:
    text = README.read_text(encoding="utf-8")
    table = text[text.index("All begin with `gpumgr_`") : text.index("</details>", text.index("All begin with `gpumgr_`"))]
    named = {word for word in re.findall(r"`([a-z0-9_*]+)`", table) if "_" in word} - {"gpumgr_", "process_*"}
    short = {word for word in named if word.startswith("*")}
    named = (named - short) | {word.replace("*", call) for word in short for call in CALLS}
    assert named == {name.removeprefix("gpumgr_") for name, *_ in catalogue()}
