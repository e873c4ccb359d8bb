"""How the demo's containers sway: within their grant, differently from one another, and the same at every showing."""

import pytest

from gpumgr.demo.workload import LoadProfile, load_profile, use_at

GRANT_BYTES = 5 << 30
NAMES = [f"pod-{number}" for number in range(50)]


def series(load_profile: LoadProfile, noise: float = 0.0) -> list[tuple[int, int]]:
    return [use_at(load_profile, tick, memory_bytes=GRANT_BYTES, cores=40, noise=noise) for tick in range(120)]


@pytest.mark.parametrize("noise", [-0.02, 0.02])
def test_no_container_exceeds_its_grant(noise: float) -> None:
    for name in NAMES:
        for memory_bytes, percent in series(load_profile(0, name, "main"), noise):
            assert 0 < memory_bytes <= GRANT_BYTES
            assert 1 <= percent <= 40


def test_the_use_of_every_container_changes() -> None:
    for name in NAMES:
        memory, percents = zip(*series(load_profile(0, name, "main")), strict=True)
        assert max(memory) - min(memory[4:]) > GRANT_BYTES // 20
        assert len(set(percents)) > 5


def test_a_model_is_loaded_first() -> None:
    memory = [memory_bytes for memory_bytes, _ in series(load_profile(0, "a", "main"))]
    assert memory[0] < memory[1] < memory[2] < memory[3]


def test_the_same_name_works_in_the_same_way() -> None:
    assert load_profile(7, "a", "main") == load_profile(7, "a", "main")
    assert len({load_profile(7, name, "main") for name in NAMES}) == len(NAMES)
    assert load_profile(7, "a", "main") != load_profile(8, "a", "main") != load_profile(8, "a", "side")
