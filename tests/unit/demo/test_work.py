"""How the demo's containers sway: within their grant, differently from one another, and the same at every showing."""

import pytest

from gpumgr.demo.work import Habit, habit, use_at

GRANT_BYTES = 5 << 30
NAMES = [f"pod-{number}" for number in range(50)]


def series(habit: Habit, noise: float = 0.0) -> list[tuple[int, int]]:
    return [use_at(habit, tick, memory_bytes=GRANT_BYTES, cores=40, noise=noise) for tick in range(120)]


@pytest.mark.parametrize("noise", [-0.02, 0.02])
def test_nobody_sways_out_of_its_grant(noise: float) -> None:
    for name in NAMES:
        for memory_bytes, percent in series(habit(0, name, "main"), noise):
            assert 0 < memory_bytes <= GRANT_BYTES
            assert 1 <= percent <= 40


def test_everybody_moves() -> None:
    for name in NAMES:
        memory, percents = zip(*series(habit(0, name, "main")), strict=True)
        assert max(memory) - min(memory[4:]) > GRANT_BYTES // 20
        assert len(set(percents)) > 5


def test_a_model_is_loaded_first() -> None:
    memory = [memory_bytes for memory_bytes, _ in series(habit(0, "a", "main"))]
    assert memory[0] < memory[1] < memory[2] < memory[3]


def test_the_same_name_works_in_the_same_way() -> None:
    assert habit(7, "a", "main") == habit(7, "a", "main")
    assert len({habit(7, name, "main") for name in NAMES}) == len(NAMES)
    assert habit(7, "a", "main") != habit(8, "a", "main") != habit(8, "a", "side")
