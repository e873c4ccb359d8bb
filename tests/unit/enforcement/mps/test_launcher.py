"""How daemons are started."""

from pathlib import Path

from gpumgr.enforcement.mps import launcher

SHM = Path("/run/gpumgr/mps/GPU-1/shm")
COMMAND = ("/usr/bin/nvidia-cuda-mps-control", "-d")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "GPU-1"}


def test_under_systemd_the_daemon_is_a_service_of_its_own() -> None:
    argv = launcher.daemon_command("systemd", "GPU-1", SHM, ENVIRONMENT, COMMAND)
    assert argv[0] == "systemd-run"
    assert {"--unit=gpumgr-mps-GPU-1", "--service-type=forking", f"--property=BindPaths={SHM}:/dev/shm"} <= set(argv)
    assert argv[-4:] == ["--setenv=CUDA_VISIBLE_DEVICES=GPU-1", "--", *COMMAND]


def test_from_a_pod_the_same_is_done_among_the_hosts_files() -> None:
    enter = ["nsenter", "--target", "1", "--mount", "--"]
    assert launcher.best_method(in_pod=True) == "host"
    assert list(launcher.host_prefix("host")) == enter
    argv = launcher.daemon_command("host", "GPU-1", SHM, ENVIRONMENT, COMMAND)
    assert argv == [*enter, *launcher.daemon_command("systemd", "GPU-1", SHM, ENVIRONMENT, COMMAND)]
    mount, unmount = launcher.shm_command("namespace", SHM, mounted=True), launcher.shm_command("namespace", SHM, mounted=False)
    assert mount is not None
    assert unmount is not None
    assert launcher.shm_command("host", SHM, mounted=True) == [*enter, *mount]
    assert launcher.shm_command("host", SHM, mounted=False) == [*enter, *unmount]


def test_elsewhere_it_has_a_mount_namespace() -> None:
    argv = launcher.daemon_command("namespace", "GPU-1", SHM, ENVIRONMENT, COMMAND)
    assert argv[:4] == ["unshare", "--mount", "--propagation", "slave"]
    assert argv[-3:] == [str(SHM), *COMMAND]


def test_without_root_nothing_is_mounted() -> None:
    assert launcher.daemon_command("plain", "GPU-1", SHM, ENVIRONMENT, COMMAND) == list(COMMAND)
    assert launcher.host_prefix("plain") == ()
    assert launcher.shm_command("plain", SHM, mounted=True) is None
    assert launcher.shm_command("plain", SHM, mounted=False) is None


def test_the_shared_memory_is_limited_and_mounted_on_the_host() -> None:
    mount = launcher.shm_command("namespace", SHM, mounted=True)
    assert mount is not None
    assert "size=1073741824" in " ".join(mount)
    within = launcher.shm_command("systemd", SHM, mounted=True)
    assert within is not None
    assert within[0] == "systemd-run"
    assert within[-len(mount) :] == mount
    assert launcher.shm_command("namespace", SHM, mounted=False) == ["umount", str(SHM)]


def test_a_client_shares_the_memory_of_the_daemon_and_is_not_started_from_a_pod() -> None:
    shm, environment, command = Path("/run/gpumgr/mps/GPU-1/shm"), {"A": "b"}, ("python3", "client.py")
    systemd = launcher.client_command("systemd", shm, environment, command)
    assert systemd is not None
    assert systemd[0] == "systemd-run"
    assert systemd[-2:] == ["python3", "client.py"]
    assert {"--wait", "--setenv=A=b", f"--property=BindPaths={shm}:/dev/shm"} <= set(systemd)
    namespace = launcher.client_command("namespace", shm, environment, command)
    assert namespace is not None
    assert namespace[0] == "unshare"
    assert namespace[-3:] == [str(shm), "python3", "client.py"]
    assert launcher.client_command("plain", shm, environment, command) == ["python3", "client.py"]
    assert launcher.client_command("host", shm, environment, command) is None
