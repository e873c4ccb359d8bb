"""The measured figures as Markdown, and their place in docs/benchmarks.md."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: make bench-docs -->", "<!-- end of figures -->"

_CALLS = {
    "allocate_1": ("Allocate of 1 id, durable commit included", "p99 < 3 ms"),
    "allocate_4512": ("Allocate of 4,512 ids, durable commit included", "p50 < 4 ms"),
    "prefer_of_4512": ("GetPreferredAllocation out of 4,512 ids, PodResources asked", "p50 < 6 ms"),
    "first_list_4512": ("first ListAndWatch of 4,512 devices", "< 10 ms"),
}
_STARTS = {
    "none": "nothing enforces",
    "hami_core": "hami-core",
    "vcuda": "vcuda",
    "mps_2": "mps, protocol 2",
    "mps_3": "mps, protocol 3",
}
_AT_ONCE = {"at_once_8": "p99 < 10 ms", "at_once_50": "p99 < 60 ms"}
_CALLERS = {"one_container": "all of one container", "own_containers": "each of its own container"}
_MIXES = {"hami_core_and_vcuda": "half hami-core, half vcuda", "mps": "mps"}
_WAYS = {
    "plugin": "mode plugin",
    "floor": "a plugin that answers nothing",
    "nothing": "pods without GPUs",
    "claims": "mode dra",
    "empty": "an empty DRA driver",
}
_REPLICA_CALLS = {"prefer": "GetPreferredAllocation, the agent's part", "allocate": "Allocate, durable commit included"}
_REPORTS = {
    "register": ("report to HAMi's scheduler of 16 GPUs with these pods, after a change", "p50 < 1 ms"),
    "register_same": ("the same without a change", ""),
    "inventory": ("report to gpumgr's scheduler, all pods bound by others, after a change", ""),
    "inventory_same": ("the same without a change", ""),
}
_FILTERED = {
    "vcuda": "vcuda",
    "hami": "nvidia.com/gpu with MiB",
    "hami_percentage": "nvidia.com/gpu with a percentage",
    "hami_two_gpus": "nvidia.com/gpu: 2",
}
_NEW_REQUESTS = {
    "share": "a share",
    "whole": "whole GPUs",
    "two_containers": "two containers",
    "init_containers_64": "64 containers, 63 of them init containers",
    "rejected_64": "64 different containers, which fit nowhere",
}
_LINK_16 = {
    "two_socket_nvswitch_empty": "two-socket NVSwitch, empty",
    "two_socket_nvswitch_half_full": "two-socket NVSwitch, half full",
    "four_switches_of_four_empty": "four PCIe switches of four, empty",
    "four_switches_of_four_half_full": "four PCIe switches of four, half full",
}


def markdown(figures: Mapping[str, Any]) -> str:
    """All tables of one run."""
    limits, pods = figures.get("limits"), figures.get("pods_at_once")
    shown = _shown(figures) if "pages" in figures else ()
    parts = (
        *_machine(figures["machine"]),
        "",
        *_calls(figures),
        "",
        *_process(figures),
        *_limits(limits),
        *_launches(figures.get("launches")),
        *_dra(figures.get("dra")),
        *_replicas(figures.get("replicas")),
        *_replica_filter(figures.get("replica_filter")),
        *_quotas(figures.get("quotas")),
        *_bodies(figures.get("bodies")),
        *shown,
        *_scheduler(figures.get("scheduler")),
        *_requests(figures.get("requests")),
        *_kube_scheduler(figures.get("kube_scheduler")),
        *_driver_soon(figures.get("driver_soon_seconds")),
        *_pods(pods),
    )
    return "\n".join(parts)


def put_into(document: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replaces the text between the two marks. Raises ValueError without them."""
    before, found, rest = document.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not found or not last:
        raise ValueError(f"{document} lacks the marks {begin} and {end}")
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def _machine(machine: Mapping[str, Any]) -> list[str]:
    return [
        f"{machine['cpus']} CPUs ({machine['cpu_model']}), Python {machine['python']}, {machine['filesystem']}; "
        f"load {machine['load_before']} before and {machine['load_after']} after the run. p50 / p99 in milliseconds."
    ]


