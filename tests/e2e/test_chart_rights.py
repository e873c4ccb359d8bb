"""What the chart lets the agent's process do on its node, tried with the kernel."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .chart import agent_container, render
from .manifests import Json
from .places import PROJECT
from .processes import wait_until


def dropped(backend: str, **settings: Any) -> Json:
    """The security context without `privileged`."""
    enforcement = {"backend": backend, **settings.pop("enforcement", {})}
    context: Json = agent_container(render({"privileged": False, "settings": {"enforcement": enforcement, **settings}}))[
        "securityContext"
    ]
    return context


def test_privileged_as_the_card_says_with_a_root_that_nobody_writes_to() -> None:
    context = agent_container(render())["securityContext"]
    assert context["privileged"] is True
    assert context["readOnlyRootFilesystem"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_without_it_only_the_capabilities_that_the_settings_need_are_kept() -> None:
    context = dropped("none")
    assert (context["privileged"], context["allowPrivilegeEscalation"]) == (False, False)
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    assert dropped("hami-core")["capabilities"]["add"] == ["SYS_PTRACE"]
    assert dropped("auto")["capabilities"]["add"] == ["SYS_PTRACE", "SYS_ADMIN"]
    assert dropped("none", enforcement={"overrides": ["a=nvml-memory"]})["capabilities"]["add"] == ["SYS_PTRACE", "SYS_ADMIN"]
    assert dropped("none", nvml={"load_kernel_modules": True})["capabilities"]["add"] == ["SYS_PTRACE", "SYS_MODULE"]


def test_an_older_cluster_gets_no_field_that_it_does_not_know() -> None:
    values = {"privileged": False}
    assert "appArmorProfile" in agent_container(render(values, "--kube-version=1.30.0"))["securityContext"]
    assert "appArmorProfile" not in agent_container(render(values, "--kube-version=1.29.9"))["securityContext"]


_LOOK: Final = "import sys; from gpumgr.enforcement.leftovers import mounted; print(*mounted(sys.argv[1:]))"


@contextmanager
def tenant(folder: Path) -> Iterator[None]:
    """A process of another user with a mount namespace of its own, in which it has `folder` mounted: as a container has."""
    ready = folder.parent / "ready"
    script = f"mount --bind {folder} /mnt && touch {ready} && exec setpriv --reuid=65534 --regid=65534 --clear-groups sleep 60"
    process = subprocess.Popen(["unshare", "--mount", "--", "/bin/sh", "-c", script])
    try:
        wait_until("the mount", ready.exists, 10)
        wait_until("the other user", lambda: "Uid:\t65534" in Path(f"/proc/{process.pid}/status").read_text(), 10)
        yield
    finally:
        process.kill()
        process.wait()


def look_with(capabilities: list[str], name: str) -> str:
    """Which folders are in use, as root with nothing but these capabilities sees it."""
    bounds = ",".join(["-all", *(f"+{each.lower()}" for each in capabilities)])
    command = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--ambient-caps=-all", f"--bounding-set={bounds}"]
    done = subprocess.run([*command, sys.executable, "-c", _LOOK, name], capture_output=True, text=True, check=True, cwd=PROJECT)
    return done.stdout.strip()


def test_the_kept_capability_is_enough_and_needed_to_see_which_folders_are_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "d55e1f0c2b7a9e63"
    folder.mkdir()
    with tenant(folder):
        assert look_with(dropped("none")["capabilities"]["add"], folder.name) == folder.name
        assert look_with([], folder.name) == ""
