"""Texts of others: every decoder of gpumgr gives a value or an error on purpose, and none bypasses gpumgr.common.foreign_text."""

import ast
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from gpumgr.agent.api import CORDONS_NOTE, NodeState, decode_cordons
from gpumgr.cli import agent_client as schema
from gpumgr.cli import live_objects
from gpumgr.cli.examination.cluster_config import parse_config
from gpumgr.cli.place import StateFile
from gpumgr.cluster.claims import objects as claims
from gpumgr.cluster.scheduler.objects import QuotaLabels, decode_pod, parse_node, parse_watched_pod
from gpumgr.cluster.scheduler.quota_sources import GPU_ADMISSION_KEY, PLAIN_KEY, parse_quotas
from gpumgr.cluster.scheduler.wire import FilterArgs
from gpumgr.cluster.simulation.tables import read_nodes
from gpumgr.common.errors import GpumgrError
from gpumgr.common.foreign_text import MAX_DEPTH, UnreadableText, convert, decode_json, decode_stored, decode_yaml
from gpumgr.compat.gpu_manager.driver_files.volumes import parse as parse_volume_conf
from gpumgr.compat.gpu_manager.running_pods import read_gpu_manager_checkpoint
from gpumgr.compat.objects import parse_object, read_documents
from gpumgr.kube.client import UNREADABLE
from gpumgr.kube.cluster_annotations import decode_inventory, decode_placement
from gpumgr.kube.hami_formats import decode_allocations, decode_register
from gpumgr.kube.pods import parse_pod
from gpumgr.kubelet.claim_reader import allocated_claim
from gpumgr.kubelet.records import granted_in, parse_kubelet_checkpoint, parse_registered_devices
from gpumgr.ledger.answer import GRANTED_ANNOTATION
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ledger import ClaimRef
from gpumgr.ledger.tables import CorruptError, checksum, decode_allocation, decode_entry
from gpumgr.runtime.cri import parse_status
from gpumgr.settings.tree import compose
from tools import PROJECT

#: Module -> why it decodes by itself.
_OWN_DECODERS: Final = {
    "common/foreign_text": "the others use it",
    "kube/credentials": "it reads on a thread, and its errors must not quote secrets",
    "settings/tree": "it needs the lines of a YAML file",
    "settings/__init__": "its types need a hook for paths, and it collects all mistakes of a file",
    "cli/config": "it decodes what it has encoded itself",
    "runtime/cuda_checkpoint": "the agent wrote its input, and it imports nothing of gpumgr",
    "sim/apiserver": "a stand-in; it copies its own objects",
    "sim/apiserver_objects": "a stand-in; it copies its own objects",
    "sim/kubelet_pods": "a stand-in; it reads its own file",
    "sim/nodes": "a stand-in; it reads the project's own files",
}
_DECODERS: Final = {
    *("json.decode", "json.Decoder", "json.loads", "json.load", "json.JSONDecoder", "msgspec.convert", "tomllib.loads"),
    *("yaml.load", "yaml.load_all", "yaml.safe_load", "yaml.safe_load_all", "yaml.parse", "yaml.compose", "yaml.compose_all"),
    *("yaml.SafeLoader", "yaml.CSafeLoader", "yaml.constructor.SafeConstructor", "literal_eval", "pickle.loads"),
}

_LAST_PARTS: Final = {each.rpartition(".")[2] for each in _DECODERS}


def decoders() -> Iterator[str]:
    """The modules of gpumgr that name a decoder."""
    root = PROJECT / "gpumgr"
    for path in root.rglob("*.py"):
        text = path.read_text()
        if not any(part in text for part in _LAST_PARTS):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Attribute) or node.attr not in _LAST_PARTS:
                continue
            name = ast.unparse(node)
            if any(name == each or name.endswith(f".{each}") for each in _DECODERS):
                yield path.relative_to(root).with_suffix("").as_posix()


def test_no_decoder_bypasses_the_module_for_foreign_texts() -> None:
    found = set(decoders())
    assert found - _OWN_DECODERS.keys() == set(), "use gpumgr.common.foreign_text"
    assert _OWN_DECODERS.keys() - found == set()


