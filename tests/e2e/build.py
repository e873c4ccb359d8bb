"""Gets what the cluster is made of: Debian packages, and the Kubernetes commands from Go modules.

`python -m tests.e2e.build` does it ahead of the tests. Cold: minutes; warm: nothing but a look at the cache.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from .places import GO, GO_CDI, GO_HELM, KUBERNETES, cache

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
}
HELM = "3.20.2"
COMMANDS = ("kube-apiserver", "kube-scheduler", "kubelet", "kubectl")


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


def _go_build(out: Path, stamp: str, packages: list[str], ldflags: str, module: Path = GO) -> None:
    """Builds `packages` of a module into the folder `out`, unless the mark left there says that it is done."""
    mark = out / "stamp"
    if mark.exists() and mark.read_text() == stamp:
        return
    go = shutil.which("go") or "/usr/local/go/bin/go"
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    command = [go, "build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", ldflags, "-o", f"{fresh}/"]
    subprocess.run([*command, *packages], check=True, cwd=module, env={**os.environ, "CGO_ENABLED": "0"})
    (fresh / "stamp").write_text(stamp)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)


def _helm_flags(major: str, minor: str) -> str:
    """What helm's own build tells it: its version, and that of the Kubernetes that it renders for."""
    helm = "helm.sh/helm/v3"
    told = [f"-X {helm}/internal/version.version=v{HELM}"]
    for package in ("chartutil", "lint/rules"):
        told += [f"-X {helm}/pkg/{package}.k8sVersionMajor={major}", f"-X {helm}/pkg/{package}.k8sVersionMinor={minor}"]
    return " ".join(told)


def build() -> Path:
    """Builds what the cache lacks; answers the cache's folder with `kubernetes/`, `controllers/`, `floor/`, `cdi/` and `helm/` in it."""
    root = cache()
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
    return root


if __name__ == "__main__":
    install_packages()
    print(build())
