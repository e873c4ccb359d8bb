"""gpu-manager's volume.conf."""

import json
from pathlib import Path
from typing import Any

import pytest

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


def test_gpu_managers_own_format() -> None:
    conf = parse(json.dumps(document()).encode(), PATH, BASE)
    (volume,) = conf.volumes
    assert (volume.name, volume.base) == ("nvidia", Path("/etc/gpu-manager/vdriver"))
    assert volume.binaries == ("nvidia-smi", "gpu-client")
    assert volume.libraries == ("libcuda.so", "libnvidia-ml.so")
    assert conf.source == PATH


def test_unknown_keys_have_no_effect() -> None:
    content = document(size=3) | {"version": 1}
    content["volume"][0]["components"]["fonts"] = []
    assert parse(json.dumps(content).encode(), PATH, BASE) == parse(json.dumps(document()).encode(), PATH, BASE)


def test_a_volume_without_a_base_lies_below_the_default() -> None:
    content = document()
    del content["volume"][0]["base"]
    assert parse(json.dumps(content).encode(), PATH, BASE).volumes[0].base == BASE


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "Expected `object`, got `array`"),
        ({}, "Object missing required field `volume`"),
        ({"volume": []}, "Expected `array` of length >= 1 - at `$.volume`"),
        ({"volume": {}}, "Expected `array`, got `object` - at `$.volume`"),
        ({"volume": ["nvidia"]}, "Expected `object`, got `str` - at `$.volume[0]`"),
        (document(name="../x"), "at `$.volume[0].name`"),
        (document(name=".versions"), "at `$.volume[0].name`"),
        (document(name="x\n"), "at `$.volume[0].name`"),
        (document(name="x" * 201), "at `$.volume[0].name`"),
        (document(base="relative"), "at `$.volume[0].base`"),
        (document(base="/a/../b"), "at `$.volume[0].base`"),
        (document(base="/.."), "at `$.volume[0].base`"),
        (document(base="/a\n"), "at `$.volume[0].base`"),
        (document(components=[]), "at `$.volume[0].components`"),
        (document(components={"binaries": "nvidia-smi"}), "at `$.volume[0].components.binaries`"),
        (document(components={"libraries": ["/lib/libcuda.so"]}), ".components.libraries[0]`"),
        ({"volume": document()["volume"] * 2}, "two volumes have the folder /etc/gpu-manager/vdriver/nvidia"),
    ],
)
def test_a_mistake_is_named_with_its_place(content: object, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(json.dumps(content).encode(), PATH, BASE)
    assert str(caught.value).startswith(f"{PATH}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("base", ["/", "/a/..b/c", "/a b/é"])
def test_an_absolute_path_is_a_base(base: str) -> None:
    assert parse(json.dumps(document(base=base)).encode(), PATH, BASE).volumes[0].base == Path(base)


@pytest.mark.parametrize("content", [b'{"volume": [}', b"\xff", b"[" * 200_000, b"1" * 10_000])
def test_what_is_not_json(content: bytes) -> None:
    with pytest.raises(SettingsError, match=r"allowed: gpu-manager's volume\.conf"):
        parse(content, PATH, BASE)


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
