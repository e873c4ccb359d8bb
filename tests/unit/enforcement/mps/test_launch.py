"""How daemons are started."""

from pathlib import Path

from gpumgr.enforcement.mps import launch

SHM = Path("/run/gpumgr/mps/GPU-1/shm")
COMMAND = ("/usr/bin/nvidia-cuda-mps-control", "-d")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "GPU-1"}


def test_under_systemd_the_daemon_is_a_service_of_its_own() -> None:
    argv = launch.daemon_command("systemd", "GPU-1", SHM, ENVIRONMENT, COMMAND)
    assert argv[0] == "systemd-run"
    assert {"--unit=gpumgr-mps-GPU-1", "--service-type=forking", f"--property=BindPaths={SHM}:/dev/shm"} <= set(argv)
    assert argv[-4:] == ["--setenv=CUDA_VISIBLE_DEVICES=GPU-1", "--", *COMMAND]


def test_from_a_pod_the_same_is_done_among_the_hosts_files() -> None:
    enter = ["nsenter", "--target", "1", "--mount", "--"]
    assert launch.best(in_pod=True) == "host"
    assert list(launch.on_host("host")) == enter
    argv = launch.daemon_command("host", "GPU-1", SHM, ENVIRONMENT, COMMAND)
    assert argv == [*enter, *launch.daemon_command("systemd", "GPU-1", SHM, ENVIRONMENT, COMMAND)]
    mount, unmount = launch.mount_command("namespace", SHM), launch.unmount_command("namespace", SHM)
    assert mount is not None
    assert unmount is not None
    assert launch.mount_command("host", SHM) == [*enter, *mount]
    assert launch.unmount_command("host", SHM) == [*enter, *unmount]


def test_elsewhere_it_has_a_mount_namespace() -> None:
    argv = launch.daemon_command("namespace", "GPU-1", SHM, ENVIRONMENT, COMMAND)
    assert argv[:4] == ["unshare", "--mount", "--propagation", "slave"]
    assert argv[-3:] == [str(SHM), *COMMAND]


def test_without_root_nothing_is_mounted() -> None:
    assert launch.daemon_command("plain", "GPU-1", SHM, ENVIRONMENT, COMMAND) == list(COMMAND)
    assert launch.on_host("plain") == ()
    assert launch.mount_command("plain", SHM) is None
    assert launch.unmount_command("plain", SHM) is None


def test_the_shared_memory_is_limited_and_mounted_on_the_host() -> None:
    mount = launch.mount_command("namespace", SHM)
    assert mount is not None
    assert "size=1073741824" in " ".join(mount)
    within = launch.mount_command("systemd", SHM)
    assert within is not None
    assert within[0] == "systemd-run"
    assert within[-len(mount) :] == mount
    assert launch.unmount_command("namespace", SHM) == ["umount", str(SHM)]