def _calls(figures: Mapping[str, Any]) -> Iterator[str]:
    agent = figures["agent"]
    yield "| the kubelet's path (grpcio, its dial options) | goal | gpumgr | floor | commit alone |"
    yield "|---|---|---|---|---|"
    for name, (what, goal) in _CALLS.items():
        row = agent["calls"][name]
        commit = _pair(agent["commit"]) if name.startswith("allocate") else ""
        yield f"| {what} | {goal} | {_pair(row['gpumgr'])} | {_pair(row['floor'])} | {commit} |"


def _process(figures: Mapping[str, Any]) -> Iterator[str]:
    agent, idle = figures["agent"], figures["agent"]["idle"]
    eight, sixteen = figures["evaluators"]["link_8_gpus"], figures["evaluators"]["link_16_gpus"]
    resident = " / ".join(
        str(mib) for mib in (agent["resident_fresh_mib"], agent["resident_after_calls_mib"], idle["resident_mib"])
    )
    yield "| decisions and process | goal | measured |"
    yield "|---|---|---|"
    p99 = f"{eight['dgx1_v100']['p99']} / {eight['hgx_nvswitch']['p99']}"
    yield f"| link decision, 8 GPUs (DGX-1 / NVSwitch), p99 of all sizes | < 1 ms | {p99} ms |"
    slow = "; ".join(str(sixteen[name]["p50_of_slowest_size"]) for name in _LINK_16)
    yield f"| link decision, 16 GPUs, slowest size: {'; '.join(_LINK_16.values())} | < 50 ms | {slow} ms |"
    worst = list(figures["evaluators"].get("link_worst_case", {}).values())
    if worst:
        slowest = [max(size[f"{each}_of_slowest_size"] for size in worst) for each in ("p50", "p99")]
        yield f"| link decision, 12 to 32 GPUs without symmetry, slowest size, p50 / p99 | < 50 ms | {slowest[0]} / {slowest[1]} ms |"
    yield f"| start of the agent to both resources offered | < 0.6 s | {_seconds(agent['start_to_offered'])} |"
    yield f"| kill -9, restarted at once, to both offered again | < 0.7 s | {_seconds(agent['kill_to_offered'])} |"
    yield f"| kubelet restart: its socket to both offered again | < 2 s | {_seconds(agent['kubelet_restart_to_offered'])} |"
    yield f"| resident memory: fresh / after all calls / with {idle['pods']} pods | < 60 MiB | {resident} MiB |"
    if (imports := figures.get("imports")) is not None:
        agent_run, bare = imports["agent"], imports["interpreter"]
        mib, seconds = agent_run["resident_mib"] - bare["resident_mib"], agent_run["milliseconds"] / 1000
        yield f"| imports of `gpumgr run`, beyond Python itself | | {agent_run['modules']} modules, {mib:.1f} MiB, {seconds:.2f} s |"
    yield f"| CPU of the idle agent with {idle['pods']} pods | < 0.5 % | {idle['cpu_percent']} % |"


def _shown(figures: Mapping[str, Any]) -> Iterator[str]:
    metrics, pages, paint, writer = figures["metrics"], figures["pages"]["pages"], figures["paint"], figures["writer"]
    yield from ("", "| what is shown | goal | gpumgr | floor |", "|---|---|---|---|")
    for key, goal in {"metrics_8x25": 3, "metrics_8x200": 10}.items():
        row = metrics[key]
        times = " | ".join(_pairs(row[f"{who}_classic"], row[f"{who}_openmetrics_gzip"]) for who in ("scrape", "floor"))
        yield f"| scrape of /metrics with {row['containers']} containers, plain; OpenMetrics, gzip | p99 < {goal} ms | {times} |"
    row = metrics["metrics_8x25"]
    percents = f"{row['cpu_percent']} % | {row['floor_cpu_percent']} %"
    yield f"| CPU of 10 scrapes a second, {row['containers']} containers | < 3 % of a core | {percents} |"
    percent, size = pages["core_percent"]["streams"], round(pages["state_bytes"] / 1000)
    yield f"| {pages['streams']} open pages, a state of {size} kB a second | < 5 % of a core | {percent} % | |"
    yield f"| the page: bytes, as sent with gzip | < 150 kB | {pages['page_bytes'] / 1000} kB, {pages['page_bytes_gzip'] / 1000} kB | |"
    if paint:
        yield f"| first paint in Chromium with {paint['containers']} containers | < 300 ms | {_pair(paint['first_paint'])} | |"
    seconds, plain, calls = writer["annotations"], writer["floor"]["median_seconds"], writer["calls_for_each_pod"]
    yield f"| annotations of {writer['pods']} pods that come at once | < 5 s | {_seconds(seconds)} | {plain} s |"
    yield f"| calls to the API server for each of these pods | 2 | {calls:g} | |"


