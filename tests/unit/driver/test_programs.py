import pytest
import structlog.testing

from gpumgr.driver.programs import load_modules


@pytest.mark.parametrize(
    ("command", "seconds", "event", "reason"),
    [
        (("true", "-a", "nvidia"), 30, "kernel_modules_loaded", None),
        (("sh", "-c", "echo module nvidia not found >&2; exit 1"), 30, "kernel_modules_not_loaded", "module nvidia not found"),
        (("/nonexistent/modprobe",), 30, "kernel_modules_not_loaded", "No such file or directory"),
        (("sleep", "600"), 0.05, "kernel_modules_not_loaded", "no end within 0.05 s"),
    ],
)
async def test_kernel_modules_are_loaded_or_the_reason_is_logged(
    command: tuple[str, ...], seconds: float, event: str, reason: str | None
) -> None:
    with structlog.testing.capture_logs() as logs:
        assert await load_modules(command, timeout_seconds=seconds) == (reason is None)
    assert [(line["event"], line["command"], line.get("reason")) for line in logs] == [(event, " ".join(command), reason)]
