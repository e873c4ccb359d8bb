"""How the demo's containers sway: within their grant, differently from one another, and the same at every showing."""

from gpumgr.sim.demo.workload import use_at

GRANT_BYTES = 5 << 30
NAMES = [f"pod-{number}" for number in range(50)]


def series(name: str) -> list[tuple[int, int]]:
    return [use_at(name, tick, memory_bytes=GRANT_BYTES, cores=40) for tick in range(120)]


def test_no_container_exceeds_its_grant() -> None:
    for name in NAMES:
        for memory_bytes, percent in series(name):
            assert 0 < memory_bytes <= GRANT_BYTES
            assert 1 <= percent <= 40


def test_the_use_of_every_container_changes_in_its_own_way_from_the_load_of_its_model_on() -> None:
    for name in NAMES:
        memory, percents = zip(*series(name), strict=True)
        assert memory[0] < memory[1] < memory[2] < memory[3]
        assert max(memory) - min(memory[4:]) > GRANT_BYTES // 20
        assert len(set(percents)) > 5
    assert len({tuple(series(name)) for name in NAMES}) == len(NAMES)
