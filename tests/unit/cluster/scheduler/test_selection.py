"""Annotations about the choice of GPUs, in both spellings, and what is refused."""

from typing import Any

import pytest

from gpumgr.cluster.scheduler.selection import node_policy_of, policy_of
from gpumgr.common.errors import Refusal
from gpumgr.kube.selection import constraints_of
from gpumgr.placement.requests import Constraints


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, {}),
        ({"gpumgr.io/use-gpu-model": " H100,A100 ,,A100"}, {"use_models": ("A100", "H100")}),
        ({"gpumgr.io/avoid-gpu-model": "T4"}, {"avoid_models": ("T4",)}),
        ({"gpumgr.io/use-gpu-uuid": "GPU-1"}, {"use_uuids": ("GPU-1",)}),
        ({"nvidia.com/use-gpuuuid": " GPU-n-1 ,GPU-x"}, {"use_uuids": ("GPU-n-1", "GPU-x")}),
        ({"gpumgr.io/avoid-gpu-uuid": "GPU-2,GPU-1"}, {"avoid_uuids": ("GPU-1", "GPU-2")}),
        ({"gpumgr.io/same-numa-node": "true"}, {"same_numa_node": True}),
        ({"gpumgr.io/same-numa-node": ""}, {}),
        ({"gpumgr.io/use-gpu-uuid": "  "}, {}),
        (
            {"nvidia.com/use-gputype": "A100", "nvidia.com/nouse-gputype": "T4"},
            {"use_models": ("A100",), "avoid_models": ("T4",)},
        ),
        (
            {"nvidia.com/use-gpuuuid": "GPU-1", "nvidia.com/nouse-gpuuuid": "GPU-1"},
            {"use_uuids": ("GPU-1",), "avoid_uuids": ("GPU-1",)},
        ),
        ({"nvidia.com/numa-bind": "T"}, {"same_numa_node": True}),
        ({"nvidia.com/numa-bind": "0"}, {}),
        ({"nvidia.com/vgpu-mode": "mig"}, {"modes": ("mig",)}),
        ({"nvidia.com/vgpu-mode": " hami-core"}, {"modes": ("hami-core",)}),
        ({"nvidia.com/vgpu-mode": "mig,hami-core"}, {}),
        ({"nvidia.com/vgpu-mode": "migrate"}, {"modes": ("mig",)}),
        # gpumgr's counts
        ({"gpumgr.io/use-gpu-model": "A100", "nvidia.com/use-gputype": "T4"}, {"use_models": ("A100",)}),
        ({"gpumgr.io/use-gpu-model": "", "nvidia.com/use-gputype": "T4"}, {}),
        ({"gpumgr.io/same-numa-node": "false", "nvidia.com/numa-bind": "what"}, {}),
        # HAMi's scheduler refuses none of these
        ({"nvidia.com/numa-bind": "yes"}, {}),
        ({"nvidia.com/numa-bind": "tRuE"}, {}),
        ({"nvidia.com/numa-bind": " true"}, {}),
        ({"nvidia.com/vgpu-mode": "mps"}, {"modes": ()}),
        ({"nvidia.com/vgpu-mode": ""}, {"modes": ()}),
        ({"nvidia.com/use-gputype": "A100\t, A\t10 ,\u200b"}, {"use_models": ("A\t10", "A100", "\u200b")}),
        ({"nvidia.com/nouse-gpuuuid": "GPU-1\n,\x00"}, {"avoid_uuids": ("\x00", "GPU-1")}),
        ({"nvidia.com/use-gpuuuid": "gpu-abc, GPU-1"}, {"use_uuids": ("GPU-1", "gpu-abc")}),
        ({"nvidia.com/nouse-gpuuuid": "GPU-1,MIG-2"}, {"avoid_uuids": ("GPU-1", "MIG-2")}),
        ({"nvidia.com/use-gputype": ",", "nvidia.com/nouse-gputype": " , ", "nvidia.com/nouse-gpuuuid": ","}, {}),
        ({"nvidia.com/use-gputype": " ", "nvidia.com/use-gpuuuid": "\t"}, {}),
    ],
)
def test_constraints(annotations: dict[str, str], expected: dict[str, Any]) -> None:
    assert constraints_of(annotations) == Constraints(**expected)


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("gpumgr.io/same-numa-node", "yes", '\'yes\' is neither "true" nor "false"'),
        ("gpumgr.io/same-numa-node", "tRuE", "neither"),
        ("gpumgr.io/use-gpu-uuid", "0,1", "'0' is no UUID of a GPU"),
        ("gpumgr.io/avoid-gpu-uuid", "GPU-1,MIG-2", "'MIG-2' is no UUID"),
        ("gpumgr.io/use-gpu-model", ",", "contains no text"),
        ("gpumgr.io/avoid-gpu-model", "x" * 97, "at most 96|at most 64 texts of at most 96"),
        ("nvidia.com/use-gputype", ",".join(map(str, range(65))), "at most 64 texts"),
        ("gpumgr.io/use-gpu-model", "A100\nforged", "printable"),
        ("gpumgr.io/use-gpu-model", "\ud800", "printable"),
        ("nvidia.com/nouse-gpuuuid", "x\t" * 49, "at most 64 texts of at most 96 characters"),
    ],
)
def test_a_malformed_constraint_is_refused_with_its_key(key: str, text: str, reason: str) -> None:
    with pytest.raises(Refusal, match=f"^annotation {key}: .*({reason})") as caught:
        constraints_of({key: text})
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, None),
        ({"gpumgr.io/policy": "spread"}, "spread"),
        ({"gpumgr.io/policy": " topology "}, "topology"),
        ({"gpumgr.io/policy": "", "hami.io/gpu-scheduler-policy": "spread"}, "spread"),
        ({"gpumgr.io/policy": "binpack", "hami.io/gpu-scheduler-policy": "spread"}, "binpack"),
        ({"hami.io/gpu-scheduler-policy": "topology-aware", "hami.io/node-scheduler-policy": "binpack"}, "topology"),
        ({"hami.io/node-scheduler-policy": "spread"}, None),
        ({"hami.io/gpu-scheduler-policy": "mutex", "hami.io/node-scheduler-policy": "spread"}, None),
        ({"hami.io/gpu-scheduler-policy": "numa,binpack"}, "binpack"),
        ({"hami.io/gpu-scheduler-policy": "what, spread ,binpack"}, "spread"),
        ({"hami.io/gpu-scheduler-policy": "mutex, topology-aware"}, "topology"),
        ({"hami.io/gpu-scheduler-policy": "binpack,topology-aware"}, "topology"),
        ({"hami.io/gpu-scheduler-policy": " topology-aware"}, "topology"),
        ({"hami.io/gpu-scheduler-policy": " mutex"}, None),
        ({"hami.io/gpu-scheduler-policy": "numa"}, None),
        ({"hami.io/gpu-scheduler-policy": "numa,what"}, None),
        # HAMi takes these for spread
        ({"hami.io/gpu-scheduler-policy": "topology"}, "spread"),  # gpumgr's word under HAMi's key
        ({"hami.io/gpu-scheduler-policy": " binpack"}, "spread"),
        ({"hami.io/gpu-scheduler-policy": "what,,"}, "spread"),
        ({"hami.io/gpu-scheduler-policy": ""}, "spread"),
    ],
)
def test_policy(annotations: dict[str, str], expected: str | None) -> None:
    assert policy_of(annotations) == expected


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, None),
        ({"hami.io/gpu-scheduler-policy": "spread"}, None),
        ({"hami.io/gpu-scheduler-policy": "spread", "hami.io/node-scheduler-policy": "binpack"}, "binpack"),
        ({"hami.io/node-scheduler-policy": "spread"}, "spread"),
        # HAMi takes these for binpack
        ({"hami.io/node-scheduler-policy": "numa,spread"}, "binpack"),
        ({"hami.io/node-scheduler-policy": " spread"}, "binpack"),
        ({"hami.io/node-scheduler-policy": "topology-aware"}, "binpack"),
        ({"hami.io/node-scheduler-policy": ""}, "binpack"),
        # gpumgr's counts for both
        ({"gpumgr.io/policy": "spread", "hami.io/node-scheduler-policy": "binpack"}, None),
        ({"gpumgr.io/policy": " ", "hami.io/node-scheduler-policy": "binpack"}, "binpack"),
    ],
)
def test_policy_among_nodes(annotations: dict[str, str], expected: str | None) -> None:
    assert node_policy_of(annotations) == expected


