"""HAMi's list of the devices of a pod: `UUID,type,MiB,cores:` for each device, and `;` after each container."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpumgr.common.units import Amounts
from gpumgr.kube.hami_formats import devices_text, placed_by_hami
from gpumgr.placement.pods import ContainerSpec, NamedGpu
from gpumgr.placement.requests import ReplicaRequest

#: Any text without the separators; HAMi's UUIDs are ASCII.
UUIDS = st.from_regex("(GPU|MIG)-[0-9a-f-]{1,36}", fullmatch=True) | st.text(
    st.characters(exclude_characters=",:;\n", exclude_categories=["Cs"]), min_size=1, max_size=9
)
DEVICES = st.tuples(UUIDS, st.builds(Amounts, st.integers(0, 10**10 - 1), st.integers(0, 10**10 - 1)))
#: The devices of each container of a pod; empty: it requests no GPU.
PODS = st.lists(st.lists(DEVICES, max_size=3), max_size=5)


def specs(pod: list[list[NamedGpu]]) -> list[ContainerSpec]:
    return [
        ContainerSpec(name=f"c{place}", replicas=ReplicaRequest(count=len(devices)) if devices else None)
        for place, devices in enumerate(pod)
    ]


@given(PODS)
@example([])
@example([[]])
def test_what_is_written_is_read(pod: list[list[NamedGpu]]) -> None:
    text = devices_text(pod)
    assert text.count(";") == len(pod), "every container has its entry"
    assert placed_by_hami(text, specs(pod)) == tuple((f"c{place}", tuple(each)) for place, each in enumerate(pod) if each)


@given(PODS, st.lists(st.booleans(), min_size=5, max_size=5))
@pytest.mark.hami_bug("B1: it omits the entries of containers without GPUs")
def test_omitted_entries_of_containers_without_gpus_make_no_difference(pod: list[list[NamedGpu]], drawn: list[bool]) -> None:
    kept = [devices for devices, keep in zip(pod, drawn, strict=False) if devices or keep]
    assert placed_by_hami(devices_text(kept), specs(pod)) == placed_by_hami(devices_text(pod), specs(pod))


#: Texts that are nearly lists.
TEXTS = st.lists(st.sampled_from(["GPU-a", "NVIDIA", "1000", "-1", "16Gi", "30", "", ",", ":", ";", "\n"]), max_size=16).map(
    "".join
)


@given(TEXTS | st.text(max_size=40))
@example("GPU-a,NVIDIA A100,1000,30:;;")
def test_a_text_is_read_completely_or_refused(text: str) -> None:
    """Then writing what was read gives the same text, except for the type."""
    entries = [entry.count(":") for entry in text.split(";")[:-1]]
    containers = [
        ContainerSpec(name=f"c{place}", replicas=ReplicaRequest(count=1) if count else None)
        for place, count in enumerate(entries)
    ]
    try:
        placed = dict(placed_by_hami(text, containers))
    except ValueError:
        return
    written = devices_text(placed.get(each.name, ()) for each in containers)
    digits = re.sub(r",0*([0-9]+)(?=[,:])", r",\1", re.sub(r"(^|[:;])([^,:;]+),[^,:;]*,", r"\1\2,NVIDIA,", text))
    assert written == digits


@given(PODS.filter(any), st.integers(0, 2**32))
def test_any_damage_is_refused_or_changes_only_values(pod: list[list[NamedGpu]], place: int) -> None:
    """A missing separator never gives the devices of another number of containers."""
    text = devices_text(pod)
    place %= len(text)
    damaged = text[:place] + text[place + 1 :]
    try:
        placed = placed_by_hami(damaged, specs(pod))
    except ValueError:
        return
    assert [name for name, _ in placed] == [f"c{number}" for number, each in enumerate(pod) if each]
