"""gpu-manager's volume.conf."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.errors import SettingsError
from gpumgr.compat.gpu_manager.driver_files.volume_conf import built_in, load, parse

PATH = Path("/etc/gpu-manager/volume.conf")
BASE = Path("/somewhere")


def document(**more: Any) -> dict[str, Any]:
    volume = {
        "name": "nvidia",
        "base": "/etc/gpu-manager/vdriver",
        "mode": "ro",
        "components": {"binaries": ["nvidia-smi", "gpu-client"], "libraries": ["libcuda.so", "libnvidia-ml.so"]},
    }
    return {"volume": [volume | more]}


def mistakes(content: object) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parse(json.dumps(content).encode(), PATH, BASE)
    return str(caught.value).splitlines()


def test_gpu_managers_own_format() -> None:
    conf = parse(json.dumps(document()).encode(), PATH, BASE)
    (volume,) = conf.volumes
    assert (volume.name, volume.base) == ("nvidia", Path("/etc/gpu-manager/vdriver"))
    assert volume.binaries == ("nvidia-smi", "gpu-client")
    assert volume.libraries == ("libcuda.so", "libnvidia-ml.so")
    assert (conf.warnings, conf.source) == ((), PATH)


def test_unknown_keys_are_warnings_with_their_place() -> None:
    content = document(size=3) | {"version": 1}
    content["volume"][0]["components"]["fonts"] = []
    assert parse(json.dumps(content).encode(), PATH, BASE).warnings == (
        f"{PATH}: version: unknown key, ignored",
        f"{PATH}: volume[0].size: unknown key, ignored",
        f"{PATH}: volume[0].components.fonts: unknown key, ignored",
    )


def test_a_volume_without_a_base_lies_below_the_default() -> None:
    content = document()
    del content["volume"][0]["base"]
    assert parse(json.dumps(content).encode(), PATH, BASE).volumes[0].base == BASE


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], ["the document: allowed: a JSON object"]),
        ({}, ["volume: allowed: a list of at least one volume"]),
        ({"volume": {}}, ["volume: allowed: a list"]),
        ({"volume": ["nvidia"]}, ["volume[0]: allowed: a JSON object", "volume[0].name: allowed: a file name of …"]),
        (document(name="../x"), ["volume[0].name: allowed: a file name of …"]),
        (document(name=".versions"), ["volume[0].name: allowed: a file name of …"]),
        (document(base="relative"), ["volume[0].base: allowed: an absolute path"]),
        (document(base="/a/../b"), ["volume[0].base: allowed: an absolute path"]),
        (document(components=[]), ["volume[0].components: allowed: a JSON object"]),
        (document(components={"binaries": "nvidia-smi"}), ["volume[0].components.binaries: allowed: a list"]),
        (
            document(components={"binaries": ["a", 1], "libraries": ["/lib/libcuda.so"]}),
            [
                "volume[0].components.binaries[1]: allowed: a file name of …",
                "volume[0].components.libraries[0]: allowed: a file name of …",
            ],
        ),
        (
            {"volume": document()["volume"] * 2},
            ["volume[1].name: allowed: a name that no other volume below /etc/gpu-manager/vdriver has"],
        ),
    ],
)
def test_every_mistake_is_named_with_its_place(content: object, said: list[str]) -> None:
    rule = "letters, digits and _ + - ., not beginning with - or ."
    assert mistakes(content) == [f"{PATH}: {line.replace('…', rule)}" for line in said]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"volume": [}', f"{PATH}:1:13: not JSON"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"[" * 200_000, "not valid JSON"),
        (b"1" * 10_000, "not valid JSON"),
    ],
)
def test_what_is_not_json(content: bytes, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse(content, PATH, BASE)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["volume", "name", "base", "components", "binaries", "libraries"]), inner)
    ),
)


@given(_JSON)
def test_any_document_is_understood_or_refused(content: object) -> None:
    with suppress(SettingsError):
        assert parse(json.dumps(content).encode(), PATH, BASE).volumes


def test_without_a_file_the_built_in_lists_hold(tmp_path: Path) -> None:
    conf = load(tmp_path / "none", BASE)
    assert conf == built_in(BASE)
    share, whole = conf.volumes
    assert (share.name, whole.name) == ("nvidia", "origin")
    assert share.libraries == whole.libraries
    assert len(set(share.libraries)) == len(share.libraries)
    gained = {"libnvidia-gpucomp.so", "libcudadebugger.so", "libnvidia-nvvm.so", "libnvidia-allocator.so", "libnvidia-cfg.so"}
    assert gained | {"libnvidia-rtcore.so", "libnvidia-pkcs11.so"} <= set(whole.libraries)
    assert set(share.binaries) - set(whole.binaries) == {"gpu-client"}


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"set vcuda\.volume_conf"):
        load(tmp_path, BASE)
    big = tmp_path / "big"
    big.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(SettingsError, match="more than 1048576 bytes"):
        load(big, BASE)
