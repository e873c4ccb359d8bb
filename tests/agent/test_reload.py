"""Settings that change under the running agent."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import yaml

from gpumgr.sim.demo.node import SimulatedNode
from tests.background import until

from .stage import app, asked, events, introduce, run, running, stage, until_sampled


def replace(path: Path, text: str) -> None:
    """Replaces the file atomically, so that no reader finds a part of it."""
    path.with_name("new").write_text(text)
    path.with_name("new").rename(path)


def rewritten(path: Path, **sections: Mapping[str, object]) -> str:
    """The file's text with these settings over its own."""
    document = yaml.safe_load(path.read_text())
    return yaml.safe_dump(document | {name: {**document.get(name, {}), **keys} for name, keys in sections.items()})


def move_link(folder: Path, name: str, text: str) -> None:
    """A new version of a ConfigMap's mount in `folder`, as the kubelet creates it."""
    (folder / name).mkdir()
    (folder / name / "gpumgr.yaml").write_text(text)
    (folder / "..data_tmp").symlink_to(name)
    os.rename(folder / "..data_tmp", folder / "..data")


async def settings_entries(node: SimulatedNode) -> list[tuple[str, str]]:
    """The entries on settings in the agent's history, oldest first."""
    entries = await asked(node, "/api/history", limit="50")
    return [(entry["code"], entry["why"]) for entry in reversed(entries) if entry["what"] == "config"]


async def test_sighup_applies_what_can_be_and_names_the_rest(folder: Path) -> None:
    path = folder / "gpumgr.yaml"
    async with running(folder) as node:
        await run(node, "before", app(30, 4))
        text = rewritten(
            path,
            placement={"share_mode": False},
            metrics={"hami_names": True},
            kubernetes={"node_labels": ["team=blue"]},
            mps={"idle_seconds": 7},
            log={"level": "warning"},
        )
        replace(path, text)
        node.agent.signal(signal.SIGHUP)
        line = await node.agent_log.until("config_reloaded")
        assert line["applied"] == ["kubernetes.node_labels", "placement.share_mode", "metrics.hami_names", "log.level"]
        assert (line["level"], line["needs_restart"]) == ("warning", ["mps.idle_seconds"])
        share = node.pod("share", app(30, 4))
        await introduce(node, share)
        assert (await node.run(share)).phase == "Failed"
        assert "share" in (await node.agent_log.until("refused", container="main"))["reason"]
        await run(node, "whole", app(100))
        api = node.api
        assert api is not None
        while "GPUDeviceCoreLimit" not in {name for name, _ in await node.metrics()}:  # noqa: ASYNC110 (it is drawn once a period)
            await asyncio.sleep(0.05)
        await until(lambda: api.written.labels.get("team") == "blue")
        assert (await settings_entries(node))[0][0] == "reloaded"
        assert not [line for line in node.agent_log.lines[node.agent_log.lines.index(line) :] if line["level"] == "info"]
        assert node.disagreements() == []


async def test_a_config_map_that_changes_is_noticed_and_a_bad_one_keeps_the_old_settings(folder: Path) -> None:
    path, mount = folder / "gpumgr.yaml", folder / "mount"
    async with stage(folder) as node:
        mount.mkdir()
        move_link(mount, "..1", path.read_text())
        path.unlink()
        path.symlink_to("mount/..data/gpumgr.yaml")
        await node.start_agent()
        move_link(mount, "..2", rewritten(path, placement={"policy": "spread"}))
        assert (await node.agent_log.until("config_reloaded"))["applied"] == ["placement.policy"]
        for name in ("a", "b"):
            await run(node, name, app(30, 4))
        assert len({tuple(a.gpus) for a in node.ledger().allocations.values()}) == 2
        move_link(mount, "..3", rewritten(path, placement={"policy": "sprad", "share_mode": False}))
        reason = (await node.agent_log.until("config_rejected"))["reason"]
        assert "placement.policy: 'sprad' is not allowed; allowed: one of binpack, spread" in reason
        await run(node, "c", app(30, 4))
        assert len({tuple(a.gpus) for a in node.ledger().allocations.values()}) == 3
        move_link(mount, "..4", rewritten(path, placement={"policy": "spread", "share_mode": True}))
        since = node.agent_log.lines.index(node.agent_log.find("config_rejected")[0])
        assert (await node.agent_log.until("config_reloaded", since=since))["applied"] == []
        codes = [code for code, _ in await settings_entries(node)]
        assert codes == ["reloaded", "rejected", "reloaded"]
        assert reason in (await settings_entries(node))[1][1]
        await until(lambda: events(node, "GpumgrConfigRejected"))
        assert reason in events(node, "GpumgrConfigRejected")[0]
        assert node.agent.running


async def test_no_settings_file_ends_the_agent_or_keeps_it_from_ending(folder: Path) -> None:
    path = folder / "gpumgr.yaml"
    async with running(folder) as node:
        good = path.read_text()
        for bad in (
            b'log: {level: "\\UFFFFFFFF"}',
            b"%YAML 1." + b"9" * 5000 + b"\n---\n",
            b'http: {socket: "/run/\\uD800"}',
            b"\xff",
        ):
            since = len(node.agent_log.lines)
            path.write_bytes(bad)
            node.agent.signal(signal.SIGHUP)
            await node.agent_log.until("config_rejected", since=since)
        path.unlink()
        os.mkfifo(path)
        since = len(node.agent_log.lines)
        node.agent.signal(signal.SIGHUP)
        await node.agent_log.until_match(
            lambda line: line["event"] == "config_rejected" and "not a regular file" in line["reason"], since=since
        )
        replace(path, good)
        await node.agent_log.until("config_reloaded", since=since)
        path.unlink()
        os.mkfifo(path)
        await node.agent_log.until("config_rejected", since=len(node.agent_log.lines))
        await run(node, "a", app(30, 4))
        assert await node.agent.stop() == 0


async def test_a_shorter_sample_period_counts_at_once_and_a_description_that_is_switched_off_is_taken_away(folder: Path) -> None:
    path = folder / "gpumgr.yaml"
    async with running(folder, settings={"nvml": {"sample_period_seconds": 3600}}) as node:
        api = node.api
        assert api is not None
        await until(lambda: "nvidia.com/gpu.count" in api.written.labels)
        replace(path, rewritten(path, nvml={"sample_period_seconds": 0.1}, kubernetes={"describe_node": False}))
        assert (await node.agent_log.until("config_reloaded"))["applied"] == [
            "kubernetes.describe_node",
            "nvml.sample_period_seconds",
        ]
        await until_sampled(node)
        await until(lambda: "nvidia.com/gpu.count" not in api.written.labels)
        assert "gpumgr.io/labels" not in api.written.annotations
