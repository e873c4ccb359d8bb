"""Joins an operator's maintenance of GPUs with the stations that it needs."""

from gpumgr.agent.maintenance import Maintenance
from gpumgr.agent.ports import Checkpoint
from gpumgr.app.podside import PodSide
from gpumgr.app.station import Station
from gpumgr.nvml.reset import reset_gpu


def make_maintenance(station: Station, checkpoint: Checkpoint, podside: PodSide) -> Maintenance:
    async def reset(uuid: str) -> str:
        return await reset_gpu(station.monitor, uuid, program=station.settings.nvml.smi_program)

    def kept_by(uuid: str) -> str | None:
        daemon = next((each for each in station.enforcing.mps.status() if each.gpu == uuid and each.pid is not None), None)
        if daemon is None:
            return None
        seconds = station.settings.mps.idle_seconds
        return f"its MPS daemon (pid {daemon.pid}) still runs; it ends {seconds:g} s after its last container (mps.idle_seconds)"

    return Maintenance(
        books=station.books,
        health=station.monitor,
        checkpoint=checkpoint,
        pods=podside.pods,
        announcer=podside.announcer,
        reset=reset,
        kept_by=kept_by,
        use=lambda: station.truth.use,
    )
