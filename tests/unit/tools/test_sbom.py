"""The bill of materials: the packages that the agent runs on, their licences, and the documents about them."""

import json
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tools.sbom import (
    LOCK,
    Package,
    at_run_time,
    is_permissive,
    license_list,
    license_of,
    packages,
    pins,
    sbom,
)


@cache
def made_of() -> tuple[Package, ...]:
    return packages(LOCK.read_text(encoding="utf-8"))


def test_it_runs_on_the_packages_that_the_project_declares_and_what_they_need() -> None:
    names = at_run_time()
    assert {"aiohttp", "betterproto", "grpclib", "hpack", "nvidia-ml-py", "pyyaml"} <= set(names)
    assert not {"pytest", "grpcio", "grpcio-tools", "mypy", "ruff", "playwright", "uv", "hatchling"} & set(names)


@pytest.mark.parametrize("license", ["GPL-3.0-only", "MIT AND Ours", "Other/Proprietary License"])
def test_an_unreviewed_licence_is_refused(license: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "stranger-1.0.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text(f"Metadata-Version: 2.4\nName: stranger\nVersion: 1.0\nLicense-Expression: {license}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError, match=r"^stranger names no known licence: read it, and add"):
        license_of("stranger")


@pytest.mark.parametrize(
    ("expression", "permissive"),
    [("MIT", True), ("Apache-2.0 AND BSD-2-Clause", True), ("MPL-2.0", False), ("MIT OR GPL-3.0-only", False)],
)
def test_an_expression_is_as_strict_as_its_strictest_part(expression: str, permissive: bool) -> None:
    assert is_permissive(expression) is permissive


def test_a_lock_is_read_with_markers_and_comments() -> None:
    text = 'a-b==1.0 ; python_version < "4" \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n    # via c==2\nC.d==2\n'
    read = pins(text)
    assert [(pin.name, pin.version, pin.hashes) for pin in read.values()] == [
        ("a-b", "1.0", ("sha256:00", "sha256:11")),
        ("c-d", "2", ()),
    ]


def test_the_bill_of_materials_holds_together() -> None:
    bill = sbom(made_of(), version="1.2.3", made_at=None)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    references = [part["bom-ref"] for part in bill["components"]]
    ours = bill["metadata"]["component"]["bom-ref"]
    assert ours == "pkg:pypi/gpumgr@1.2.3"
    assert len(set(references)) == len(references) == len(made_of())
    assert [each["ref"] for each in bill["dependencies"]] == [ours, *references]
    assert {name for each in bill["dependencies"] for name in each["dependsOn"]} == set(references)


@pytest.mark.parametrize("made_at", [None, datetime(2026, 1, 2, tzinfo=UTC)])
def test_the_bill_is_what_cyclonedx_defines(made_at: datetime | None) -> None:
    bill = sbom(made_of(), version="1.2.3", made_at=made_at)
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(bill)) is None
    wrong = {**bill, "components": [{**bill["components"][0], "licences": []}]}
    assert "'licences' was unexpected" in str(validator.validate_str(json.dumps(wrong)))


def test_the_same_lock_makes_the_same_bill() -> None:
    first, again = (json.dumps(sbom(made_of(), version="1", made_at=None)) for _ in range(2))
    assert first == again
    dated = sbom(made_of(), version="1", made_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert dated["metadata"]["timestamp"] == "2026-01-02T03:04:05Z"
    assert "timestamp" not in first


def test_the_list_has_every_package_and_its_text() -> None:
    text = license_list(made_of())
    head = text[: text.index("=" * 20)]
    assert len(head.split("\n")) - 2 == len(made_of())
    assert text.count("=" * 100) >= len(made_of())
    assert "Permission is hereby granted, free of charge" in text
