"""Which of the agent's folders are the host's, by /proc/self/mountinfo."""

from pathlib import Path

import pytest

from gpumgr.cli.examination import CheckResult
from gpumgr.cli.examination.folders import judge_host_paths

FOLDERS = {"checkpoint.dir": Path("/var/lib/gpumgr"), "enforcement.run_dir": Path("/run/gpumgr")}
OVERLAY = "641 540 0:53 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/a:/b"
LEDGER = "660 641 8:1 /var/lib/gpumgr /var/lib/gpumgr rw - ext4 /dev/sda1 rw"
RUN = "661 641 0:24 /gpumgr /run/gpumgr rw shared:5 - tmpfs tmpfs rw"
EMPTY = "662 641 8:1 /var/lib/kubelet/pods/4d/volumes/kubernetes.io~empty-dir/state /var/lib/gpumgr rw - ext4 /dev/sda1 rw"


def judged(*lines: str) -> CheckResult:
    return judge_host_paths(FOLDERS, "\n".join(lines))


def test_all_are_mounted_or_lie_in_what_is_mounted() -> None:
    found = judged(OVERLAY, LEDGER, RUN)
    assert (found.state, found.message) == ("ok", "2 folders are mounted from the host")
    assert judged(OVERLAY, "660 641 8:1 /var /var rw - ext4 /dev/sda1 rw", RUN).state == "ok"


@pytest.mark.parametrize("lines", [(OVERLAY, RUN), (OVERLAY, EMPTY, RUN), (OVERLAY, LEDGER, EMPTY, RUN), (RUN,)])
def test_what_is_the_containers_or_the_pods_own_is_named(lines: tuple[str, ...]) -> None:
    found = judged(*lines)
    assert found.state == "error"
    assert found.message.startswith("not mounted from the host: /var/lib/gpumgr (checkpoint.dir); ")
    assert "hostPath" in (found.remedy or "")
