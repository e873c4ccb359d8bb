"""The MIG profiles of an H100 with 80 GB."""

from gpumgr.placement.devices import MigProfile


def profile(name: str, number: int, memory: int, size: int, *starts: int) -> MigProfile:
    return MigProfile(name=name, number=number, memory_mebibytes=memory, slices=int(name[0]), size=size, starts=starts)


#: As `nvidia-smi mig -lgip` and `-lgipp` print them.
H100 = (
    profile("7g.80gb", 0, 81152, 8, 0),
    profile("4g.40gb", 5, 40448, 4, 0),
    profile("3g.40gb", 9, 40448, 4, 0, 4),
    profile("2g.20gb", 14, 20096, 2, 0, 2, 4),
    profile("1g.20gb", 15, 20096, 2, 0, 2, 4, 6),
    profile("1g.10gb", 19, 9984, 1, 0, 1, 2, 3, 4, 5, 6),
)
