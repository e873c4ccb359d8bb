"""vcuda.config: names, and what does not fit. A C program reads the numbers in the component tests."""

from dataclasses import replace

import pytest

from gpumgr.common.errors import Refusal
from gpumgr.compat.gpu_manager.vcuda.files import pack_config
from tests.shares import TWO_GPUS
from tests.unit.compat.gpu_manager.vcuda.tenants import ALLOCATION, GPU, TENANT


def text_at(config: bytes, offset: int) -> str:
    return config[offset : config.index(b"\0", offset)].decode()


def test_unknown_names_are_replaced_by_the_allocation_id() -> None:
    config = pack_config(replace(TENANT, pod_uid=None, container=None, gpus=(replace(GPU, bus_id=None),)))
    assert (text_at(config, 0), text_at(config, 4096), text_at(config, 8192)) == (ALLOCATION, ALLOCATION, "")


def test_names_may_fill_their_fields() -> None:
    config = pack_config(replace(TENANT, pod_uid="u" * 47, container="c" * 4095, gpus=(replace(GPU, bus_id="b" * 15),)))
    assert (text_at(config, 0), text_at(config, 4096), text_at(config, 8192)) == ("u" * 47, "c" * 4095, "b" * 15)


@pytest.mark.parametrize(
    ("tenant", "sentence"),
    [
        (replace(TENANT, pod_uid="u" * 48), "the pod's uid has 48 bytes and vcuda.config holds 47"),
        (replace(TENANT, container="ü" * 2048), "the container's name has 4096 bytes and vcuda.config holds 4095"),
        (
            replace(TENANT, gpus=(replace(GPU, bus_id="00000000:18:00.0"),)),
            "the GPU's PCI id has 16 bytes and vcuda.config holds 15",
        ),
        (replace(TENANT, container="a\0b"), "the container's name has a zero byte"),
        (
            replace(TENANT, gpus=TWO_GPUS),
            "vcuda limits a container on one GPU only, and .* shares 2 GPUs: request a share of one GPU",
        ),
    ],
)
def test_names_that_do_not_fit_are_refused(tenant: object, sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence):
        pack_config(tenant)  # type: ignore[arg-type]