DEPTH: Final = 100_000
#: PyYAML takes seconds for more; a fourth of it is too deep for Python's stack.
YAML_BYTES: Final = 8 << 10
TEXTS: Final[dict[str, str]] = {
    "nested lists": "[" * DEPTH + "]" * DEPTH,
    "nested objects": '{"a":' * DEPTH + "1" + "}" * DEPTH,
    "nested below keys": "{"
    + ",".join(f'"{key}": ' + "[" * DEPTH + "]" * DEPTH for key in ("metadata", "spec", "version"))
    + "}",
    "nested without an end": "[" * DEPTH,
    "10 MiB": '"' + "x" * (10 << 20) + '"',
    "10 MiB in a key": '{"' + "x" * (10 << 20) + '": 1}',
    "quotes in a string without an end": '{"a":"' + '\\"' * DEPTH,
    "a number to base 60": "a: 1" + ":1" * DEPTH,
    "NaN": '{"version": NaN, "gpus": [Infinity, -Infinity], "metadata": {"uid": NaN}}',
    "a number out of range": '{"version": 1e999}',
    "5,000 digits": "1" * 5000,
    "a key twice": '{"version": 1, "version": "x", "metadata": {}, "metadata": 7, "spec": 1, "spec": []}',
    "wrong types": '{"metadata": 7, "spec": "x", "status": [], "data": 1, "version": [], "gpus": {}, "Data": 3, "volume": 1}',
    "more wrong types": '{"metadata": {"uid": {}, "namespace": [], "name": 3, "annotations": [1], "labels": 3}, "spec": {"containers": 7}}',
    "a list": "[1, null, {}]",
    "null": "null",
    "text": '"text"',
    "no JSON": "<html>",
    "empty": "",
    "a NUL": "\0",
    "half a surrogate pair": '"\\ud800"',
    "an alias": "a: &a [x]\nb: *a\n",
    "a bad tag": "!!int x",
}


@cache
def hostile_json(text: str) -> Any:
    """The text as a decoded object, as far as it can be decoded."""
    try:
        return decode_stored(text.encode())
    except UnreadableText:
        return text


def message_of(call: Callable[[], object], errors: tuple[type[Exception], ...]) -> str:
    """What the call raises of these errors; "" if it returns. Other errors pass."""
    try:
        call()
    except errors as error:
        return str(error)
    return ""


def parsed(parse: Callable[[Any], object]) -> Callable[[str], object]:
    return lambda text: parse(hostile_json(text))


