"""The public placement cases, one test each."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpumgr.common.errors import Refusal
from gpumgr.placement.devices import Topology
from gpumgr.placement.select import GpuCapacity, Placement, place
from tests.topologies import topology_from_matrix
from tests.unit.placement.nodes import capacities

CASES = json.loads((Path(__file__).parents[2] / "data" / "conformance" / "placement.json").read_text())
TOPOLOGIES = {name: topology_from_matrix(value["matrix"]) for name, value in CASES["topologies"].items()}


def case_name(case: dict[str, Any]) -> str:
    return f"{case['topology']}-{case['cores']}-without-{'.'.join(map(str, case['occupied'])) or 'none'}"


@pytest.mark.parametrize("case", CASES["cases"], ids=case_name)
def test_case(case: dict[str, Any]) -> None:
    topology = TOPOLOGIES[case["topology"]]
    gpus = capacities(len(topology), case["occupied"])
    if case["expect"] is None:
        with pytest.raises(Refusal) as caught:
            place(topology, gpus, cores=case["cores"], memory_blocks=0)
        assert caught.value.code == "no_fit"
    else:
        placement = place(topology, gpus, cores=case["cores"], memory_blocks=0)
        assert (placement.evaluator, list(placement.gpus)) == (case["evaluator"], case["expect"])


@pytest.mark.parametrize("sequence", CASES["share_sequences"], ids=lambda sequence: str(sequence["topology"]))
def test_share_sequence(sequence: dict[str, Any]) -> None:
    topology = TOPOLOGIES[sequence["topology"]]
    blocks = sequence["memory_blocks_per_gpu"]
    free = dict.fromkeys(range(len(topology)), (100, blocks))
    for step in sequence["steps"]:
        placement = ask(topology, free, blocks, step["cores"], step["memory_blocks"])
        assert (list(placement.gpus) if placement else None) == step["expect"]
        if placement:
            cores, memory = free[placement.gpus[0]]
            free[placement.gpus[0]] = (cores - step["cores"], memory - step["memory_blocks"])
    last = ask(topology, free, blocks, sequence["then"]["cores"], 0)
    assert last is not None
    assert (last.evaluator, list(last.gpus)) == (sequence["then"]["evaluator"], sequence["then"]["expect"])


def ask(topology: Topology, free: dict[int, tuple[int, int]], blocks: int, cores: int, memory: int) -> Placement | None:
    gpus = [
        GpuCapacity(index=index, cores_free=c, memory_blocks_free=m, entirely_free=(c, m) == (100, blocks))
        for index, (c, m) in free.items()
    ]
    try:
        return place(topology, gpus, cores=cores, memory_blocks=memory)
    except Refusal:
        return None
