"""What a pod needs so that MPS daemons can be started on its host."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpumgr.enforcement.mps.control import OwnView, obstacle

RUN_DIR = Path("/run/gpumgr")
NAME = "nvidia-cuda-mps-control"
SAID = f"""mounts mnt:[4026531841]
systemd-run /usr/bin/systemd-run
program /usr/bin/{NAME}
folder 26:1811
"""
HERE = OwnView(mounts="mnt:[4026532500]", folder="26:1811", receives_mounts=True)
NOT_ALLOWED = "nsenter: reassociate to namespace 'ns/mnt' failed: Operation not permitted\n"


def test_a_privileged_pod_with_the_hosts_processes_and_the_folder_is_all_it_takes() -> None:
    assert obstacle(SAID, HERE, NAME, RUN_DIR) is None


@pytest.mark.parametrize(
    ("said", "here", "told", "remedy"),
    [
        (NOT_ALLOWED, HERE, "failed: Operation not permitted", "`privileged: true` (for the capabilities SYS_ADMIN, SYS_CHROOT"),
        ("", HERE, "enter the host's mount namespace to start them: no output", "hostPID: true"),
        (SAID, replace(HERE, mounts="mnt:[4026531841]"), "does not see the host's processes", "hostPID: true"),
        (SAID.replace("systemd-run", "sh: complaint"), HERE, "only a host with systemd", "another mechanism"),
        (SAID.replace("/usr/bin/systemd-run", ""), HERE, "only a host with systemd", "run the agent on the host itself"),
        (SAID.replace(f"/usr/bin/{NAME}", ""), HERE, f"'{NAME}' was not found on the host", "set mps.control_program"),
        (SAID, replace(HERE, folder="40:2"), "/run/gpumgr of the agent's pod is not the host's", "hostPath, at the same path"),
        (SAID, replace(HERE, folder=None), "/run/gpumgr of the agent's pod is not the host's", "hostPath, at the same path"),
        (SAID.replace("26:1811", ""), HERE, "/run/gpumgr of the agent's pod is not the host's", "hostPath, at the same path"),
        (
            SAID,
            replace(HERE, receives_mounts=False),
            "would not be visible in the agent's pod",
            "mountPropagation: HostToContainer",
        ),
    ],
)
def test_missing_requirements_are_reported_with_the_remedy(said: str, here: OwnView, told: str, remedy: str) -> None:
    message, _, advice = str(obstacle(said, here, NAME, RUN_DIR)).partition("; ")
    assert told in message
    assert remedy in advice
