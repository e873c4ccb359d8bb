"""Gets what the cluster is made of: Debian packages; from Go modules Kubernetes, containerd, helm, and the kinds of Prometheus Operator.

`python -m tests.e2e.build` does it ahead of the tests. Cold: minutes; warm: it only reads the stamps of the cache.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .places import CONTAINERD, GO, GO_CONTAINERD, GO_CRDS, GO_HELM, GO_OLDER, KUBERNETES, OLDER_KUBELET, cache


def lock_of(folder: Path) -> Path:
    """Beside the folder, since what is in that may be thrown away; the file stays, so that all who wait wait for the same one."""
    return folder.with_name(f"{folder.name}.lock")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Creates the folder and waits for its lock. The system releases the lock when its holder is killed. The lock is not reentrant: a
    holder that enters again waits for ever."""
    folder.mkdir(parents=True, exist_ok=True)
    with lock_of(folder).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# File, and the Debian package that brings it.
NEEDED = {
    "/usr/bin/containerd": "containerd",
    "/usr/sbin/runc": "runc",
    "/usr/bin/etcd": "etcd-server",
    "/usr/lib/cni/loopback": "containernetworking-plugins",
    "/bin/busybox": "busybox-static",
    "/usr/bin/openssl": "openssl",
    "/usr/bin/setpriv": "util-linux",
    "/usr/bin/mmdebstrap": "mmdebstrap",
    "/usr/bin/systemd-nspawn": "systemd-container",
    "/usr/bin/chromium": "chromium",
    "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf": "fonts-dejavu-core",
    "/usr/bin/prometheus": "prometheus",
    "/usr/bin/promtool": "prometheus",
    "/usr/bin/buildah": "buildah",
}
HELM = "3.20.2"
RUNTIME = ("containerd", "containerd-shim-runc-v2", "ctr")
#: Our own, in Go for the sake of Kubernetes' own types.
PROGRAMS = ("extender", "plugins")
COMMANDS = ("kube-apiserver", "kube-scheduler", "kubelet", "kubectl")
#: What the chart can ask of Prometheus Operator. The package is any of its module's: files that are not Go come with the module alone.
OPERATOR = "github.com/prometheus-operator/prometheus-operator/pkg/versionutil"
OPERATOR_CRDS = "example/prometheus-operator-crd/monitoring.coreos.com_{}.yaml"
OPERATOR_KINDS = ("podmonitors", "servicemonitors", "prometheusrules")


def install_packages() -> None:
    """Installs the packages of missing commands."""
    missing = sorted({package for path, package in NEEDED.items() if not Path(path).exists()})
    if not missing:
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "-qq", "update"], check=True, env=quiet)
    subprocess.run(["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing], check=True, env=quiet)


def _stamp(paths: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _keep(out: Path, stamp: str, fill: Callable[[Path], None]) -> None:
    """Has `fill` make the folder `out`, unless the mark left there says that it is done."""
    mark = out / "stamp"
    if mark.exists() and mark.read_text() == stamp:
        return
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    fill(fresh)
    (fresh / "stamp").write_text(stamp)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)


def _go(*arguments: str, module: Path) -> str:
    """Runs go in a module with pinned versions and returns its output."""
    go = shutil.which("go") or "/usr/local/go/bin/go"
    environ = {**os.environ, "CGO_ENABLED": "0"}
    return subprocess.run([go, *arguments], check=True, cwd=module, env=environ, stdout=subprocess.PIPE, text=True).stdout


def _go_build(out: Path, stamp: str, packages: list[str], ldflags: str, module: Path = GO) -> None:
    """Builds `packages` of a module into the folder `out`."""

    def fill(fresh: Path) -> None:
        flags = ["-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", ldflags]
        _go("build", *flags, "-o", f"{fresh}/", *packages, module=module)

    _keep(out, stamp, fill)


def _copy_crds(out: Path) -> None:
    """Lays the operator's kinds into the folder `out`. Go holds the module to the sum in go.sum."""
    found = _go("list", "-find", "-mod=readonly", "-f", "{{.Module.Dir}}", OPERATOR, module=GO_CRDS)
    for kind in OPERATOR_KINDS:
        shutil.copyfile(Path(found.strip()) / OPERATOR_CRDS.format(kind), out / f"{kind}.yaml")


def _helm_flags(major: str, minor: str) -> str:
    """What helm's own build sets: its version, and that of the Kubernetes that it renders for."""
    helm = "helm.sh/helm/v3"
    flags = [f"-X {helm}/internal/version.version=v{HELM}"]
    for package in ("chartutil", "lint/rules"):
        flags += [f"-X {helm}/pkg/{package}.k8sVersionMajor={major}", f"-X {helm}/pkg/{package}.k8sVersionMinor={minor}"]
    return " ".join(flags)


def _version_flags(version: str) -> str:
    """The version that a command of Kubernetes reports."""
    package, (major, minor, _) = "k8s.io/component-base/version", version.split(".")
    return f"-s -w -X {package}.gitVersion=v{version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"


def build() -> Path:
    """Builds what the cache lacks; returns the cache's folder, with one folder for each of the parts."""
    root = cache()
    with alone_in(root):
        _build(root)
    return root


def build_program(name: str) -> Path:
    """One program of our own, go/`name`, alone: it takes seconds where the modules are there."""
    root = cache()
    with alone_in(root):
        _build_program(root, name)
    return root / name / name


def _build_program(root: Path, name: str) -> None:
    _go_build(root / name, _stamp([*_modules(GO), GO / name / "main.go"]), [f"./{name}"], "-s -w")


def _build(root: Path) -> None:
    modules = _modules(GO)
    major, minor, _ = KUBERNETES.split(".")
    ldflags = _version_flags(KUBERNETES)
    _go_build(root / "kubernetes", _stamp(modules), [f"k8s.io/kubernetes/cmd/{name}" for name in COMMANDS], ldflags)
    _go_build(root / "controllers", _stamp(modules), ["k8s.io/kubernetes/cmd/kube-controller-manager"], ldflags)
    for name in PROGRAMS:
        _build_program(root, name)
    containerd = "github.com/containerd/containerd/v2"
    ldflags = f"-s -w -X {containerd}/version.Version=v{CONTAINERD}"
    packages = [f"{containerd}/cmd/{name}" for name in RUNTIME]
    _go_build(root / "containerd", _stamp(_modules(GO_CONTAINERD)), packages, ldflags, GO_CONTAINERD)
    ldflags = _version_flags(OLDER_KUBELET)
    _go_build(root / "older", _stamp(_modules(GO_OLDER)), ["k8s.io/kubernetes/cmd/kubelet"], ldflags, GO_OLDER)
    ldflags = f"-s -w {_helm_flags(major, minor)}"
    _go_build(root / "helm", _stamp(_modules(GO_HELM)), ["helm.sh/helm/v3/cmd/helm"], ldflags, GO_HELM)
    _keep(root / "crds", _stamp([Path(__file__), *_modules(GO_CRDS)]), _copy_crds)


def _modules(module: Path) -> list[Path]:
    return [module / "go.mod", module / "go.sum"]


if __name__ == "__main__":
    install_packages()
    print(build())