def _dra(dra: Mapping[str, Any] | None) -> Iterator[str]:
    if dra is None:
        return
    yield from ("", "| node mode dra | goal | gpumgr |", "|---|---|---|")
    for key, what, goal in (
        ("live_prepare_one_at_a_time", "NodePrepareResources, one at a time, with the GET of its claim", "p99 < 50 ms"),
        ("live_prepare_40_at_once", "NodePrepareResources of 40 claims at once, with their GETs", ""),
        ("live_all_40", "all 40 prepared, with their GETs", "< 1000 ms"),
        ("prepare_one_at_a_time", "NodePrepareResources, one at a time, without the GET", "p99 < 5 ms"),
        ("prepare_40_at_once", "NodePrepareResources of 40 claims at once, without the GETs", "p99 < 50 ms"),
        ("unprepare_one_at_a_time", "NodeUnprepareResources, one at a time", ""),
        ("unprepare_40_at_once", "NodeUnprepareResources of 40 claims at once", ""),
    ):
        if key in dra:  # the last run may be an older one's
            yield f"| {what} | {goal} | {_pair(dra[key])} |"


def _limits(limits: Mapping[str, Any] | None) -> Iterator[str]:
    if limits is None:
        return
    starts, registrations, usage, regions = (limits[name] for name in ("prestart", "registrations", "usage", "regions"))
    yield from ("", "| limits | goal | gpumgr | floor |", "|---|---|---|---|")
    for name, what in _STARTS.items():
        row = starts[name]
        goal = "" if name == "none" else "p99 < 20 ms"
        also = f"; daemon's first {_pair(row['first_of_gpu'])}" if "first_of_gpu" in row else ""
        shown = f"{_pair(row['first'])}; again {_pair(row['again'])}{also}"
        yield f"| PreStartContainer with {starts['containers']} shares, {what} | {goal} | {shown} | {_pair(starts['floor']['first'])} |"
    for name, where in _CALLERS.items():
        shown, floor = (_pairs(*(registrations[who]["light"][key] for key in _AT_ONCE)) for who in (name, "floor"))
        numbers = "; ".join(key.removeprefix("at_once_") for key in _AT_ONCE)
        yield f"| RegisterVDevice, {numbers} at once, {where} | {'; '.join(_AT_ONCE.values())} | {shown} | {floor} |"
    for name, what in _MIXES.items():
        row, sample = usage[name], f"usage sample of {usage['processes']} processes, {usage['shares']} shares, {what}"
        yield f"| {sample}: loop held; lag | < 15 ms; p99 < 10 ms | {_pairs(row['loop'], row['loop_lag'])} | |"
    yield f"| pass over {regions['regions']} regions | < 30 ms | {_pair(regions['pass'])} | |"


