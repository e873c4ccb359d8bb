"""Three layers, and every mistake named with its place."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumgr.settings import InvalidSettingsError, Settings, check_settings, load_settings, parse_text
from gpumgr.settings.schema import plain, sections

REPOSITORY = Path(__file__).parents[3]
SHIPPED = REPOSITORY / "config" / "gpumgr.yaml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "gpumgr.yaml"
    path.write_text(text)
    return path


def problems(tmp_path: Path, text: str) -> list[str]:
    path = write(tmp_path, text)
    return [str(problem).replace(str(path), "FILE") for problem in check_settings(path)]


# -- the shipped file ------------------------------------------------------------------------------------------------------


def test_the_shipped_file_has_every_key_and_nothing_but_defaults() -> None:
    document: dict[str, dict[str, Any]] = yaml.safe_load(SHIPPED.read_text())
    assert {section: set(keys) for section, keys in document.items()} == {
        section: set(keys) for section, keys in sections().items()
    }
    assert load_settings(SHIPPED, environ={}, overrides={}) == load_settings(None, environ={}, overrides={}) == Settings()
    defaults = plain(Settings())
    for section, keys in document.items():
        for key, value in keys.items():
            expected = defaults[section][key]
            assert value in (expected, None) if (section, key) == ("node", "name") else value == _as_yaml(expected), (
                section,
                key,
            )


def _as_yaml(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


# -- layers ----------------------------------------------------------------------------------------------------------------


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "http: {port: 1, address: 10.0.0.1}\nlog: {level: error}\nnode: {name: from-file}\n")
    environ = {"GPUMGR_HTTP_PORT": "2", "GPUMGR_HTTP_ADDRESS": "10.0.0.2", "NODE_NAME": "from-daemonset"}
    settings = load_settings(
        path, environ=environ, overrides={"http.port": 3, "checkpoint.dir": Path("/c"), "nvml.ignored_xids": ()}
    )
    assert (settings.http.port, settings.http.address, settings.log.level) == (3, "10.0.0.2", "error")
    assert settings.node.name == "from-daemonset"
    assert settings.checkpoint.dir == Path("/c")
    assert settings.nvml.ignored_xids == ()


def test_the_node_name_variable_overrides_the_file_and_our_own_variable_overrides_both(tmp_path: Path) -> None:
    path = write(tmp_path, "node: {name: file}\n")
    environ = {"GPUMGR_NODE_NAME": "ours", "NODE_NAME": "daemonset"}
    assert load_settings(path, environ=environ, overrides={}).node.name == "ours"
    assert load_settings(path, environ={"NODE_NAME": "daemonset"}, overrides={}).node.name == "daemonset"
    assert "NODE_NAME overrides it, and GPUMGR_NODE_NAME overrides both" in SHIPPED.read_text()


def test_null_means_the_default_and_undoes_the_layer_below(tmp_path: Path) -> None:
    path = write(tmp_path, "kubernetes: {kubeconfig: /k}\nhttp: null\nlog:\n")
    assert load_settings(path, environ={}, overrides={}).kubernetes.kubeconfig == Path("/k")
    assert load_settings(path, environ={"GPUMGR_KUBERNETES_KUBECONFIG": "null"}, overrides={}).kubernetes.kubeconfig is None
    assert load_settings(path, environ={}, overrides={"kubernetes.kubeconfig": None}).kubernetes.kubeconfig is None


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("kubernetes.enabled", "false", False),
        ("placement.share_mode", "1", True),
        ("http.port", " 80 ", 80),
        ("nvml.call_timeout_seconds", "2", 2.0),
        ("nvml.ignored_xids", "13, 31", (13, 31)),
        ("nvml.ignored_xids", "[13,31]", (13, 31)),
        ("nvml.ignored_xids", "", ()),
        ("container.extra_devices", "/dev/a,/dev/b", (Path("/dev/a"), Path("/dev/b"))),
        ("placement.policy", "spread", "spread"),
        ("node.name", "12", "12"),
    ],
)
def test_text_becomes_the_keys_type(key: str, text: str, value: object) -> None:
    assert parse_text(key, text, "flag") == value


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "---\n", "null\n", "{}\n"):
        assert load_settings(write(tmp_path, text), environ={}, overrides={}) == Settings()


# -- mistakes --------------------------------------------------------------------------------------------------------------

NO_KEY = (
    "http.tls_cert_file: is set and http.tls_key_file is not: name the file with the certificate's key (it may be the same one)"
)
NO_CERTIFICATE = "is set and http.tls_cert_file is not: name the certificate, too, or none of them for plain HTTP"
MISTAKES = {
    "http: {port: 70000}": ["FILE:1: http.port: 70000 is not allowed; allowed: a whole number from 0 to 65535"],
    "http: {port: '80'}": ["FILE:1: http.port: '80' is not allowed; allowed: a whole number from 0 to 65535"],
    "http: {port: true}": ["FILE:1: http.port: True is not allowed; allowed: a whole number from 0 to 65535"],
    "http: {port: 80.5}": ["FILE:1: http.port: 80.5 is not allowed; allowed: a whole number from 0 to 65535"],
    "http:\n  prot: 80": ["FILE:2: http.prot: unknown key; did you mean 'port'?"],
    "http:\n  zzz: 80": ["FILE:2: http.zzz: unknown key; allowed: " + ", ".join(sections()["http"])],
    "htp: {port: 80}": ["FILE:1: htp: unknown section; did you mean 'http'?"],
    "\nkubeconfig: /k": ["FILE:2: kubeconfig: unknown section; the key 'kubeconfig' belongs to the section 'kubernetes'"],
    "http: 80": ["FILE:1: http: must be a mapping; allowed: " + ", ".join(sections()["http"])],
    "http: [80]": ["FILE:1: http: must be a mapping; allowed: " + ", ".join(sections()["http"])],
    "http: {port: 1}\nlog: {}\nhttp: {port: 2}": ["FILE:3: http: appears twice, first in line 1"],
    "http:\n  port: 1\n  address: a\n  port: 2": ["FILE:4: http.port: appears twice, first in line 2"],
    "log: {level: loud}": ["FILE:1: log.level: 'loud' is not allowed; allowed: one of debug, error, info, warning"],
    "kubernetes: {enabled: 'yes'}": ["FILE:1: kubernetes.enabled: 'yes' is not allowed; allowed: true or false"],
    "kubernetes: {kubeconfig: ''}": ["FILE:1: kubernetes.kubeconfig: '' is not allowed; allowed: an absolute path or null"],
    "checkpoint: {dir: state}": ["FILE:1: checkpoint.dir: 'state' is not allowed; allowed: an absolute path"],
    "checkpoint: {dir: 7}": ["FILE:1: checkpoint.dir: 7 is not allowed; allowed: an absolute path"],
    "nvml: {call_timeout_seconds: .nan}": [
        "FILE:1: nvml.call_timeout_seconds: nan is not allowed; allowed: a number from 0.1 to 300"
    ],
    "nvml: {call_timeout_seconds: .inf}": [
        "FILE:1: nvml.call_timeout_seconds: inf is not allowed; allowed: a number from 0.1 to 300"
    ],
    "nvml: {ignored_xids: 13}": [
        "FILE:1: nvml.ignored_xids: 13 is not allowed; allowed: a list, each item a whole number from 0 to 65535"
    ],
    "node: {name: Node_1}": [
        "FILE:1: node.name: 'Node_1' is not allowed; allowed: a node's name: lower-case letters, digits, '-' and '.', 253 at most"
    ],
    "node: {name: 2026-99-99}": [
        "FILE:1: node.name: can't be read (month must be in 1..12); "
        "allowed: a node's name: lower-case letters, digits, '-' and '.', 253 at most"
    ],
    "http: {port: !!python/object:os.system x}": [
        "FILE:1: http.port: can't be read (could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'); "
        "allowed: a whole number from 0 to 65535"
    ],
    "- http": ["FILE:1: must be a mapping; allowed: " + ", ".join(sections())],
    "http: {port: 1\nlog: {}": ["FILE:2: no valid YAML: while parsing a flow mapping, expected ',' or '}', but got ':'"],
    "a:\n\tb: 1": ["FILE:2: no valid YAML: while scanning for the next token, found character '\\t' that cannot start any token"],
    "http: {}\n---\nlog: {}": ["FILE:2: no valid YAML: expected a single document in the stream, but found another document"],
    "http: *port": ["FILE:1: no valid YAML: found undefined alias 'port'"],
    "kubelet: {pod_resources_socket: /" + "x" * 107 + "}": [
        "FILE:1: kubelet.pod_resources_socket: the path has 108 bytes; allowed: 107, since unix sockets can't have longer names"
    ],
    "kubelet: {device_plugin_dir: /" + "x" * 83 + "}": [
        "FILE:1: kubelet.device_plugin_dir: the path has 84 bytes; allowed: 83, since unix sockets can't have longer names"
    ],
    "http:\n  tls_cert_file: /c": [f"FILE:2: {NO_KEY}"],
    "http:\n  tls_key_file: /k": [f"FILE:2: http.tls_key_file: {NO_CERTIFICATE}"],
    "http:\n  client_ca_file: /a": [f"FILE:2: http.client_ca_file: {NO_CERTIFICATE}"],
    "http: {client_ca_file: /a, tls_cert_file: /c}": [f"FILE:1: {NO_KEY}"],
    "nvml: {sample_period_seconds: 5}\nenforcement: {memory_burst: true}": [
        "FILE:2: enforcement.memory_burst: true needs nvml.sample_period_seconds of at most 4: a start waits for two samples"
    ],
    "node: {profile: hami}\nhami: {memory_resource: nvidia.com/gpu}": [
        "FILE:2: hami.memory_resource: the names nvidia.com/gpu, nvidia.com/gpu, nvidia.com/gpumem-percentage, nvidia.com/gpucores, "
        "nvidia.com/priority must differ from one another and from tencent.com/vcuda-core and tencent.com/vcuda-memory"
    ],
    "node: {profile: hami}\nhami: {priority_resource: tencent.com/vcuda-core}": [
        "FILE:2: hami.priority_resource: the names nvidia.com/gpu, nvidia.com/gpumem, nvidia.com/gpumem-percentage, "
        "nvidia.com/gpucores, tencent.com/vcuda-core must differ from one another and from tencent.com/vcuda-core and "
        "tencent.com/vcuda-memory"
    ],
    "node: {mig_strategy: single, profile: hami}": [
        "FILE:1: node.mig_strategy: single offers MIG devices as nvidia.com/gpu, which node.profile hami offers, too"
    ],
    "hami: {operating_mode: mig}": [
        "FILE:1: hami.operating_mode: mig needs `node.profile: hami` or `node.profile: both`: MIG devices are created for "
        "requests of HAMi's resources"
    ],
    "node: {profile: both, mig_strategy: mixed}\nhami: {operating_mode: mig}": [
        "FILE:2: hami.operating_mode: mig needs node.mig_strategy none: mixed offers the MIG devices that exist"
    ],
    "node: {mig_strategy: mixed, mode: dra}": [
        "FILE:1: node.mig_strategy: mixed needs node.mode plugin: with mode dra no device plugin runs"
    ],
    "kubernetes: {node_labels: [a=b, c=, a=c]}": ["FILE:1: kubernetes.node_labels: 'a' has 2 values; allowed: one"],
    "enforcement: {overrides: [x=none, x/y=none, x=mps, x/y=none, x=none]}": [
        "FILE:1: enforcement.overrides: 'x' has 2 values; allowed: one"
    ],
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_the_file_is_named_with_its_place(text: str, tmp_path: Path) -> None:
    assert problems(tmp_path, text) == MISTAKES[text]


def test_all_mistakes_of_all_layers_come_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "http: {port: -1}\nlogg: {}\n")
    environ = {"GPUMGR_LOG_LEVEL": "x", "GPUMGR_HTTP_PROT": "1", "NODE_NAME": "A B"}
    with pytest.raises(InvalidSettingsError) as caught:
        load_settings(path, environ=environ, overrides={"http.prt": 1, "http.port": "x"})
    assert [(problem.source, problem.line, problem.key) for problem in caught.value.problems] == [
        (str(path), 1, "http.port"),
        (str(path), 2, "logg"),
        ("environment variable NODE_NAME", None, "node.name"),
        ("environment variable GPUMGR_LOG_LEVEL", None, "log.level"),
        ("environment variable GPUMGR_HTTP_PROT", None, None),
        ("flags", None, "http.prt"),
        ("flags", None, "http.port"),
    ]
    assert "GPUMGR_HTTP_PROT: no such setting; did you mean 'GPUMGR_HTTP_PORT'?" in str(caught.value)


def test_what_kubernetes_sets_for_a_service_of_our_name_is_not_ours() -> None:
    environ = {
        "GPUMGR_PORT": "tcp://10.0.0.1:80",
        "GPUMGR_SCHEDULER_PORT": "tcp://10.0.0.1:80",
        "GPUMGR_HTTP_PORT": "tcp://10.0.0.1:80",
        "GPUMGR_SERVICE_HOST": "10.0.0.1",
        "GPUMGR_HTTP_SERVICE_PORT_METRICS": "80",
        "GPUMGR_HTTP_PORT_80_TCP_ADDR": "10.0.0.1",
        "GPUMGR_E2E_LOGS": "/tmp/logs",
    }
    assert load_settings(None, environ=environ, overrides={}) == Settings()


def test_of_a_contradiction_the_layer_is_named_that_has_the_value_in_force(tmp_path: Path) -> None:
    path = write(tmp_path, "http: {tls_cert_file: /c}\nkubernetes: {node_labels: [a=b]}\n")
    environ = {"GPUMGR_KUBERNETES_NODE_LABELS": "a=b,a=c"}
    with pytest.raises(InvalidSettingsError) as caught:
        load_settings(path, environ=environ, overrides={})
    assert [(problem.source, problem.line, problem.key) for problem in caught.value.problems] == [
        (str(path), 1, "http.tls_cert_file"),
        ("environment variable GPUMGR_KUBERNETES_NODE_LABELS", None, "kubernetes.node_labels"),
    ]
    settings = load_settings(path, environ={"GPUMGR_HTTP_TLS_KEY_FILE": "/k"}, overrides={})
    assert settings.http.tls_key_file == Path("/k")


def test_a_file_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    (problem,) = check_settings(tmp_path / "missing.yaml")
    assert problem.message == "can't be read: No such file or directory"
    (problem,) = check_settings(tmp_path)
    assert problem.message == "can't be read: Is a directory"
