"""What the chart lets the agent's process do on its node, tried with the kernel."""

from pathlib import Path
from typing import Any

from tests.component.enforcement.tracing import look
from tools.chart import agent_container, daemonset, render

from .manifests import Json


def dropped(backend: str, **settings: Any) -> Json:
    """The security context without `privileged`."""
    enforcement = {"backend": backend, **settings.pop("enforcement", {})}
    context: Json = agent_container(render({"privileged": False, "settings": {"enforcement": enforcement, **settings}}))[
        "securityContext"
    ]
    return context


def test_the_default_is_privileged_with_a_read_only_root() -> None:
    context = agent_container(render())["securityContext"]
    assert context["privileged"] is True
    assert context["readOnlyRootFilesystem"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_without_it_only_the_capabilities_that_the_settings_need_are_kept() -> None:
    context = dropped("none")
    assert (context["privileged"], context["allowPrivilegeEscalation"]) == (False, False)
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    library = {"library_path": "/opt/hami/libvgpu.so", "library_sha256": "0" * 64}
    assert dropped("hami-core", hami_core=library)["capabilities"]["add"] == ["SYS_PTRACE"]
    assert dropped("auto")["capabilities"]["add"] == ["SYS_PTRACE", "SYS_ADMIN"]
    assert dropped("none", enforcement={"overrides": ["a=nvml-memory"]})["capabilities"]["add"] == ["SYS_PTRACE", "SYS_ADMIN"]
    dynamic_mig = dropped("none", node={"profile": "hami"}, hami={"operating_mode": "mig"})
    assert dynamic_mig["capabilities"]["add"] == ["SYS_PTRACE", "SYS_ADMIN"]


def test_apparmor_is_unconfined_in_every_version_of_kubernetes() -> None:
    values = {"privileged": False, "preflight": {"enabled": True}, "podAnnotations": {"note": "ours"}}

    def seen(version: str, values: Json) -> tuple[list[Any], dict[str, str]]:
        template = daemonset(render({**values, "restartOnConfigChange": False}, f"--kube-version={version}"))["spec"]["template"]
        containers = template["spec"]["containers"] + template["spec"].get("initContainers", [])
        profiles = [each["securityContext"].get("appArmorProfile") for each in containers]
        return profiles, template["metadata"].get("annotations", {})

    assert seen("1.30.0", values) == ([{"type": "Unconfined"}] * 2, {"note": "ours"})
    unconfined = {f"container.apparmor.security.beta.kubernetes.io/{name}": "unconfined" for name in ("gpumgr", "preflight")}
    assert seen("1.29.9", values) == ([None] * 2, {"note": "ours", **unconfined})
    alone = {"container.apparmor.security.beta.kubernetes.io/gpumgr": "unconfined"}
    assert seen("1.29.9", {"privileged": False}) == ([None], alone)
    assert seen("1.29.9", {}) == ([None], {})


def test_the_kept_capability_is_enough_and_needed_to_see_which_folders_are_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "d55e1f0c2b7a9e63"
    folder.mkdir()
    kept = dropped("none")["capabilities"]["add"]
    for hidepid in ("off", "noaccess"):
        assert look(folder, kept, hidepid=hidepid).stdout.strip() == folder.name
    assert "PermissionError" in look(folder, [], hidepid="noaccess").stderr