@pytest.mark.parametrize(
    "text",
    ["slot=1,core=1,memory=3", " memory = 0 ,core=-0, slot=+2", f"slot={'0' * 300}2,core=0,memory={2**63 - 1}"],
)
def test_weights_of_hamis_score_have_no_effect(text: str) -> None:
    assert policy_of({"hami.io/device-scoring-weights": text, "hami.io/gpu-scheduler-policy": "spread"}) == "spread"


@pytest.mark.parametrize(
    "text",
    ["", "slot=1,core=1", "slot=1,core=1,memory", "slot=1,core=1,memory=-3", "slot=1,core=1,core=1", "slot=0,core=0,memory=0",
     "slot=1,core=1,memory=1.5", "slot=1,core=1,memory=3,disk=1", "slot=1=2,core=1,memory=3", "x" * 9999,
     f"slot=1,core=1,memory={2**63}", f"slot=1,core=1,memory={'1' * 9999}"],
)  # fmt: skip
def test_weights_that_hamis_scheduler_refuses_are_refused(text: str) -> None:
    with pytest.raises(Refusal, match=r"^annotation hami.io/device-scoring-weights: .* does not have the form") as caught:
        policy_of({"hami.io/device-scoring-weights": text})
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize("text", ["packed", "topology-aware", "Binpack", "x" * 9999])
def test_an_unknown_policy_is_refused(text: str) -> None:
    with pytest.raises(
        Refusal, match=r"^annotation gpumgr.io/policy: .* is no policy; use least-fragmentation, .*, topology$"
    ) as caught:
        policy_of({"gpumgr.io/policy": text})
    assert len(str(caught.value)) <= 300
