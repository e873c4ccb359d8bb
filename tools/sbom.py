"""The packages that the agent needs at run time: `python -m tools.sbom` (make sbom) writes two files into build/.

sbom.cdx.json    a CycloneDX 1.6 bill of materials: each package with its version, licence, hashes and dependencies
licenses.txt     the same packages with their licences, and the texts of the licences as the packages ship them

Tools of development are left out. Versions and hashes are read from requirements.lock, licences and dependencies from the installed
packages, so the environment must match the lock. The same lock gives the same files: they have no date unless SOURCE_DATE_EPOCH is set.
"""

import json
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import Distribution, distribution
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from gpumgr import __version__
from tools import PROJECT

LOCK: Final = PROJECT / "requirements.lock"
OURS: Final = "gpumgr"
OUR_LICENSE: Final = "Apache-2.0"

#: SPDX ids of licences that only require that notices are kept.
PERMISSIVE: Final = frozenset({"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "PSF-2.0", "Zlib"})
#: All licences that a package may have.
KNOWN: Final = PERMISSIVE | {"MPL-2.0"}
#: Accepted packages with licences that are not permissive, and why they are accepted.
ACCEPTED: Final[Mapping[str, str]] = {
    "certifi": "MPL-2.0: a list of certificates, shipped unchanged; its licence ends at its own files"
}
#: Licence in metadata older than SPDX expressions -> SPDX id.
_SAID: Final[Mapping[str, str]] = {
    "Apache 2.0": "Apache-2.0",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
}
#: Licences of packages with vague metadata, read by hand. All of dateutil is under the BSD licence, its newer parts also under Apache's.
_READ: Final[Mapping[str, str]] = {"nvidia-ml-py": "BSD-3-Clause", "python-dateutil": "BSD-3-Clause"}
_LICENSE_FILE: Final = re.compile(r"(licen[cs]e|copying|notice)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One package of a lock. `hashes` ("sha256:...") are the hashes of all files of this version in the index."""

    name: NormalizedName
    version: str
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A pin with metadata of the installed package. `license` is an SPDX expression, `needs` are its dependencies on this machine."""

    pin: Pin
    license: str
    needs: tuple[NormalizedName, ...]


def pins(text: str) -> dict[NormalizedName, Pin]:
    """All pins of a lock that uv or pip-compile wrote with hashes."""
    lines = text.replace("\\\n", " ").splitlines()
    return {pin.name: pin for pin in map(_pin, filter(_is_pin, lines))}


def _is_pin(line: str) -> bool:
    return "==" in line and not line.lstrip().startswith("#")


def _pin(line: str) -> Pin:
    requirement, *hashes = re.split(r"\s+--hash=", line.strip())
    name, _, version = requirement.partition(";")[0].partition("==")
    return Pin(name=canonicalize_name(name.strip()), version=version.strip(), hashes=tuple(text.split()[0] for text in hashes))


def needs(name: str, extras: Collection[str] = ("",)) -> tuple[NormalizedName, ...]:
    """The dependencies of an installed package on this machine, by its markers."""
    asked = map(Requirement, distribution(name).requires or ())
    wanted = [each for each in asked if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras)]
    return tuple(sorted(canonicalize_name(each.name) for each in wanted))


def at_run_time() -> tuple[NormalizedName, ...]:
    """The direct and indirect dependencies of gpumgr."""
    found: dict[NormalizedName, None] = {}
    waiting = list(needs(OURS))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = None
            waiting += needs(name)
    return tuple(sorted(found))


def license_of(name: str) -> str:
    """An SPDX expression. Raises LookupError if the package names no known licence."""
    metadata = distribution(name).metadata
    named: list[str] = [
        *metadata.get_all("License-Expression", []),
        *filter(None, [_READ.get(name)]),
        *metadata.get_all("License", []),
        *metadata.get_all("Classifier", []),
    ]
    for text in named:
        expression = _SAID.get(text, text)
        if KNOWN.issuperset(_ids(expression)):
            return expression
    raise LookupError(f"{name} names no known licence: read it, and add it to tools/sbom.py")


def is_permissive(expression: str) -> bool:
    """Whether all licences in the expression are permissive."""
    return PERMISSIVE.issuperset(_ids(expression))


def _ids(expression: str) -> set[str]:
    """SPDX ids in an expression without parentheses."""
    return set(expression.split()) - {"AND", "OR"}


def packages(lock: str) -> tuple[Package, ...]:
    """The packages of `at_run_time`, by name. Raises KeyError for a package that the lock lacks."""
    locked = pins(lock)
    return tuple(Package(pin=locked[name], license=license_of(name), needs=needs(name)) for name in at_run_time())


def sbom(made_of: Sequence[Package], *, version: str, made_at: datetime | None) -> dict[str, Any]:
    """A CycloneDX 1.6 document (https://cyclonedx.org/docs/1.6/json/)."""
    me = {
        "type": "application",
        "bom-ref": _purl(OURS, version),
        "name": OURS,
        "version": version,
        "licenses": [{"expression": OUR_LICENSE}],
        "purl": _purl(OURS, version),
    }
    refs = {each.pin.name: _purl(each.pin.name, each.pin.version) for each in made_of}
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": me},
        "components": [_component(each) for each in made_of],
        "dependencies": [
            {"ref": _purl(OURS, version), "dependsOn": [refs[name] for name in needs(OURS)]},
            *({"ref": refs[each.pin.name], "dependsOn": [refs[name] for name in each.needs]} for each in made_of),
        ],
    }
    if made_at is not None:
        document["metadata"] = {"timestamp": made_at.strftime("%Y-%m-%dT%H:%M:%SZ"), "component": me}
    # The same content gives the same serial number.
    return document | {"serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True)).urn}


def _component(package: Package) -> dict[str, Any]:
    pin = package.pin
    hashes = [{"alg": "SHA-256", "content": text.removeprefix("sha256:")} for text in pin.hashes]
    return {
        "type": "library",
        "bom-ref": _purl(pin.name, pin.version),
        "name": pin.name,
        "version": pin.version,
        "scope": "required",
        "licenses": [{"expression": package.license}],
        "purl": _purl(pin.name, pin.version),
        "externalReferences": [
            {"type": "distribution", "url": f"https://pypi.org/project/{pin.name}/{pin.version}/", "hashes": hashes}
        ],
    }


def _purl(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def license_list(made_of: Sequence[Package]) -> str:
    """Names and licences, then the texts."""
    lines = [f"{each.pin.name} {each.pin.version}".ljust(32) + each.license for each in made_of]
    texts = [f"{'=' * 100}\n{each.pin.name} {each.pin.version}\n\n{text}" for each in made_of for text in _texts(each.pin.name)]
    return "\n".join([*lines, "", *texts])


def _texts(name: str) -> Iterator[str]:
    """The texts of the licence files in the package's metadata, or a sentence if it ships none."""
    found: Distribution = distribution(name)
    files = [file for file in found.files or () if ".dist-info" in str(file) and _LICENSE_FILE.match(file.name)]
    for file in files:
        yield file.read_text(encoding="utf-8")
    if not files:
        yield f"It ships no licence file; its metadata say: {license_of(name)}.\n"


def main() -> None:
    made_of = packages(LOCK.read_text(encoding="utf-8"))
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    made_at = datetime.fromtimestamp(int(epoch), UTC) if epoch else None
    build = PROJECT / "build"
    build.mkdir(exist_ok=True)
    document = sbom(made_of, version=__version__, made_at=made_at)
    (build / "sbom.cdx.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (build / "licenses.txt").write_text(license_list(made_of), encoding="utf-8")
    print(f"build/sbom.cdx.json and build/licenses.txt: {len(made_of)} packages")


if __name__ == "__main__":
    main()
