"""Gets what the cluster is made of: Debian packages; from Go modules the Kubernetes commands, helm, and the kinds of Prometheus Operator.

`python -m tests.e2e.build` does it ahead of the tests. Cold: minutes; warm: nothing but a look at the cache.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from .alone import alone_in
from .places import GO, GO_CDI, GO_CRDS, GO_HELM, KUBERNETES, cache

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
COMMANDS = ("kube-apiserver", "kube-scheduler", "kubelet", "kubectl")
#: What the chart can ask of Prometheus Operator. The package is any of its module's: files that are not Go come with the module alone.
OPERATOR = "github.com/prometheus-operator/prometheus-operator/pkg/versionutil"
OPERATOR_CRDS = "example/prometheus-operator-crd/monitoring.coreos.com_{}.yaml"
OPERATOR_KINDS = ("podmonitors", "servicemonitors", "prometheusrules")


def install_packages() -> None:
    """Installs the packages whose commands are missing."""
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
    """Runs go in a module whose versions are pinned, and answers what it printed."""
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
    """What helm's own build tells it: its version, and that of the Kubernetes that it renders for."""
    helm = "helm.sh/helm/v3"
    told = [f"-X {helm}/internal/version.version=v{HELM}"]
    for package in ("chartutil", "lint/rules"):
        told += [f"-X {helm}/pkg/{package}.k8sVersionMajor={major}", f"-X {helm}/pkg/{package}.k8sVersionMinor={minor}"]
    return " ".join(told)


def build() -> Path:
    """Builds what the cache lacks; answers the cache's folder: `kubernetes`, `controllers`, `floor`, `cdi`, `helm` and `crds` are in it."""
    root = cache()
    with alone_in(root):
        _build(root)
    return root


def _build(root: Path) -> None:
    modules = [GO / "go.mod", GO / "go.sum"]
    major, minor, _ = KUBERNETES.split(".")
    version = "k8s.io/component-base/version"
    ldflags = f"-s -w -X {version}.gitVersion=v{KUBERNETES} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"
    _go_build(root / "kubernetes", _stamp(modules), [f"k8s.io/kubernetes/cmd/{name}" for name in COMMANDS], ldflags)
    _go_build(root / "controllers", _stamp(modules), ["k8s.io/kubernetes/cmd/kube-controller-manager"], ldflags)
    _go_build(root / "floor", _stamp([*modules, GO / "floor" / "main.go"]), ["./floor"], "-s -w")
    files = [GO_CDI / name for name in ("go.mod", "go.sum", "main.go")]
    _go_build(root / "cdi", _stamp(files), ["."], "-s -w", GO_CDI)
    files = [GO_HELM / name for name in ("go.mod", "go.sum")]
    _go_build(root / "helm", _stamp(files), ["helm.sh/helm/v3/cmd/helm"], f"-s -w {_helm_flags(major, minor)}", GO_HELM)
    files = [Path(__file__), *(GO_CRDS / name for name in ("go.mod", "go.sum"))]
    _keep(root / "crds", _stamp(files), _copy_crds)


if __name__ == "__main__":
    install_packages()
    print(build())