def _kubernetes_item(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


LABELS: Final = QuotaLabels("model", "pool")
REF: Final = ClaimRef(namespace="default", name="claim", uid="uid")
#: Decoder -> (how it is called, what it may raise).
CASES: Final[dict[str, tuple[Callable[[str], object], tuple[type[Exception], ...]]]] = {
    "decode_json": (decode_json, (UnreadableText,)),
    "decode_stored": (lambda text: decode_stored(text.encode()), (UnreadableText,)),
    "decode_yaml": (lambda text: decode_yaml(text, max_bytes=1 << 20), (UnreadableText,)),
    "convert": (lambda text: convert(hostile_json(text), dict[str, list[int]]), (UnreadableText,)),
    "inventory": (decode_inventory, (ValueError,)),
    "placement": (decode_placement, (ValueError,)),
    "HAMi's register": (decode_register, (ValueError,)),
    "HAMi's MIG allocations": (decode_allocations, (ValueError,)),
    "pod": (parsed(parse_pod), UNREADABLE),
    "pod of the scheduler": (lambda text: decode_pod(_kubernetes_item(text)), UNREADABLE),
    "GPU pod of the scheduler": (parsed(parse_watched_pod), UNREADABLE),
    "node": (parsed(parse_node), UNREADABLE),
    "quotas": (parsed(parse_quotas), UNREADABLE),
    "unbound pod": (parsed(claims.waits), UNREADABLE),
    "unbound pod, decoded": (parsed(lambda item: claims.parse_unbound(item, LABELS)), UNREADABLE),
    "claim": (parsed(claims.parse_claim), UNREADABLE),
    "template": (parsed(claims.parse_template), UNREADABLE),
    "slice": (parsed(claims.parse_slice), UNREADABLE),
    "claim of a pod": (parsed(lambda item: allocated_claim(REF, "node", item)), (GpumgrError,)),
    "extender's request": (lambda text: decode_json(text, FilterArgs), (UnreadableText,)),
    "kubelet's checkpoint": (lambda text: parse_kubelet_checkpoint(text.encode()), (GpumgrError,)),
    "kubelet's devices": (lambda text: parse_registered_devices(text.encode()), (GpumgrError,)),
    "volume.conf": (lambda text: parse_volume_conf(text.encode(), Path("volume.conf")), (GpumgrError,)),
    "settings": (lambda text: compose(text.encode()[:YAML_BYTES]), (GpumgrError,)),
    "answer of replicas": (lambda text: granted_in({GRANTED_ANNOTATION: text}), ()),
    "cordons": (lambda text: decode_cordons({CORDONS_NOTE: text}), (GpumgrError,)),
    "allocation": (lambda text: decode_allocation("a", text, checksum("a", text)), (CorruptError,)),
    "history": (lambda text: decode_entry(1, text.encode(), checksum("1", text)), ()),
    "KubeSchedulerConfiguration": (parse_config, (ValueError,)),
    "object of kubectl": (read_documents, (GpumgrError,)),
    "object of kubectl, decoded": (parsed(lambda item: parse_object({"kind": "Pod", "spec": item}, "file")), (GpumgrError,)),
    "state of GPUs": (lambda text: decode_json(text, StateFile), (UnreadableText,)),
    "nodes in a file": (lambda text: read_nodes("nodes.json", [text]), (GpumgrError,)),
    "objects of a snapshot": (
        parsed(lambda item: live_objects.live_cluster({"nodes": [item, {}], "pods": [item]}, "spread")),
        (),
    ),
    "agent's state": (parsed(lambda item: schema.decoded(item, NodeState)), (GpumgrError,)),
    "agent's history": (parsed(lambda item: schema.decoded([item], list[HistoryEntry])), (GpumgrError,)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_foreign_text_is_a_value_or_an_error_on_purpose(case: str) -> None:
    decode, errors = CASES[case]
    for name, text in TEXTS.items():
        assert len(message_of(partial(decode, text), errors)) < 5000, f"{name}: messages reach logs and events"


def test_quotas_that_cannot_be_read_are_a_problem() -> None:
    for key, text in product((GPU_ADMISSION_KEY, PLAIN_KEY), TEXTS.values()):
        found = parse_quotas({"metadata": {"uid": "1"}, "data": {key: text[: 1 << 20]}})
        assert found.problem is None or len(found.problem) < 1000


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_files_and_answers_of_other_programs(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kubelet_internal_checkpoint"
    path.write_bytes(text.encode())
    assert len(message_of(lambda: read_gpu_manager_checkpoint(path), (GpumgrError,))) < 1000

    class Answer:
        info: Final = {"info": text}

    assert len(message_of(lambda: parse_status(Answer()), (UnreadableText,))) < 1000  # type: ignore[arg-type]


def test_deep_values_are_null_and_the_rest_stays() -> None:
    deep = "[" * DEPTH + '"]}"' + "]" * DEPTH
    text = f'{{"a": {deep}, "b": "[{{", "c": [1, {{"d": {deep}}}], "e": "\\"["}}'
    found = decode_stored(text.encode())
    assert (found["b"], found["c"][0], found["e"]) == ("[{", 1, '"[')
    depth, value = 0, found["a"]
    while value is not None:
        (value,), depth = value, depth + 1
    assert depth == MAX_DEPTH - 1


def test_what_is_less_deep_is_read_as_it_is() -> None:
    value: Any = "x"
    for _ in range(300):
        value = {"a": [value]}
    assert decode_stored(json.dumps(value).encode()) == value


def test_messages_have_one_line_and_a_limit() -> None:
    with pytest.raises(UnreadableText) as caught:
        convert({"x" * 10_000 + "\n": 1}, dict[int, int])
    assert "\n" not in str(caught.value)
    assert len(str(UnreadableText("y" * 10_000))) < 500
