"""gpu-manager's flags out of a text, a manifest or its process; and the plan of a node that had gpu-manager."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.common.errors import InputError, SettingsError
from gpumgr.compat.gpu_manager.takeover import (
    DaemonSet,
    GpuManagerCommand,
    GpuManagerState,
    from_objects,
    from_process,
    from_text,
    plan_gpu_manager,
)
from gpumgr.compat.objects import Object, parse_object
from gpumgr.compat.plan import Plan, settings_yaml, text_of
from gpumgr.ledger.rebuild import AnonymousRecord


def daemon_set(container: dict[str, Any], **spec: Any) -> Object:
    metadata = {"namespace": "gpu", "name": "gm"}
    template = {"spec": {"containers": [container], **spec}}
    return parse_object({"kind": "DaemonSet", "metadata": metadata, "spec": {"template": template}}, "a test")


SHIPPED = {
    "name": "gpu-manager",
    "image": "tkestack/gpu-manager:1.0.3",
    "env": [
        {"name": "LOG_LEVEL", "value": "4"},
        {"name": "EXTRA_FLAGS", "value": "--logtostderr=false --query-port 5679"},
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
}


@pytest.mark.parametrize(
    "text",
    [
        "--share-mode --query-port=1 --v 4",
        "/usr/bin/gpu-manager --share_mode=true --query-port 1 -v4",
        "gpu-manager --share-mode --query-port=1 -v=4",
    ],
)
def test_a_command_line_as_it_is_typed(text: str) -> None:
    assert from_text(text).flags == (("share-mode", "true"), ("query-port", "1"), ("v", "4"))


def test_what_is_no_command_line() -> None:
    with pytest.raises(InputError, match="can't be read"):
        from_text("--kubeconfig='")
    with pytest.raises(SettingsError, match="unknown flag --share-mod"):
        from_text("--share-mod")


def test_the_shipped_daemon_set_runs_the_images_script() -> None:
    found = from_objects([Object(kind="Service"), daemon_set(SHIPPED, nodeSelector={"nvidia-device-enable": "enable"})])
    assert found is not None
    flags = dict(found.flags)
    assert (flags["share-mode"], flags["query-addr"], flags["query-port"], flags["v"]) == ("true", "0.0.0.0", "5679", "4")
    assert "hostname-override" not in flags
    assert found.notes == ("--hostname-override=$NODE_NAME is left out: gpumgr takes $NODE_NAME, too",)
    assert found.daemon_set == DaemonSet(namespace="gpu", name="gm", selector={"nvidia-device-enable": "enable"})


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["/usr/bin/gpu-manager"], "args": ["--share-mode=true", "--v=$(LEVEL)"]},
        {"command": ["gpu-manager", "--share-mode=true", "--v=${LEVEL}"]},
        {"command": ["/bin/sh", "-c", "ldconfig && exec gpu-manager --share-mode=true --v=$LEVEL 2>/log"]},
        {"command": ["sh", "-c"], "args": ["gpu-manager --share-mode=true --v=$LEVEL; sleep 1"]},
    ],
)
def test_a_command_of_ones_own(container: dict[str, Any]) -> None:
    found = from_objects([daemon_set({**container, "image": "mine:1", "env": [{"name": "LEVEL", "value": "2"}]})])
    assert found is not None
    assert found.flags == (("share-mode", "true"), ("v", "2"))
    assert found.daemon_set is not None
    assert found.daemon_set.selector == {}


def test_a_variable_that_only_the_cluster_knows_leaves_its_flag_out() -> None:
    found = from_objects([daemon_set({"command": ["gpu-manager", "--query-port=$(PORT)", "--share-mode"]})])
    assert found is not None
    assert found.flags == (("share-mode", "true"),)
    assert found.notes == ("--query-port=$(PORT) is left out: the manifest does not define $PORT",)


@pytest.mark.parametrize("image", ["tkestack/gpu-quota-admission:1", "gpu-manager-exporter:1", "nginx"])
def test_containers_of_others_are_skipped(image: str) -> None:
    assert from_objects([daemon_set({"image": image})]) is None


@pytest.mark.parametrize(
    "image", ["gpu-manager", "registry:5000/tkestack/gpu-manager", "a/gpu-manager@sha256:12", "gpu-manager:v1"]
)
def test_its_image_has_many_names(image: str) -> None:
    assert from_objects([daemon_set({"image": image})]) is not None


def test_files_of_flags_are_mapped_through_the_mounts(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/extra.json").write_text("{}")
    command = GpuManagerCommand(
        flags=(("extra-config", "/etc/extra.json"), ("volume-config", "/etc/none.conf"), ("v", "2")), root=tmp_path
    )
    argv, notes = command.argv()
    assert argv == [f"--extra-config={tmp_path}/etc/extra.json", "--v=2"]
    assert notes == [
        "--volume-config: /etc/none.conf is not on this host, so it is in gpu-manager's image, and gpumgr assumes its shipped content"
    ]


@pytest.mark.parametrize(
    ("cgroup", "in_pod"), [("0::/kubepods.slice/pod1", True), ("0::/system.slice/gpu-manager.service", False)]
)
def test_the_process_that_runs(cgroup: str, in_pod: bool, tmp_path: Path) -> None:
    for pid, argv in (("7", "sh\0-c\0gpu-manager\0"), ("40", "/usr/bin/gpu-manager\0--share-mode=true\0--v\0004\0"), ("8", "")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_text(argv)
        (tmp_path / pid / "cgroup").write_text(cgroup)
    (tmp_path / "uptime").write_text("1 1")
    found = from_process(tmp_path)
    assert found is not None
    assert (found.pid, found.root, found.flags) == (40, tmp_path / "40/root", (("share-mode", "true"), ("v", "4")))
    assert (found.daemon_set is not None) == in_pod
    (tmp_path / "40/cmdline").write_text("")
    assert from_process(tmp_path) is None


# -- the plan ------------------------------------------------------------------------------------------------------------------

CHECKPOINT = Path("/etc/gpu-manager/checkpoint/gpumanager_internal_checkpoint")
NOTHING = GpuManagerState(node="gpu-7", checkpoint=CHECKPOINT, live=(), names={}, registered={})
TO = Path("/etc/gpumgr/gpumgr.yaml")
DATA = Path(__file__).parents[3] / "data" / "migration"


def record(uid: str, *minors: int, cores: int = 50, blocks: int = 4) -> AnonymousRecord:
    return AnonymousRecord(uid=uid, container="main", minors=minors, cores=cores, memory_blocks=blocks)


def plan(flags: str = "--share-mode=true", found: GpuManagerState = NOTHING, daemon_set: DaemonSet | None = None) -> Plan:
    return plan_gpu_manager(replace(from_text(flags), daemon_set=daemon_set), found, to=TO)


def test_only_what_differs_from_the_defaults_becomes_a_setting() -> None:
    made = plan("--share-mode=true --query-port=5679 --query-addr=localhost --sample-period=5 --node-labels=a=b --v=2")
    assert settings_yaml(made.settings) == (
        "kubernetes:\n  node_labels:\n  - a=b\nnvml:\n  sample_period_seconds: 5.0\nhttp:\n  address: localhost\n  port: 5679\n"
    )
    assert settings_yaml(plan().settings) == "{}\n"


def test_its_own_defaults_are_kept_where_ours_are_others() -> None:
    made = plan("--query-port=5678")
    assert made.settings == {"placement.share_mode": False}
    assert any("--share-mode" in note for note in made.notes)


def test_a_runtime_that_is_gone_is_not_taken_over() -> None:
    made = plan("--share-mode --container-runtime-endpoint=/var/run/dockershim.sock")
    assert made.settings == {}
    assert any("/var/run/dockershim.sock is gone since Kubernetes 1.24" in note for note in made.notes)
    assert plan("--share-mode --container-runtime-endpoint=/run/crio/crio.sock").settings == {"cri.socket": "/run/crio/crio.sock"}


LEFT = {(uid, "main"): frozenset(uid) for uid in ("u1", "u2", "u8", "u9")}
TWO = replace(NOTHING, records=(record("u1", 0), record("u2", 1, 2, cores=200, blocks=0)))
#: The DaemonSet left the record of an ended pod and two pods without a record. The one without a selector still answers, and the kubelet's
#: checkpoint can't be read.
PLANS = {
    "daemon-set": plan(
        "--share-mode --query-port=5679",
        replace(
            TWO, records=(*TWO.records, record("u3", 3)), live={"u1", "u2"}, holders=LEFT, names={"u1": "team/a", "u8": "team/b"}
        ),
        DaemonSet(),
    ),
    "daemon-set-without-selector": plan(
        found=replace(TWO, live=None, answering=[Path("/dp/vcore.sock")], registered={"tencent.com/vcuda-core": 800}),
        daemon_set=DaemonSet(namespace="gpu", name="gm", selector={}),
    ),
    "process": plan_gpu_manager(GpuManagerCommand(flags=(), pid=40), replace(NOTHING, registered={"x": 1}), to=TO),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_whole_plan(name: str) -> None:
    assert text_of(PLANS[name], str(TO)) == (DATA / f"gpu-manager-{name}.txt").read_text()


def test_only_records_with_a_gpu_count() -> None:
    found = replace(NOTHING, live={"u1"}, holders={("u1", "main"): frozenset("x")})
    assert "does not say which" in plan(found=replace(found, records=(record("u1"),))).warnings[0]
    assert plan(found=replace(found, records=(record("u1", 0),))).warnings == ()


def test_commands_take_nothing_from_files_as_shell_text() -> None:
    evil = "x; reboot #"
    found = replace(NOTHING, node=evil, checkpoint=Path(f"/tmp/{evil}"))
    made = plan_gpu_manager(
        replace(from_text("--share-mode"), daemon_set=DaemonSet(namespace=evil, name=evil, selector={evil: evil})),
        found,
        to=Path(f"/etc/{evil}"),
    )
    words = [shlex.split(line, comments=True) for line in (*made.stop, *made.start, *made.rollback, *made.clean_up)]
    for expected in (
        ["kubectl", "label", "node", evil, f"{evil}-"],
        ["kubectl", "label", "node", evil, f"{evil}={evil}"],
        ["gpumgr", "config", "check", f"/etc/{evil}"],
        ["rm", f"/tmp/{evil}"],
    ):
        assert expected in words
    bare = plan_gpu_manager(
        replace(from_text("--share-mode"), daemon_set=DaemonSet(namespace=evil, name=evil, selector={})), found, to=TO
    )
    assert shlex.split(bare.stop[1])[:6] == ["kubectl", "-n", evil, "patch", "daemonset", evil]
