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
            "hami_core": {"library_path": "/opt/hami/libvgpu.so"},
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
        "extraArgs": ["--output=json"],
        "extraEnv": [{"name": "GPUMGR_LOG_LEVEL", "value": "info"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
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
    "with a kubeconfig": {
        "settings": {"kubernetes": {"kubeconfig": "/etc/kubernetes/gpumgr.conf"}},
        "extraVolumes": [{"name": "kubeconfig", "secret": {"secretName": "kubeconfig"}}],
        "extraVolumeMounts": [{"name": "kubeconfig", "mountPath": "/etc/kubernetes", "readOnly": True}],
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
    "emptied": dict.fromkeys(EMPTY),
}

#: Blocks that the templates look into.
BLOCKS: Final = (
    *("image", "settings", "http", "driver", "mps", "gpuManager", "preflight", "serviceAccount", "rbac", "updateStrategy"),
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
        "value must be one of 'auto', 'hami-core', 'mps'",
    ),
    "a relative path": (
        {"settings": {"checkpoint": {"dir": "state"}}},
        "/checkpoint/dir': 'state' does not match pattern '^/'",
    ),
    "a digest that is none": ({"image": {"digest": "latest"}}, "at '/image/digest': 'latest' does not match pattern"),
    "any free port": ({"settings": {"http": {"port": 0}}}, "settings.http.port: the probes need a fixed one, 1 to 65535"),
    "no path": ({"settings": {"cri": {"socket": None}}}, "settings.cri.socket: a path is needed"),
    "a socket that the host does not see": (
        {"settings": {"display": {"socket": "/var/run/gpu-manager.sock"}}},
        "settings.display.socket: /var/run/gpu-manager.sock must lie in /run/gpumgr or /var/lib/gpumgr",
    ),
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
