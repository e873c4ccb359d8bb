"""What the unit's sandbox keeps from the agent, by the unit that is shipped."""

from pathlib import Path

import pytest

from gpumgr.cli.sandbox import Sandbox, drop_in, quoted
from gpumgr.settings import Settings
from gpumgr.settings.schema import CheckpointSettings, DisplaySettings, EnforcementSettings, ProcessSettings, VcudaSettings

UNIT = (Path(__file__).parents[3] / "systemd" / "gpumgr.service").read_text()
CONFIG = Path("/etc/gpumgr/gpumgr.yaml")


def sandbox(*drop_ins: str, links: dict[str, str] | None = None) -> Sandbox:
    """`links`: path -> what it leads to."""
    return Sandbox(texts=[UNIT, *drop_ins], resolve=lambda path: Path((links or {}).get(str(path), path)))


def test_the_defaults_need_nothing() -> None:
    assert sandbox().read_only(Settings()) == {}
    assert sandbox().read_only(Settings(enforcement=EnforcementSettings(backend="vcuda", injection="cdi"))) == {}
    assert sandbox().advice(Settings(), CONFIG) == []
    assert drop_in({}) == ""


def test_each_folder_that_the_agent_writes_is_looked_at() -> None:
    settings = Settings(
        checkpoint=CheckpointSettings(dir=Path("/data")),
        enforcement=EnforcementSettings(injection="cdi", cdi_dir=Path("/etc/cdi"), run_dir=Path("/srv/run")),
        display=DisplaySettings(socket=Path("/srv/display/x.sock")),
        process=ProcessSettings(lock_path=Path("/data/lock")),
    )
    assert sandbox().read_only(settings) == {
        Path("/data"): "checkpoint.dir",
        Path("/srv/run"): "enforcement.run_dir",
        Path("/etc/cdi"): "enforcement.cdi_dir",
        Path("/srv/display"): "display.socket",
    }
    assert "/data" not in map(str, sandbox("[Service]\nReadWritePaths=-/data /etc/cdi\n").read_only(settings))


def test_what_a_folder_leads_to_counts() -> None:
    linked = Settings(checkpoint=CheckpointSettings(dir=Path("/data")))
    assert sandbox(links={"/data": "/var/lib/gpumgr/data"}).read_only(linked) == {}
    assert sandbox(links={"/var/lib/gpumgr": "/data/gpumgr"}).read_only(Settings()) == {Path("/var/lib/gpumgr"): "checkpoint.dir"}


@pytest.mark.parametrize(
    ("path", "directive"),
    [
        ("/home/ada/x", "ProtectHome"),
        ("/root", "ProtectHome"),
        ("/run/user/0/x", "ProtectHome"),
        ("/var/tmp/x", "PrivateTmp"),
        ("/opt/link", "ProtectHome"),
        ("/rooted", None),
        ("/opt/gpumgr", None),
    ],
)
def test_home_folders_and_tmp_are_hidden(path: str, directive: str | None) -> None:
    assert sandbox(links={"/opt/link": "/root/python"}).hiding(Path(path)) == directive
    assert sandbox("[Service]\nProtectHome=no\n", "PrivateTmp = false\n").hiding(Path(path)) is None


def test_paths_in_lists_are_named_too() -> None:
    (told,) = sandbox().advice(Settings(vcuda=VcudaSettings(driver_roots=(Path("/"), Path("/tmp/driver")))), CONFIG)
    assert told.startswith("move /tmp/driver, ")
    assert told.endswith(
        "set vcuda.driver_roots in /etc/gpumgr/gpumgr.yaml; or let the agent see it: `systemctl edit gpumgr`, with the "
        "lines [Service] and PrivateTmp=no"
    )


def test_the_root_of_all_is_never_made_writable() -> None:
    settings = Settings(process=ProcessSettings(lock_path=Path("/agent.lock")))
    (told,) = sandbox().advice(settings, CONFIG)
    assert told == f"set process.lock_path in {CONFIG} to a path in a folder of its own: the unit keeps / read-only"
    assert drop_in(sandbox().read_only(settings)) == ""


def test_any_path_can_stand_in_a_drop_in() -> None:
    text = drop_in({Path("/a b/100%/$HOME"): "checkpoint.dir"})
    assert 'ReadWritePaths="-/a b/100%%/$HOME"\n' in text
    assert '--parents "/a b/100%%/$$HOME"\n' in text
    assert quoted("/plain") == "/plain"