def _launches(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    bare = found["launch"]["bare"]
    yield from ("", "| backend limiter, on the fake GPU | goal | gpumgr | floor |", "|---|---|---|---|")
    for name, what, goal in (("unlimited", "without a limit", 0.2), ("limited", "within a turn", 1)):
        more = " / ".join(f"{(found['launch'][name][each] - bare[each]) / 1000:.2f}" for each in ("p50_ns", "p99_ns"))
        floor = f"{bare['p50_ns'] / 1000:.2f} / {bare['p99_ns'] / 1000:.2f} \u00b5s"
        yield f"| a launch, {what}: beyond the bare driver | p99 < {goal} \u00b5s | {more} \u00b5s | {floor} |"
    yield f"| CPU of a process that waits for its turn | < 1 % | {found['waiting_cpu_percent']} % | |"


def _scheduler(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    if "skipped" in found:
        yield from ("", f"The scheduler was not measured: {found['skipped']}")
        return
    cluster, start, pods, rejections = found["cluster"], found["start"], found["pods"], found["rejections"]
    nodes = cluster["nodes"]
    what = f"{nodes} nodes with 8 GPUs, {cluster['pods']} containers on them, {cluster['cpu_pods']} CPU-only pods"
    yield from ("", f"| scheduler: {what} | goal | gpumgr | floor |", "|---|---|---|---|")
    taken, cpu = found["filter"], found["filter_cpu_ms"]
    yield f"| filter with {nodes} names (HAMi 660 / 1331, gpu-admission 2794 / 4118) | p99 < 10 ms | {_both(taken)} |"
    yield f"| CPU of it | | {cpu['gpumgr']} ms | {cpu['floor']} ms |"
    yield f"| first filter of a new request shape | | {_pair(found['new_shape'])} | |"
    yield f"| prioritize with at most 1024 names | p99 < 5 ms | {_pair(pods['prioritize'])} | |"
    yield f"| CPU of a pod in filter, prioritize and bind (HAMi 1143 ms) | < 5 ms | {pods['cpu_ms_for_each_pod']} ms | |"
    for names, goal in (("1000", "0.5"), ("5000", "1.5")):
        if (row := rejections.get(names)) is not None:
            yield f"| CPU of a rejection with {names} names | < {goal} ms | {row['gpumgr_cpu_ms']} ms | {row['floor_cpu_ms']} ms |"
    yield f"| start to the first answer (HAMi 15 s with 100 nodes) | < 20 s | {start['first_answer_seconds']} s | |"
    quiet, during = found["joins"]["longest_ms"]
    yield f"| longest filter while 20 nodes join, and before | < 100 ms more | {during} ms, {quiet} ms | |"
    yield f"| CPU of 1,000 pod events a second | < 50 % of a core | {found['events']['core_percent']} % | |"
    yield f"| CPU while nothing happens, with watches of 20 s | < 2 % of a core | {found['quiet']['core_percent']} % | |"
    yield f"| resident memory: started / at the end | < 400 MiB | {start['resident_mib']} / {found['resident_mib']} MiB | |"
    for size, row in found["sizes"].items():
        ours, floor = (f"{_pair(row[who])}; {row[cpu]} ms" for who, cpu in (("gpumgr", "cpu_ms"), ("floor", "floor_cpu_ms")))
        yield f"| filter with {size} nodes; CPU | | {ours} | {floor} |"


def _requests(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    nodes, new, wait, turn = found["nodes"], found["new"], found["wait"], found["in_turn"]
    yield from ("", f"| many requests, {nodes} nodes, names in another order each time; CPU | goal | gpumgr |", "|---|---|---|")
    size = f"{turn['samples']} different requests in turn"
    yield f"| filter, {size} | p50 < 5 ms, p99 < 30 ms | {_pair(turn)} |"
    yield f"| resident memory after them, and at the start | < 300 MiB | {turn['resident_mib']}, {found['started_mib']} MiB |"
    for name, what in _NEW_REQUESTS.items():
        row = new[name]
        yield f"| first filter of {what} | p50 < {300 if name == 'rejected_64' else 100} ms | {_pair(row)} |"
        yield f"| longest hold of the event loop meanwhile | < 20 ms | {row['longest_hold_ms']} ms |"
    yield f"| a rejection with {found['waiting']} waiting pods | p50 < 1 ms | {_pair(wait['rejection'])} |"
    yield f"| the same with a quota that excludes half of the nodes | p50 < 1 ms | {_pair(wait['rejection_with_quota'])} |"
    yield f"| memory of {found['waiting']} waiting pods | < 300 MiB in all | {wait['waiting_mib']} MiB more |"
    retry = wait["retry"]
    yield f"| looks, one a second, until a pod that fits by now is retried | 3 | {retry['looks']}, {retry['longest_look_ms']} ms |"


def _kube_scheduler(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    yield from ("", f"| a real kube-scheduler, {found['nodes']} nodes of the API | goal | measured |", "|---|---|---|")
    for size, row in found["pods_a_second"].items():
        rates = f"{row['gpumgr']}, without an extender {row['plain']}; ratio {row['ratio']}"
        yield f"| pods a second of {size} that wait | 150; ratio > 0.7 | {rates} |"
    waits = {
        "a GPU becomes usable to its pod bound, 200 others rejected": ("3", found["woken_among_200_seconds"]),
        "a new pod bound, 500 rejected, 10 CPU-only pods a second": ("5", found["among_500"]["new_pod_bound_seconds"]),
    }
    for what, (goal, row) in waits.items():
        yield f"| {what}; p50 / worst | < {goal} s | {row['p50']} / {row['worst']} s |"
    yield f"| CPU of the extender during that time | < 50 % of a core | {found['among_500']['extender_core_percent']} % |"
    for signal, taken in found["takeover_seconds"].items():
        yield f"| leader ended by {signal} to the other's first answer | < 15 s | {max(taken)} s |"


def _replicas(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    yield from ("", "| 100 pods of nvidia.com/gpu beside 60 vcuda pods | goal | nvidia.com/gpu | vcuda |", "|---|---|---|---|")
    for name, goal in (("prefer", ""), ("allocate", "p99 < 5 ms")):
        yield f"| {_REPLICA_CALLS[name]} | {goal} | {_pair(found[name])} | {_pair(found[f'vcuda_{name}'])} |"
    for name, (what, goal) in _REPORTS.items():
        if name in found:
            yield f"| {what} | {goal} | {_pair(found[name])} | |"


def _replica_filter(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    yield from (
        "",
        "| choice of one of 5000 nodes with 20000 pods of both kinds | a request as before | a new request |",
        "|---|---|---|",
    )
    for name, what in _FILTERED.items():
        yield f"| {what} | {_pair(found[name])} | {_pair(found[f'{name}_new'])} |"


def _quotas(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    yield from ("", "| large sources of quotas, and of a simulation | goal | measured |", "|---|---|---|")
    yield f"| a list of 2000 ResourceQuotas: the event loop serves nothing else for | < 20 ms | {found['resource_quotas_held_ms']} ms |"
    size, held = f"a quota ConfigMap of {found['configmap_kibibytes']} KiB", found["configmap_held_ms"]
    yield f"| {size}: the event loop serves nothing else for | < 20 ms | {held} ms |"
    yield f"| the same until its quotas are in force | | {found['configmap_seconds']} s |"
    yield f"| a CSV file with 60,000 columns | | {found['csv_columns_seconds']} s |"


def _bodies(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    yield from ("", "| clients of HAMi's webhook without a credential | goal | resident memory |", "|---|---|---|")
    yield f"| none | | {found['fresh_mib']} MiB |"
    yield f"| 150 connections with unfinished bodies of 8 MiB | < 150 MiB | {found['150_bodies_of_8_mib_mib']} MiB |"
    yield f"| 600 connections with unfinished bodies of 1 MiB | < 150 MiB | {found['600_bodies_of_1_mib_mib']} MiB |"
    yield f"| 800 connections | < 150 MiB | {found['800_connections_mib']} MiB |"


def _driver_soon(soon: Mapping[str, Any] | None) -> Iterator[str]:
    if soon is None:
        return
    yield from ("", "| a DRA node on a real kubelet, p50 / worst | goal | measured |", "|---|---|---|")
    for key, what, goal in (
        ("started", "start of the agent to its registration", "1"),
        ("started_after_kill", "the same after kill -9", "2"),
        ("slice_back", "the ResourceSlice back after a starting kubelet has deleted it", "0.5"),
        ("taint", "XID 79 to the taint", "1"),
    ):
        yield f"| {what} | < {goal} s | {soon[key]['p50']} / {soon[key]['worst']} s |"


def _both(row: Mapping[str, Any]) -> str:
    return f"{_pair(row['gpumgr'])} | {_pair(row['floor'])}"


def _pods(pods: Mapping[str, Any] | None) -> Iterator[str]:
    if pods is None:
        return
    yield from ("", "| pods at once on a real kubelet | " + " | ".join(_WAYS.values()) + " |", "|---" * (1 + len(_WAYS)) + "|")
    for size, ways in pods.items():
        yield f"| {size} | " + " | ".join(_crowd(ways[way]) for way in _WAYS) + " |"
    yield from ("", "Seconds until all are bound / Running, medians; of the empty driver how many are Running after 20 s.")


def _crowd(row: Mapping[str, Any]) -> str:
    running = row["running_seconds"]
    late = f"{row['running']:g} after 20"
    return f"{row['bound_seconds'] or 'not all'} / {late if running is None else running}"


def _pairs(*rows: Mapping[str, Any]) -> str:
    return "; ".join(map(_pair, rows))


def _pair(row: Mapping[str, Any]) -> str:
    return f"{row['p50_ms']:.2f} / {row['p99_ms']:.2f}"


def _seconds(row: Mapping[str, Any]) -> str:
    return f"{row['median_seconds']} s (worst of {row['samples']}: {row['worst_seconds']} s)"
