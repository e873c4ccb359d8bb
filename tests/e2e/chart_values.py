"""Values that people give the chart: sets that must work, and mistakes with what helm must say of them."""

from collections.abc import Mapping
from typing import Any, Final

Values = Mapping[str, Any]

#: Values that may be null: empty, then.
EMPTY: Final = (
    *("affinity", "nodeSelector", "tolerations", "priorityClassName", "resources", "nameOverride"),
    *("podAnnotations", "podLabels", "extraArgs", "extraEnv", "extraVolumes", "extraVolumeMounts"),
)

SETS: Final[Mapping[str, Values]] = {
    "default": {},
    "least": {
        "privileged": False,
        "runtimeClassName": "nvidia",
        "settings": {
            "enforcement": {"backend": "hami-core"},
            "hami_core": {"library_path": "/opt/hami/libvgpu.so", "library_sha256": "0" * 64},
            "kubernetes": {"annotate_pods": False, "write_events": False, "describe_node": False},
        },
    },
    "most": {
        "image": {"repository": "registry.example/gpumgr", "digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "key"}]},
        "settings": {
            "kubernetes": {"delete_failed_pods": True, "node_labels": ["gaia.tencent.com/gpu-model="]},
            "nvml": {"library_path": "/driver-root/usr/lib64/libnvidia-ml.so.1"},
            "container": {"driver_whole_dir": "/opt/driver/whole"},
            "enforcement": {"evict": True, "injection": "cdi", "overrides": ["batch=mps"], "over_limit_slack_mebibytes": 1048576},
            "hami_core": {"library_path": "/opt/hami/libvgpu.so"},
            "vcuda": {"library_path": "/opt/vcuda/libcuda-control.so"},
            "process": {"stop_grace_seconds": 7.5},
            "log": {"level": "debug"},
        },
        "http": {"tokenSecret": "web-token", "tlsSecret": "web-tls"},
        "driver": {"root": "/run/nvidia/driver"},
        "mps": {"enabled": True},
        "gpuManager": {"takeOver": True},
        "preflight": {"enabled": True},
        "serviceAccount": {"name": "gpus", "annotations": {"note": "ours"}},
        "rbac": {"drain": True},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "metrics": {"service": {"alias": "gpu-manager-metric", "annotations": {"note": "ours"}}, "dashboard": {"enabled": True}},
        "podAnnotations": {"note": "ours"},
        "podLabels": {"team": "ml"},
        "extraArgs": ["--output=json", "--set", "log.format=json", "--set=metrics.hami_names=true", "--sim", "h100"],
        "extraEnv": [{"name": "GPUMGR_LOG_LEVEL", "value": "info"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
    "with the library's image": {
        "enforcement": {"hamiCore": {"image": "registry.example/gpumgr-hami-core:5091a2f"}},
        "settings": {"enforcement": {"backend": "hami-core"}},
    },
    "drained by hand": {"rbac": {"drain": True}, "restartOnConfigChange": False},
    "on the host's network": {
        "hostNetwork": True,
        "settings": {"http": {"address": "127.0.0.1"}},
        "affinity": None,
        "tolerations": [],
        "metrics": {"service": {"enabled": False}},
    },
    "standalone": {"settings": {"kubernetes": {"enabled": False}}},
    "without gpu-manager's service": {"settings": {"display": {"enabled": False, "socket": "/var/run/gpu-manager.sock"}}},
    "with a kubeconfig": {
        "settings": {"kubernetes": {"kubeconfig": "/etc/kubernetes/gpumgr.conf"}},
        "extraVolumes": [{"name": "kubeconfig", "secret": {"secretName": "kubeconfig"}}],
        "extraVolumeMounts": [{"name": "kubeconfig", "mountPath": "/etc/kubernetes", "readOnly": True}],
    },
    "with files of the operator's": {
        "settings": {
            "enforcement": {"backend": "vcuda"},
            "http": {
                "token_file": "/var/lib/gpumgr/token",
                "tls_cert_file": "/ours/tls.crt",
                "tls_key_file": "/ours/tls.key",
                "client_ca_file": "/ours/ca.pem",
            },
            "vcuda": {
                "library_path": "/opt/vcuda/libcuda-control.so",
                "library_sha256": "0" * 64,
                "client_path": "/opt/vcuda/gpu-client",
                "volume_conf": "/ours/volume.conf",
            },
        },
        "extraVolumes": [{"name": "ours", "secret": {"secretName": "ours"}}],
        "extraVolumeMounts": [{"name": "ours", "mountPath": "/ours"}],
    },
    "with files of the Secrets'": {
        "http": {"tokenSecret": "web-token", "tlsSecret": "web-tls"},
        "settings": {
            "http": {
                "token_file": "/etc/gpumgr-token/token",
                "tls_cert_file": "/etc/gpumgr-tls/tls.crt",
                "tls_key_file": "/etc/gpumgr-tls/tls.key",
                "client_ca_file": "/etc/gpumgr-tls/ca.crt",
            }
        },
    },
    "with files of the operator's image": {
        "http": {"tlsSecret": "web-tls"},
        "settings": {
            "http": {"token_file": "/opt/ours/token", "client_ca_file": "/etc/ssl/certs/ours.pem"},
            "kubernetes": {"kubeconfig": "/opt/ours/kubeconfig"},
            "vcuda": {"client_path": "/opt/ours/gpu-client", "volume_conf": "/opt/ours/volume.conf"},
        },
    },
    "with all that Kubernetes takes": {
        "tolerations": [
            {"operator": "Exists", "effect": ""},
            {"key": "a", "operator": "", "value": "b", "effect": "NoExecute", "tolerationSeconds": None},
            {"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
        ],
        "extraEnv": [{"name": "GPUMGR_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    },
    "with gpu-manager's flags": {
        "extraArgs": [
            *("-v", "4", "-v4", "--share_mode", "--share-mode=true", "--sample-period", "5"),
            *("--logtostderr", "--alsologtostderr=false", "--log-dir=/a", "--output=json"),
        ]
    },
    "with folders of the operator's": {
        "settings": {"container": {"device_root": "/driver/dev"}, "display": {"socket": "/shared/display.sock"}},
        "extraVolumes": [{"name": "nodes", "emptyDir": {}}, {"name": "shared", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "nodes", "mountPath": "/driver/dev"}, {"name": "shared", "mountPath": "/shared"}],
    },
    "with an account of its own": {"serviceAccount": {"create": False, "name": "gpus"}, "fullnameOverride": "gpus"},
    "other folders": {
        "settings": {
            "kubelet": {"pod_resources_socket": "/data/kubelet/pod-resources/kubelet.sock"},
            "cri": {"socket": "/run/crio/crio.sock"},
            "checkpoint": {"dir": "/data/gpumgr"},
            "container": {"allocation_dir": "/data/gpumgr-vm"},
            "enforcement": {"run_dir": "/run/g", "backend": "none"},
            "http": {"socket": "/run/g/agent.sock"},
            "display": {"socket": "/run/g/display.sock"},
            "process": {"lock_path": "/data/gpumgr/lock"},
        },
    },
    "all in few folders": {
        "settings": {
            "checkpoint": {"dir": "/run/gpumgr"},
            "cri": {"socket": "/run/gpumgr/runtime.sock"},
            "hami_core": {"library_path": "/opt/l/libvgpu.so"},
            "vcuda": {"library_path": "/opt/l/libcuda-control.so"},
            "process": {"lock_path": "/run/gpumgr/lock"},
        },
        "mps": {"enabled": True},
    },
    "odd names": {
        "settings": {
            "checkpoint": {"dir": "/data/gpu #1"},
            "container": {"allocation_dir": "/data/a: b", "driver_share_dir": '/data/{"c"}/nvidia'},
            "process": {"lock_path": "/data/gpu #1/lock"},
        }
    },
    "with claims": {"settings": {"node": {"mode": "dra"}, "kubernetes": {"describe_node": False}}},
    "with claims and an account of its own": {
        "settings": {"node": {"mode": "dra"}, "kubelet": {"plugins_dir": "/data/kubelet/plugins"}},
        "serviceAccount": {"create": False, "name": "gpus"},
        "fullnameOverride": "gpus",
    },
    "emptied": dict.fromkeys(EMPTY),
}

#: Blocks that the templates look into.
BLOCKS: Final = (
    *("image", "settings", "http", "driver", "mps", "gpuManager", "preflight", "serviceAccount", "rbac", "updateStrategy"),
    *("enforcement", "enforcement.hamiCore"),
    *("probes", "probes.liveness", "metrics", "metrics.service", "metrics.podMonitor", "metrics.serviceMonitor", "metrics.rules"),
)

#: Values and the words that must stand in helm's message: where, and what is allowed.
MISTAKES: Final[Mapping[str, tuple[Values, str]]] = {
    "a misspelt value": ({"privilged": False}, "additional properties 'privilged' not allowed"),
    "a text for a block": ({"image": "gpumgr:dev"}, "at '/image': got string, want object"),
    "a text for a truth": ({"privileged": "no"}, "at '/privileged': got string, want boolean"),
    "a number for a text": ({"image": {"tag": 1.0}}, "at '/image/tag': got number, want string"),
    "a text for a list": ({"tolerations": "all"}, "at '/tolerations': got string, want array"),
    "a surge": (
        {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}},
        "at '/updateStrategy/rollingUpdate/maxSurge': value must be 0",
    ),
    "an update that may stop nobody": (
        {"updateStrategy": {"rollingUpdate": {"maxUnavailable": 0}}},
        "at '/updateStrategy/rollingUpdate/maxUnavailable': minimum: got 0, want 1",
    ),
    "an update of no part": (
        {"updateStrategy": {"rollingUpdate": {"maxUnavailable": "0%"}}},
        "at '/updateStrategy/rollingUpdate/maxUnavailable': '0%' does not match pattern",
    ),
    "an update of more than all": (
        {"updateStrategy": {"rollingUpdate": {"maxUnavailable": "101%"}}},
        "at '/updateStrategy/rollingUpdate/maxUnavailable': '101%' does not match pattern",
    ),
    "a number for a variable": (
        {"extraEnv": [{"name": "GPUMGR_LOG_LEVEL", "value": 1}]},
        "at '/extraEnv/0/value': got number, want string",
    ),
    "a variable without its name": ({"extraEnv": ["GPUMGR_FOO"]}, "at '/extraEnv/0': got string, want object"),
    "a variable's misspelt value": (
        {"extraEnv": [{"name": "GPUMGR_LOG_LEVEL", "val": "debug"}]},
        "at '/extraEnv/0': additional properties 'val' not allowed",
    ),
    "a number for a taint": ({"tolerations": [{"key": 1}]}, "at '/tolerations/0/key': got number, want string"),
    "a misspelt toleration": (
        {"tolerations": [{"key": "a", "exists": True}]},
        "at '/tolerations/0': additional properties 'exists' not allowed",
    ),
    "a misspelt setting": ({"settings": {"http": {"prot": 1}}}, "at '/settings/http': additional properties 'prot' not allowed"),
    "a misspelt section": ({"settings": {"https": {}}}, "at '/settings': additional properties 'https' not allowed"),
    "a setting of another type": (
        {"settings": {"http": {"port": "high"}}},
        "at '/settings/http/port': got string, want null or integer",
    ),
    "a setting out of bounds": (
        {"settings": {"http": {"port": 65536}}},
        "at '/settings/http/port': maximum: got 65,536, want 65,535",
    ),
    "an unknown backend": (
        {"settings": {"enforcement": {"backend": "cgroups"}}},
        "value must be one of 'auto', 'hami-core', 'limiter', 'mps'",
    ),
    "a relative path": (
        {"settings": {"checkpoint": {"dir": "state"}}},
        "/checkpoint/dir': 'state' does not match pattern '^/'",
    ),
    "a digest that is none": ({"image": {"digest": "latest"}}, "at '/image/digest': 'latest' does not match pattern"),
    "any free port": ({"settings": {"http": {"port": 0}}}, "settings.http.port: the probes need a fixed one, 1 to 65535"),
    "no path": (
        {"settings": {"cri": {"socket": None}}},
        "settings.cri.socket: a path is needed, for the host's folder is mounted; a null for it or for settings.cri takes its default "
        "away: remove the null, or give a path",
    ),
    "no section": ({"settings": {"http": None}}, "a null for it or for settings.http takes its default away: remove the null"),
    "a socket that the host does not see": (
        {"settings": {"display": {"socket": "/var/run/gpu-manager.sock"}}},
        "settings.display.socket: /var/run/gpu-manager.sock must lie in /run/gpumgr or /var/lib/gpumgr",
    ),
    "claims without the API server": (
        {"settings": {"node": {"mode": "dra"}, "kubernetes": {"enabled": False}}},
        "settings.node.mode dra needs settings.kubernetes.enabled",
    ),
    "an unknown mode": ({"settings": {"node": {"mode": "both"}}}, "at '/settings/node/mode': value must be one of"),
    "a folder that is the root": (
        {"settings": {"cri": {"socket": "/sock"}}},
        "settings.cri.socket: all of the host's / would be mounted, over the pod's own /opt/gpumgr; let it lie in another folder",
    ),
    "driver files in the root": (
        {"settings": {"container": {"driver_share_dir": "/nvidia"}}, "gpuManager": {"takeOver": True}},
        "settings.container.driver_share_dir: all of the host's / would be mounted",
    ),
    "a folder over the image's": (
        {"settings": {"hami_core": {"library_path": "/opt/libvgpu.so"}}},
        "settings.hami_core.library_path: all of the host's /opt would be mounted, over the pod's own /opt/gpumgr",
    ),
    "a folder over the account's token": (
        {"settings": {"cri": {"socket": "/var/run/cri-dockerd.sock"}}},
        "all of the host's /var/run would be mounted, over the pod's own /var/run/secrets",
    ),
    "the place of the pod's own": (
        {"settings": {"cri": {"socket": "/tmp/sock"}}},
        "settings.cri.socket: all of the host's /tmp would be mounted, over the pod's own /tmp",
    ),
    "modules without modprobe": (
        {"settings": {"nvml": {"load_kernel_modules": True}}},
        "settings.nvml.load_kernel_modules: there is no modprobe in the image; load the driver's modules on the host",
    ),
    "devices elsewhere": ({"settings": {"container": {"device_root": "/host/dev"}}}, "settings.container.device_root: "),
    "deaf to the probes": (
        {"settings": {"http": {"address": "127.0.0.1"}}},
        "settings.http.address: the kubelet's probes don't reach 127.0.0.1 in the pod",
    ),
    "deaf to the probes by name": ({"settings": {"http": {"address": "Localhost"}}}, "settings.http.address: "),
    "a kubeconfig that is not there": (
        {
            "settings": {"kubernetes": {"kubeconfig": "/etc/kubernetes/gpumgr.conf"}},
            "extraVolumeMounts": [{"name": "other", "mountPath": "/etc/kubernetes/gpumgr"}],
        },
        "settings.kubernetes.kubeconfig: nothing is mounted where /etc/kubernetes/gpumgr.conf is",
    ),
    "a token that is not there": (
        {"settings": {"http": {"token_file": "/etc/gpumgr/token"}}},
        "settings.http.token_file: nothing is mounted where /etc/gpumgr/token is; bring the file by extraVolumes and "
        "extraVolumeMounts, or below /opt or /etc/ssl in an image of your own, or leave the key out and name a Secret by http.tokenSecret",
    ),
    "a certificate that is not there": (
        {"settings": {"http": {"tls_cert_file": "/etc/tls/tls.crt", "tls_key_file": "/var/lib/gpumgr/tls.key"}}},
        "settings.http.tls_cert_file: nothing is mounted where /etc/tls/tls.crt is; bring the file by extraVolumes and "
        "extraVolumeMounts, or below /opt or /etc/ssl in an image of your own, or leave the key out and name a Secret by http.tlsSecret",
    ),
    "a key that is not there": (
        {"settings": {"http": {"tls_cert_file": "/var/lib/gpumgr/tls.crt", "tls_key_file": "/etc/gpumgr-tls/tls.key"}}},
        "settings.http.tls_key_file: nothing is mounted where /etc/gpumgr-tls/tls.key is",
    ),
    "an authority that is not there": (
        {"settings": {"http": {"client_ca_file": "/opt/../etc/ca.pem"}}},
        "settings.http.client_ca_file: nothing is mounted where /opt/../etc/ca.pem is",
    ),
    "an authority in the other Secret": (
        {"settings": {"http": {"client_ca_file": "/etc/gpumgr-tls/ca.crt"}}, "http": {"tokenSecret": "web-token"}},
        "settings.http.client_ca_file: nothing is mounted where /etc/gpumgr-tls/ca.crt is",
    ),
    "an authority in the empty folder": (
        {"settings": {"http": {"client_ca_file": "/tmp/ca.pem"}}},
        "settings.http.client_ca_file: nothing is mounted where /tmp/ca.pem is",
    ),
    "an authority without a certificate": (
        {"settings": {"http": {"client_ca_file": "/var/lib/gpumgr/ca.pem"}}},
        "settings.http.client_ca_file needs settings.http.tls_cert_file too; name that file, or a Secret of type kubernetes.io/tls by "
        "http.tlsSecret",
    ),
    "a certificate without its key": (
        {"settings": {"http": {"tls_cert_file": "/var/lib/gpumgr/tls.crt"}}},
        "settings.http.tls_cert_file needs settings.http.tls_key_file too",
    ),
    "a client that is not there": (
        {"settings": {"vcuda": {"client_path": "/usr/bin/gpu-client"}}},
        "settings.vcuda.client_path: nothing is mounted where /usr/bin/gpu-client is",
    ),
    "a list of files that is not there": (
        {"settings": {"vcuda": {"volume_conf": "/etc/gpu-manager/volume.conf"}}},
        "settings.vcuda.volume_conf: nothing is mounted where /etc/gpu-manager/volume.conf is",
    ),
    "hami-core without its library": (
        {"settings": {"enforcement": {"backend": "hami-core"}}},
        "settings.enforcement names hami-core, which refuses every share without its library: set settings.hami_core.library_path too, or "
        "enforcement.hamiCore.image",
    ),
    "a library beside the image's": (
        {
            "enforcement": {"hamiCore": {"image": "gpumgr-hami-core:5091a2f"}},
            "settings": {"hami_core": {"library_path": "/opt/l/libvgpu.so"}},
        },
        "enforcement.hamiCore.image: settings.hami_core.library_path takes precedence over the image's library; leave one of them out",
    ),
    "vcuda without its library's sum": (
        {"settings": {"enforcement": {"backend": "vcuda"}, "vcuda": {"library_path": "/opt/vcuda/libcuda-control.so"}}},
        "settings.enforcement names vcuda, which refuses every share without its library: set settings.vcuda.library_sha256 too",
    ),
    "an exception for a library that is not named": (
        {"settings": {"enforcement": {"overrides": ["batch=vcuda"]}}},
        "set settings.vcuda.library_path too",
    ),
    "a name for all nodes": (
        {"extraEnv": [{"name": "GPUMGR_NODE_NAME", "value": "node"}]},
        "extraEnv: GPUMGR_NODE_NAME would name all nodes alike",
    ),
    "another's name for all nodes": (
        {"extraEnv": [{"name": "GPUMGR_NODE_NAME", "valueFrom": {"configMapKeyRef": {"name": "ours", "key": "node"}}}]},
        "extraEnv: GPUMGR_NODE_NAME would name all nodes alike",
    ),
    "a flag that names all nodes": (
        {"extraArgs": ["--set=node.name=node"]},
        "extraArgs: node.name=node would name all nodes alike",
    ),
    "a sum of a library by a variable": (
        {"extraEnv": [{"name": "GPUMGR_VCUDA_LIBRARY_SHA256", "value": "0" * 64}]},
        "give settings.vcuda.library_sha256",
    ),
    "a variable of the chart's": (
        {"extraEnv": [{"name": "NODE_NAME", "value": "node"}]},
        "extraEnv: NODE_NAME is given by the chart",
    ),
    "a setting that is known already": (
        {"extraEnv": [{"name": "GPUMGR_HTTP_PORT", "value": "9000"}]},
        "extraEnv: GPUMGR_HTTP_PORT goes over a setting that the chart looks at; give settings.http.port",
    ),
    "a flag for what is known already": (
        {"extraArgs": ["--set", "http.port=9000"]},
        "extraArgs: http.port=9000 goes over a setting that the chart looks at; give settings.http.port",
    ),
    "a flag in one word": ({"extraArgs": ["--set=cri.socket=/x"]}, "give settings.cri.socket"),
    "a flag of the preflight's": (
        {"preflight": {"extraArgs": ["--json", "--set", "cri.socket=/x"]}},
        "preflight.extraArgs: cri.socket=/x goes over a setting that the chart looks at; give settings.cri.socket",
    ),
    "a flag with a blank": ({"extraArgs": ["--set= http.port=9"]}, 'extraArgs: --set " http.port=9": expected section.key=value'),
    "a flag without its value": ({"extraArgs": ["--output=json", "--set"]}, "extraArgs: --set needs a value"),
    "a flag where a value should be": (
        {"extraArgs": ["--log-dir", "--set=http.port=9", "--vmodule=a=1"]},
        "extraArgs: --log-dir needs a value",
    ),
    "a flag with one dash": ({"extraArgs": ["-share-mode"]}, "extraArgs: -share-mode is none of --set"),
    "a flag of ours as gpu-manager may spell its own": (
        {"extraArgs": ["--sim_dir=/a"]},
        "extraArgs: --sim_dir=/a is none of --set",
    ),
    "a flag that the preflight does not know": (
        {"preflight": {"extraArgs": ["-v4"]}},
        "preflight.extraArgs: -v4 is none of --set, --output, --sim, --json; give settings.log.level",
    ),
    "a flag of the chart's own": (
        {"extraArgs": ["--config", "/etc/other.yaml"]},
        "extraArgs: --config is none of --set, --output, --sim, --sim-dir and no flag of gpu-manager's that is taken here; give what "
        "the agent is to know below settings",
    ),
    "a word that is no flag": ({"extraArgs": ["http.port=9"]}, "extraArgs: http.port=9 is none of --set"),
    "no API server by a flag": ({"extraArgs": ["--standalone"]}, "give settings.kubernetes.enabled"),
    "a flag of gpu-manager's that names all nodes": (
        {"extraArgs": ["--hostname-override", "node"]},
        "give nothing, since each agent has its node's name from the chart",
    ),
    "a volume twice": (
        {"extraVolumes": [{"name": "state", "emptyDir": {}}]},
        "extraVolumes: the chart has a volume state already",
    ),
    "a place twice": (
        {"extraVolumeMounts": [{"name": "more", "mountPath": "/run/gpumgr/"}]},
        "extraVolumeMounts: the chart mounts something at /run/gpumgr already",
    ),
    "a mount of no place": ({"extraVolumeMounts": [{"name": "more"}]}, "at '/extraVolumeMounts/0': missing property 'mountPath'"),
    "a label that is looked for": (
        {"podLabels": {"app.kubernetes.io/name": "gpus"}},
        "podLabels: app.kubernetes.io/name is given by the chart",
    ),
    "two Services of one name": (
        {"metrics": {"service": {"alias": "gpumgr-metrics"}}},
        "metrics.service.alias: the first Service is named gpumgr-metrics already",
    ),
    "mps that would end with the agent": ({"settings": {"enforcement": {"backend": "mps"}}}, "set mps.enabled too"),
    "an exception for mps": ({"settings": {"enforcement": {"overrides": ["batch=mps"]}}}, "set mps.enabled too"),
    "mps without rights": ({"privileged": False, "mps": {"enabled": True}}, "mps.enabled needs privileged: true"),
    "a driver without devices": ({"privileged": False, "driver": {"root": "/"}}, "driver.root needs privileged: true"),
    "a driver without its library": ({"driver": {"root": "/"}}, "driver.root needs settings.nvml.library_path"),
    "scraped twice": (
        {"metrics": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}},
        "enable one of them, or everything is scraped twice",
    ),
    "a monitor of no service": (
        {"metrics": {"serviceMonitor": {"enabled": True}, "service": {"enabled": False}}},
        "metrics.serviceMonitor needs metrics.service.enabled: true",
    ),
}
