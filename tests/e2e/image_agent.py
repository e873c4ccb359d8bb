"""Makes the agent's image without Docker: config/image/Dockerfile is carried out in a root that mmdebstrap makes.

`python -m tests.e2e.image_agent OUT.tar` does it by hand. Roots are kept after each RUN under what led to them, so a changed line of
Python costs an installed wheel and one compressed layer. The same inputs make the same bytes: no times, no order of folders, no caches.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from . import dockerfile, oci
from .alone import alone_in
from .dockerfile import Instruction, Stage
from .oci import Layer
from .places import PROJECT, cache

NAME: Final = "gpumgr.invalid/gpumgr:e2e"
DOCKERFILE: Final = PROJECT / "config" / "image" / "Dockerfile"
#: What the package itself takes a layer for: an upgrade moves this one alone.
AGENT: Final = "opt/gpumgr"
SUITES: Final = {"docker.io/library/debian:12.": "bookworm"}
#: Debian's own list of what a slim image leaves out.
_SLIM: Final = ("doc/*", "groff/*", "info/*", "linda/*", "lintian/*", "locale/*", "man/*")
_MIRROR: Final = "http://deb.debian.org"
_TIME: Final = int(os.environ.get("SOURCE_DATE_EPOCH", "1580601600"))
#: Those that this machine trusts.
AUTHORITIES: Final = Path("/etc/ssl/certs/ca-certificates.crt")

# A RUN sees the network as this machine does: its resolver, and its authorities for pip alone. Both are mounts that end with it.
_RUN: Final = """
root=$1 line=$2; shift 2
mount --make-rprivate /
mount -t proc proc "$root/proc"
for pair in /etc/resolv.conf:/etc/resolv.conf AUTHORITIES:/authorities.crt; do
  test -e "${pair%%:*}" || continue
  touch "$root${pair#*:}"
  mount --bind "${pair%%:*}" "$root${pair#*:}"
