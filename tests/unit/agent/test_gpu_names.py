"""Names of GPUs in an operator's requests."""

import pytest

from gpumgr.agent.maintenance import find_gpu
from gpumgr.common.errors import InputError
from gpumgr.ledger.ids import GpuRegistry

GPUS = GpuRegistry()
for _uuid in ("79f4a7f4-aaaa", "0fe1c342-bbbb", "0fe1d000-cccc", "12345678-dddd"):
    GPUS = GPUS.register(f"GPU-{_uuid}-0000-0000-000000000000", 1024)
INDICES = {"79f4a7f4": 4, "0fe1c342": 0, "0fe1d000": 1}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4", "79f4a7f4"),
        (" GPU4 ", "79f4a7f4"),
        ("gpu0", "0fe1c342"),
        ("79f4", "79f4a7f4"),
        ("GPU-79F4A7F4-AAAA-0000-0000-000000000000", "79f4a7f4"),
        ("0fe1c", "0fe1c342"),
        ("gpu-0fe1d000-c", "0fe1d000"),
        ("12345678", "12345678"),
        ("GPU-1234", "12345678"),
    ],
)
def test_a_gpu_goes_by_index_name_and_the_beginning_of_its_uuid(text: str, name: str) -> None:
    assert find_gpu(text, GPUS.gpus, INDICES).name == name


@pytest.mark.parametrize(
    ("text", "what"),
    [
        *((text, "no GPU of this node is called") for text in ("79", "1234", "04", "-1", "", "GPU", "GPU-", "gpu79f4", "GPU 4")),
        *((text, "no GPU of this node is called") for text in ("ffff", "79f4a7f4-aaab", "79f")),
        ("GPU-0fe1", "several GPUs of this node match"),
    ],
)
def test_a_name_that_is_unknown_short_or_not_one_gpus_is_refused_with_all_names(text: str, what: str) -> None:
    with pytest.raises(
        InputError,
        match=rf"^{what} '.*' \(give .* 4 digits or more of a UUID\); the GPUs of this node are: .*GPU4 = GPU-79f4a7f4-.*",
    ):
        find_gpu(text, GPUS.gpus, INDICES)


def test_without_gpus_there_are_none() -> None:
    with pytest.raises(InputError, match=r"no GPU of this node is called '0' .*; the GPUs of this node are: none"):
        find_gpu("0", (), {})
