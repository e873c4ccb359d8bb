"""The kubelet's checkpoint in all the shapes that kubelets have written."""

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpumgr.common.errors import KubeletError
from gpumgr.common.units import CORE_RESOURCE
from gpumgr.kubelet.plugin import encode_container_response
from gpumgr.kubelet.records import CheckpointEntry, parse_kubelet_checkpoint, read_kubelet_checkpoint
from gpumgr.ledger.answer import ContainerResponse, Mount

RESPONSE = ContainerResponse(
    annotations={"tencent.com/vcuda-core": "20"},
    mounts=(Mount(container_path="/etc/vcuda", host_path="/run/gpumgr/0a1b", read_only=True),),
)


def entry(device_ids: object, answer: bytes | None = None) -> dict[str, Any]:
    return {
        "PodUID": "uid-1",
        "ContainerName": "main",
        "ResourceName": CORE_RESOURCE,
        "DeviceIDs": device_ids,
        "AllocResp": base64.b64encode(encode_container_response(RESPONSE) if answer is None else answer).decode(),
    }


def check(found: Sequence[CheckpointEntry] | None, *device_ids: str, response: ContainerResponse = RESPONSE) -> None:
    """One entry was found, with these ids and this response."""
    (only,) = found or ()
    assert (only.pod_uid, only.container, only.resource, only.device_ids) == ("uid-1", "main", CORE_RESOURCE, device_ids)
    assert only.response() == response


@pytest.mark.parametrize(
    ("device_ids", "read"),
    [
        pytest.param({"-1": ["a-c01", "a-c00"]}, ("a-c01", "a-c00"), id="by NUMA node"),
        pytest.param({"0": ["a-c00"], "1": ["a-c00", "a-c01"]}, ("a-c00", "a-c01"), id="an id on two nodes"),
        pytest.param(["a-c00"], ("a-c00",), id="list, before 1.20"),
        pytest.param(None, (), id="nil"),
        pytest.param({"0": None}, (), id="nil within a node"),
    ],
)
def test_device_ids(device_ids: object, read: tuple[str, ...]) -> None:
    text = json.dumps({"Data": {"PodDeviceEntries": [entry(device_ids)], "RegisteredDevices": {}}, "Checksum": 1})
    check(parse_kubelet_checkpoint(text.encode()), *read)


@pytest.mark.peer_bug("B11: it ends at lists where it expects a map by NUMA node")
def test_the_oldest_shape_has_no_data_level() -> None:
    text = json.dumps({"PodDeviceEntries": [entry(["a-c00"])], "RegisteredDevices": {}})
    check(parse_kubelet_checkpoint(text.encode()), "a-c00")


@pytest.mark.peer_bug("B11: it dereferences the missing data")
@pytest.mark.parametrize("text", ['{"Data":null}', '{"Data":null,"Checksum":0}', "{}", '{"Data":{"PodDeviceEntries":null}}'])
def test_a_checkpoint_without_data_is_empty(text: str) -> None:
    assert parse_kubelet_checkpoint(text.encode()) == ()


def test_an_unreadable_answer_costs_only_itself() -> None:
    text = json.dumps({"Data": {"PodDeviceEntries": [entry(["a-c00"], answer=b"\x0a\x7f")]}})
    check(parse_kubelet_checkpoint(text.encode()), "a-c00", response=ContainerResponse())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Data": 3}', '{"Data": {"PodDeviceEntries": [{}]}}', "\ud800"])
def test_other_content_is_refused(text: str) -> None:
    with pytest.raises(KubeletError, match="checkpoint can't be read"):
        parse_kubelet_checkpoint(text.encode(errors="surrogatepass"))


@pytest.mark.peer_bug("B10: it does not start before the kubelet has written its checkpoint")
async def test_no_file_is_no_checkpoint(tmp_path: Path) -> None:
    assert await read_kubelet_checkpoint(tmp_path / "none") is None


async def test_a_half_written_file_is_read_again(tmp_path: Path) -> None:
    whole = json.dumps({"Data": {"PodDeviceEntries": [entry(["a-c00"])]}}).encode()
    path, fresh = tmp_path / "checkpoint", tmp_path / "fresh"
    path.write_bytes(whole[:40])
    fresh.write_bytes(whole)
    with pytest.raises(KubeletError):
        await read_kubelet_checkpoint(path, attempts=1)
    reading = asyncio.create_task(read_kubelet_checkpoint(path, attempts=1000, retry_seconds=0.001))
    await asyncio.sleep(0)
    fresh.replace(path)
    check(await reading, "a-c00")


async def test_content_that_stays_bad_is_an_error_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(b'{"Data": ')
    with pytest.raises(KubeletError, match=str(path)):
        await read_kubelet_checkpoint(path, attempts=2, retry_seconds=0)


async def test_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KubeletError, match="Is a directory"):
        await read_kubelet_checkpoint(tmp_path)