done
exec env --ignore-environment "$@" chroot "$root" /bin/sh -c "$line"
""".replace("AUTHORITIES", str(AUTHORITIES))


def _lay_out_context(context: Path) -> str:
    """What the Dockerfile takes from the tree: the lock, and the wheel as it is now. Answers the version."""
    shutil.rmtree(context, ignore_errors=True)
    lock = "config/image/requirements.lock"
    (context / lock).parent.mkdir(parents=True)
    shutil.copyfile(PROJECT / lock, context / lock)
    hatchling = str(Path(sys.executable).with_name("hatchling"))
    _quietly([hatchling, "build", "-t", "wheel", "-d", str(context / "dist")], cwd=PROJECT)
    (wheel,) = (context / "dist").iterdir()
    return wheel.name.split("-")[1]


def build_image(folder: Path | None = None) -> Path:
    """The image as an OCI archive below `folder` (the cache); builds what is missing there. Needs root and mmdebstrap."""
    folder = folder or cache() / "image"
    with alone_in(folder):
        builder = _Builder(folder, {"VERSION": _lay_out_context(folder / "context")})
        root, key = builder.shipped()
        out = folder / f"{key}.tar"
        below = folder / f"{builder.base()}.layer"
        if not out.exists():
            if not below.exists():
                _put(below, Layer.of(oci.root_layer(root, without=AGENT, time_seconds=_TIME)).data)
            layers = [Layer.read(below.read_bytes()), Layer.of(oci.root_layer(root, only=AGENT, time_seconds=_TIME))]
            fresh = out.with_suffix(".new")
            oci.write_archive(fresh, NAME, layers, builder.config(), created_seconds=_TIME)
            fresh.rename(out)
        builder.prune({out, below})
    return out


def base_root() -> Path:
    """The root that the image begins with, in the cache; made if it is missing there. The builder goes on from copies of it."""
    folder = cache() / "image"
    with alone_in(folder):
        return _Builder(folder, {}).debian()


def _put(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.rename(path)


def healthcheck_command() -> list[str]:
    """What Docker would run to see whether a container is well."""
    return dockerfile.healthcheck_command(dockerfile.read_stages(DOCKERFILE, {})[-1])


class _Builder:
    """Carries stages out; every root is a folder named by the hash of all that went into it."""

    def __init__(self, folder: Path, build_args: dict[str, str]) -> None:
        self._folder = folder
        self._stages = {stage.name: stage for stage in dockerfile.read_stages(DOCKERFILE, build_args)}
        self._context = folder / "context"
        self._used: set[Path] = {self._context}

    def shipped(self) -> tuple[Path, str]:
        """The last stage's root, and its key."""
        return self._carry_out("shipped")

    def debian(self) -> Path:
        """The root that the first stage begins with."""
        return self._debian(self._stages["base"].base)[0]

    def base(self) -> str:
        """The key of the root that the last stage begins with."""
        return self._carry_out(self._stages["shipped"].base)[1]

    def config(self) -> dict[str, Any]:
        """What the image says of itself, inherited from stage to stage."""
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        config: dict[str, Any] = {"Labels": {}, "ExposedPorts": {}}
        for each in self._lineage("shipped"):
            match each.verb:
                case "ENV":
                    env |= each.pairs()
                case "LABEL":
                    config["Labels"] |= each.pairs()
                case "EXPOSE":
                    config["ExposedPorts"] |= {f"{port}/tcp": {} for port in each.text.split()}
                case "ENTRYPOINT" | "CMD":
                    config[each.verb.capitalize()] = each.words()
        config["Env"] = [f"{name}={value}" for name, value in env.items()]
        config["Healthcheck"] = {"Test": ["CMD", *dockerfile.healthcheck_command(self._stages["shipped"])]}
        return config

    def prune(self, kept: set[Path]) -> None:
        """Removes what earlier inputs led to."""
        for path in self._folder.iterdir():
            if path.is_dir() and path not in self._used:
                shutil.rmtree(path)
            elif path.is_file() and path not in kept:
                path.unlink()

    def _lineage(self, name: str) -> Iterator[Instruction]:
        stage = self._stages.get(name)
        if stage is not None:
            yield from self._lineage(stage.base)
            yield from stage.instructions

    def _carry_out(self, name: str) -> tuple[Path, str]:
        stage = self._stages.get(name)
        if stage is None:
            return self._debian(name)
        _, key = self._carry_out(stage.base)
        keys = [key]
        for each in stage.instructions:
            keys.append(_digest(keys[-1], each.verb, each.text, json.dumps(dict(each.args)), *self._contents(each)))
        changing = [index for index, each in enumerate(stage.instructions) if each.verb in ("RUN", "COPY")]
        done = max((i for i in changing if self._place(keys[i + 1]).exists()), default=-1)
        self._used.update(self._place(keys[index + 1]) for index in changing)
        root = self._place(keys[done + 1])
        for index in [index for index in changing if index > done]:
            root = self._step(stage, index, root, self._place(keys[index + 1]))
        return root, keys[-1]

    def _step(self, stage: Stage, index: int, before: Path, after: Path) -> Path:
        """One RUN or COPY on a copy of the root before it."""
        fresh = self._folder / "fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        subprocess.run(["cp", "-a", before, fresh], check=True)
        each = stage.instructions[index]
        if each.verb == "COPY":
            self._copy(each, fresh)
        else:
            env = {k: v for earlier in stage.instructions[:index] if earlier.verb == "ENV" for k, v in earlier.pairs().items()}
            _run(fresh, each.text, dict(each.args) | env)
        fresh.rename(after)
        return after

    def _place(self, key: str) -> Path:
        return self._folder / key

    def _sources(self, each: Instruction) -> tuple[Path, list[Path], str]:
        """COPY's root, its files, and where they go."""
        words = each.text.split()
        if words[0].startswith("--from="):
            root, _ = self._carry_out(words.pop(0).removeprefix("--from="))
        else:
            root = self._context
        *patterns, target = words
        return root, [path for pattern in patterns for path in sorted(root.glob(pattern.lstrip("/")))], target

    def _contents(self, each: Instruction) -> list[str]:
        """What a COPY brings, for the key."""
        if each.verb != "COPY":
            return []
        root, paths, _ = self._sources(each)
        if root != self._context:
            return [root.name]
        return [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths]

    def _copy(self, each: Instruction, into: Path) -> None:
        _, paths, target = self._sources(each)
        goal = into / target.lstrip("/")
        if target.endswith("/"):
            goal.mkdir(parents=True, exist_ok=True)
        else:
            goal.parent.mkdir(parents=True, exist_ok=True)
        exactly = [] if target.endswith("/") else ["--no-target-directory"]
        subprocess.run(["cp", "-a", *exactly, *paths, goal], check=True)

    def _debian(self, name: str) -> tuple[Path, str]:
        """The slim root of a Debian release, as its image of that name has it."""
        suite = next((suite for prefix, suite in SUITES.items() if name.startswith(prefix)), None)
        if suite is None:
            raise ValueError(f"{DOCKERFILE}: no root is known for the base {name}")
        excluded = [f"--dpkgopt=path-exclude=/usr/share/{each}" for each in _SLIM]
        kept = "--dpkgopt=path-include=/usr/share/doc/*/copyright"
        sources = [
            f"deb {_MIRROR}/debian {suite} main",
            f"deb {_MIRROR}/debian {suite}-updates main",
            f"deb {_MIRROR}/debian-security {suite}-security main",
        ]
        merged = ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", "--include=usr-is-merged"]
        key = _digest(name, *excluded, kept, *merged, *sources)
        root = self._place(key)
        self._used.add(root)
        if not root.exists():
            fresh = self._folder / "fresh"
            shutil.rmtree(fresh, ignore_errors=True)
            command = [
                "mmdebstrap",
                "--quiet",
                "--mode=root",
                "--variant=minbase",
                *merged,
                *excluded,
                kept,
                suite,
                str(fresh),
                *sources,
            ]
            _quietly(command, {"SOURCE_DATE_EPOCH": str(_TIME)})
            fresh.rename(root)
        return root, key


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _quietly(command: Sequence[str], env: Mapping[str, str] = MappingProxyType({}), cwd: Path | None = None) -> None:
    """Runs a command; what it says is of interest only where it fails."""
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **env}, cwd=cwd,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-4000:]}")


def _run(root: Path, line: str, env: Mapping[str, str]) -> None:
    """One RUN in a root, with mounts of its own that end with it."""
    resolver, authorities = root / "etc" / "resolv.conf", root / "authorities.crt"
    names = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **env}
    if AUTHORITIES.exists():
        names["PIP_CERT"] = f"/{authorities.name}"
    command = ["unshare", "--mount", "--fork", "--pid", "--kill-child", "--", "/bin/sh", "-ec", _RUN, "run", str(root), line]
    _quietly([*command, *(f"{name}={value}" for name, value in names.items())])
    for path in (resolver, authorities):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    shutil.copyfile(build_image(), sys.argv[1])
