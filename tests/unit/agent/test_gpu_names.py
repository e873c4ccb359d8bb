"""Names of GPUs in requests: one grammar for the agent and the commands."""

import pytest

from gpumgr.agent.gpu_names import KnownGpu, find_gpu
from gpumgr.common.errors import InputError

KNOWN = [
    KnownGpu(name="79f4a7f4", uuid="GPU-79f4a7f4-aaaa-0000-0000-000000000000", index=4),
    KnownGpu(name="0fe1c342", uuid="GPU-0fe1c342-bbbb-0000-0000-000000000000", index=0),
    KnownGpu(name="0fe1d000", uuid="GPU-0fe1d000-cccc-0000-0000-000000000000", index=1),
    KnownGpu(name="12345678", uuid="GPU-12345678-dddd-0000-0000-000000000000"),
]
LOST = {5: "GPU is lost"}


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
    assert find_gpu(text, KNOWN, LOST) == name


@pytest.mark.parametrize("text", ["79", "1234", "04", "-1", "", "GPU", "GPU-", "gpu79f4", "GPU 4", "ffff", "79f4a7f4-aaab"])
def test_a_number_is_always_an_index_and_an_unknown_name_is_refused_with_all_names(text: str) -> None:
    with pytest.raises(
        InputError, match=r"^no GPU of this node is called '.*'; the GPUs of this node are: GPU4 = GPU-79f4a7f4-.*, GPU-12345678-"
    ):
        find_gpu(text, KNOWN, LOST)


def test_a_beginning_must_be_long_enough_and_only_ones() -> None:
    with pytest.raises(
        InputError, match="'79f' is too short for a GPU's UUID: give 4 digits of it or more; the GPUs of this node are: GPU4"
    ):
        find_gpu("79f", KNOWN, LOST)
    with pytest.raises(InputError, match="several GPUs of this node match 'GPU-0fe1'"):
        find_gpu("GPU-0fe1", KNOWN, LOST)


@pytest.mark.parametrize("text", ["5", "GPU5"])
def test_a_gpu_that_can_not_be_described_is_not_readable_and_not_absent(text: str) -> None:
    with pytest.raises(
        InputError, match=r"^GPU5 of this node is not readable: GPU is lost; .*the GPUs of this node are: GPU4 = "
    ):
        find_gpu(text, KNOWN, LOST)


def test_without_gpus_there_are_none() -> None:
    with pytest.raises(InputError, match="no GPU of this node is called '0'; the GPUs of this node are: none"):
        find_gpu("0", (), {})
