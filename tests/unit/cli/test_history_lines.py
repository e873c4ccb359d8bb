"""The lines that `gpumgr history` prints for the entries of the story, and the accepted durations."""

import pytest

from gpumgr.cli.history import duration_seconds
from gpumgr.common.errors import InputError

LINES = """\
2026-09-21 13:56:41Z  granted  team/bert (main)                  100 cores   GPU1    fragment: in the group that is nearly used up: PIX has 1 of the node's 2 free GPUs
2026-09-21 13:56:42Z  gpu      -                                 -           GPU 2b3c4d5e  lost: XID 79: the GPU has fallen off the bus
2026-09-21 13:56:43Z  granted  team/resnet-0 (main)              30 cores    GPU0    share: the least free room that fits: 70 cores and 298 memory blocks were free
2026-09-21 13:56:44Z  granted  team/resnet-0 (main)              20 blocks   GPU0    the least free room that fits: 70 cores and 298 memory blocks were free
2026-09-21 13:56:45Z  refused  team/odd (main)                   60 cores    -       no_fit: no GPU has 60 cores and 20 memory blocks free; free: GPU0 40 cores and 278 memory blocks
2026-09-21 13:56:46Z  event    team/resnet-0 (main)              -           GPU0    OverLimit: uses 6.0 GiB on GPU0 and was granted 5.0 GiB
2026-09-21 13:56:47Z  freed    pod uid uid-gone (main)           -           GPU0    held for 12 s"""  # noqa: E501


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("0.5h", 1800), ("0s", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1 h", "1h!", "1w", "١h", "\x1b"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a duration: .* 90s, 1h30m or 2d"):
        duration_seconds(text)
