"""gpu-manager's volume.conf."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpumgr.common.errors import SettingsError
from gpumgr.compat.gpu_manager.driver_files.volumes import BUILT_IN, load, parse

PATH = Path("/etc/gpu-manager/volume.conf")


def document(**more: Any) -> dict[str, Any]:
    volume = {
        "name": "nvidia",
        "base": "/etc/gpu-manager/vdriver",
        "mode": "ro",
        "components": {"binaries": ["nvidia-smi", "gpu-client"], "libraries": ["libcuda.so", "libnvidia-ml.so"]},
    }
    return {"volume": [volume | more]}


def test_gpu_managers_own_format() -> None:
    conf = parse(json.dumps(document()).encode(), PATH)
    (volume,) = conf.volumes
    assert volume.name == "nvidia"
    assert volume.binaries == ("nvidia-smi", "gpu-client")
    assert volume.libraries == ("libcuda.so", "libnvidia-ml.so")
    assert conf.source == PATH


def test_the_last_volume_of_another_name_is_for_whole_gpus() -> None:
    volumes = [*document()["volume"], *document(name="first")["volume"], *document(name="second", components={})["volume"]]
    found = parse(json.dumps({"volume": volumes}).encode(), PATH).volumes
    assert [(volume.name, bool(volume.libraries)) for volume in found] == [("nvidia", True), ("origin", False)]


def test_unknown_keys_have_no_effect() -> None:
    content = document(size=3, base=7) | {"version": 1}
    content["volume"][0]["components"]["fonts"] = []
    assert parse(json.dumps(content).encode(), PATH) == parse(json.dumps(document()).encode(), PATH)


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
        (document(components=[]), "at `$.volume[0].components`"),
        (document(components={"binaries": "nvidia-smi"}), "at `$.volume[0].components.binaries`"),
        (document(components={"libraries": ["/lib/libcuda.so"]}), ".components.libraries[0]`"),
    ],
)
def test_a_mistake_is_named_with_its_place(content: object, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(json.dumps(content).encode(), PATH)
    assert str(caught.value).startswith(f"{PATH}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("content", [b'{"volume": [}', b"\xff", b"[" * 200_000, b"1" * 10_000])
def test_what_is_not_json(content: bytes) -> None:
    with pytest.raises(SettingsError, match=r"allowed: gpu-manager's volume\.conf"):
        parse(content, PATH)


def test_without_a_file_the_built_in_lists_hold(tmp_path: Path) -> None:
    conf = load(tmp_path / "none")
    assert conf == BUILT_IN
    share, whole = conf.volumes
    assert (share.name, whole.name) == ("nvidia", "origin")
    assert share.libraries == whole.libraries
    assert len(set(share.libraries)) == len(share.libraries)
    gained = {"libnvidia-gpucomp.so", "libcudadebugger.so", "libnvidia-nvvm.so", "libnvidia-allocator.so", "libnvidia-cfg.so"}
    assert gained | {"libnvidia-rtcore.so", "libnvidia-pkcs11.so"} <= set(whole.libraries)
    assert set(share.binaries) - set(whole.binaries) == {"gpu-client"}


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"set vcuda\.volume_conf"):
        load(tmp_path)
    big = tmp_path / "big"
    big.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(SettingsError, match="more than 1048576 bytes"):
        load(big)
