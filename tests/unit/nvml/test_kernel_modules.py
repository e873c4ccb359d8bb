import structlog.testing

from gpumgr.nvml.modules import load_modules


async def test_a_command_that_succeeds() -> None:
    with structlog.testing.capture_logs() as logs:
        assert await load_modules(("true", "-a", "nvidia"))
    assert [(line["event"], line["command"]) for line in logs] == [("kernel_modules_loaded", "true -a nvidia")]


async def test_a_command_that_fails_is_reported_with_its_output() -> None:
    with structlog.testing.capture_logs() as logs:
        assert not await load_modules(("sh", "-c", "echo module nvidia not found >&2; exit 1"))
    assert [line["reason"] for line in logs] == ["module nvidia not found"]


async def test_a_command_that_does_not_exist() -> None:
    with structlog.testing.capture_logs() as logs:
        assert not await load_modules(("/nonexistent/modprobe",))
    assert [line["reason"] for line in logs] == ["No such file or directory"]


async def test_a_command_that_never_ends_is_killed() -> None:
    with structlog.testing.capture_logs() as logs:
        assert not await load_modules(("sleep", "600"), timeout_seconds=0.05)
    assert [line["reason"] for line in logs] == ["no end within 0.05 s"]
