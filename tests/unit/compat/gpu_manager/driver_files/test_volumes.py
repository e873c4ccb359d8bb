"""gpu-manager's volume.conf, and which files and links a volume is to have."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpumgr.common.elf import Elf
from gpumgr.common.errors import SettingsError
from gpumgr.common.files import FileIdentity
from gpumgr.compat.gpu_manager.driver_files.volumes import (
    BUILT_IN,
    Overlay,
    Source,
    VolumePlan,
    load,
    parse,
    plan_volume,
    version_of,
)

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


# -- plans ---------------------------------------------------------------------------------------------------------------------

DRIVER = "535.54.03"


def library(name: str, *, folder: str = "/lib64", machine: str = "x86-64", size: int = 1, **elf: Any) -> Source:
    return Source(
        name=name, path=Path(folder, name), identity=FileIdentity(1, 1, size, 0), mode=0o100644, elf=Elf(machine=machine, **elf)
    )


def program(name: str, machine: str | None = "x86-64") -> Source:
    elf = Elf(machine=machine) if machine else None
    return Source(name=name, path=Path("/usr/bin", name), identity=FileIdentity(1, 1, 1, 0), mode=0o100755, elf=elf)


SHIM = Source(
    name="libcuda-control.so", path=Path("/opt/shim.so"), identity=FileIdentity(1, 2, 2, 0), mode=0o755, sha256="ab" * 32
)
CLIENT = Source(name="gpu-client", path=Path("/opt/client"), identity=FileIdentity(1, 3, 3, 0), mode=0o755, sha256="cd" * 32)
CUDA = library(f"libcuda.so.{DRIVER}", soname="libcuda.so.1")
ML = library(f"libnvidia-ml.so.{DRIVER}", soname="libnvidia-ml.so.1")
CUDA_32 = library(f"libcuda.so.{DRIVER}", folder="/lib32", machine="i386", soname="libcuda.so.1")


def draw(*libraries: Source, binaries: tuple[Source, ...] = (), share: bool = False, machine: str = "x86-64") -> VolumePlan:
    return plan_volume(
        "nvidia" if share else "origin",
        libraries=libraries,
        binaries=binaries,
        machine=machine,
        driver_version=DRIVER,
        overlay=Overlay(shim=SHIM, client=CLIENT) if share else None,
    )


def files(drawn: VolumePlan) -> dict[str, str]:
    return {target: str(source.path) for target, source in drawn.files.items()}


def test_a_whole_volume_has_the_driver_as_it_is() -> None:
    drawn = draw(CUDA, CUDA_32, binaries=(program("nvidia-smi"),))
    assert files(drawn) == {
        f"lib64/libcuda.so.{DRIVER}": f"/lib64/libcuda.so.{DRIVER}",
        f"lib/libcuda.so.{DRIVER}": f"/lib32/libcuda.so.{DRIVER}",
        "bin/nvidia-smi": "/usr/bin/nvidia-smi",
    }
    assert drawn.links == {
        f"{folder}/{name}": f"libcuda.so.{DRIVER}" for folder in ("lib", "lib64") for name in ("libcuda.so.1", "libcuda.so")
    }


def test_a_share_volume_has_the_shim_over_64_bit_libraries_only() -> None:
    drawn = draw(CUDA, ML, CUDA_32, share=True)
    assert files(drawn) == {
        "lib64/libcuda-control.so": "/opt/shim.so",
        "bin/gpu-client": "/opt/client",
        f"lib64/libcuda.so.{DRIVER}": f"/lib64/libcuda.so.{DRIVER}",
        f"lib64/libnvidia-ml.so.{DRIVER}": f"/lib64/libnvidia-ml.so.{DRIVER}",
        f"lib/libcuda.so.{DRIVER}": f"/lib32/libcuda.so.{DRIVER}",
    }
    shim = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so")
    real = {"lib/libcuda.so.1": f"libcuda.so.{DRIVER}", "lib/libcuda.so": f"libcuda.so.{DRIVER}"}
    assert drawn.links == {f"lib64/{name}": "libcuda-control.so" for name in shim} | real


def test_the_real_libraries_have_the_drivers_version_in_their_name() -> None:
    drawn = draw(library("libcuda.so.1", soname="libcuda.so.1"), share=True)
    assert files(drawn)[f"lib64/libcuda.so.{DRIVER}"] == "/lib64/libcuda.so.1"
    assert drawn.links["lib64/libcuda.so.1"] == "libcuda-control.so"


def test_another_drivers_library_never_stands_behind_the_shim() -> None:
    old = library("libcuda.so.470.82.01", soname="libcuda.so.1")
    drawn = draw(old, CUDA, share=True)
    assert files(drawn)[f"lib64/libcuda.so.{DRIVER}"] == f"/lib64/libcuda.so.{DRIVER}"


def test_the_loaded_drivers_library_has_the_links() -> None:
    drawn = draw(library("libcuda.so.470.82.01", soname="libcuda.so.1"), CUDA)
    assert "lib64/libcuda.so.470.82.01" in drawn.files
    assert drawn.links["lib64/libcuda.so.1"] == f"libcuda.so.{DRIVER}"


def test_arm64_is_a_machine_like_others() -> None:
    drawn = draw(
        library(f"libcuda.so.{DRIVER}", machine="aarch64", soname="libcuda.so.1"),
        library(f"libnvidia-cfg.so.{DRIVER}", machine="arm", soname="libnvidia-cfg.so.1"),
        library(f"libnvidia-fbc.so.{DRIVER}", machine="x86-64"),
        machine="aarch64",
    )
    assert set(files(drawn)) == {f"lib64/libcuda.so.{DRIVER}", f"lib/libnvidia-cfg.so.{DRIVER}"}


@pytest.mark.parametrize("name", ["libEGL.so.1.1.0", "libGLESv1_CM.so.1.2.0", "libGLESv2.so.2.1.0", "libGL.so.1.7.0"])
def test_mesas_libraries_are_not_the_drivers(name: str) -> None:
    assert not draw(library(name, needed=("libglapi.so.0",))).files
    for needed in (f"libnvidia-glcore.so.{DRIVER}", f"libnvidia-eglcore.so.{DRIVER}", "libGLdispatch.so.0"):
        assert f"lib64/{name}" in draw(library(name, needed=(needed,))).files


def test_their_namesakes_are_no_mesa() -> None:
    assert len(draw(library("libGLX.so.0"), library("libEGL_nvidia.so.535.54.03"), library("libGLdispatch.so.0")).files) == 3


def test_glx_has_a_link_for_indirect_rendering() -> None:
    drawn = draw(library(f"libGLX_nvidia.so.{DRIVER}", soname="libGLX_nvidia.so.0"))
    assert set(drawn.links) == {"lib64/libGLX_nvidia.so.0", "lib64/libGLX_nvidia.so", "lib64/libGLX_indirect.so.0"}


def test_a_script_is_a_program_and_no_library() -> None:
    script = Source(name="libcuda.so.old", path=Path("/x"), identity=FileIdentity(1, 1, 1, 0), mode=0o644)
    drawn = draw(script, binaries=(program("nvidia-debugdump", None), program("nvidia-smi", "aarch64")))
    assert files(drawn) == {"bin/nvidia-debugdump": "/usr/bin/nvidia-debugdump"}


def test_one_name_is_given_once() -> None:
    drawn = draw(library("libnvcuvid.so.1"), library("libnvcuvid.so.1", folder="/other"))
    assert files(drawn) == {"lib64/libnvcuvid.so.1": "/lib64/libnvcuvid.so.1"}


def test_a_file_displaces_a_link() -> None:
    drawn = draw(library("libnvoptix.so.2", soname="libnvoptix.so.1"), library("libnvoptix.so.1"))
    assert "lib64/libnvoptix.so.1" in drawn.files
    assert drawn.links == {"lib64/libnvoptix.so": "libnvoptix.so.2"}


@pytest.mark.parametrize("soname", ["../../etc/passwd", "..", "x" * 300])
def test_a_soname_cannot_lead_out_of_its_folder(soname: str) -> None:
    drawn = draw(library("libnvcuvid.so.1", soname=soname))
    assert drawn.links == {}


def test_only_the_given_shim_and_client_are_taken() -> None:
    drawn = draw(CUDA, library("libcuda-control.so"), binaries=(program("gpu-client"),), share=True)
    assert files(drawn)["lib64/libcuda-control.so"] == "/opt/shim.so"
    assert files(drawn)["bin/gpu-client"] == "/opt/client"


def test_the_same_content_has_the_same_version() -> None:
    assert draw(CUDA, ML).version == draw(CUDA, ML).version
    others = {draw(CUDA).version, draw(CUDA, ML, share=True).version, draw(CUDA, library(ML.name, size=2)).version}
    assert len(others | {draw(CUDA, ML).version}) == 4


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("libcuda.so.470.82.01", "470.82.01"),
        ("libcuda.so.418.67", "418.67"),
        ("libcuda.so.1", None),
        ("libcuda.so", None),
        ("libcuda.so.1.backup", None),
    ],
)
def test_the_drivers_version_in_a_librarys_name(name: str, version: str | None) -> None:
    assert version_of(name) == version
