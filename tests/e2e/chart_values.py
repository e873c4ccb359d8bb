"""Values that people give the chart: sets that must work, and mistakes with what helm must say of them."""

from collections.abc import Mapping
from typing import Any, Final

Values = Mapping[str, Any]

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
            "nvml": {"load_kernel_modules": True, "library_path": "/driver-root/usr/lib64/libnvidia-ml.so.1"},
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
    "with a kubeconfig": {"settings": {"kubernetes": {"kubeconfig": "/etc/kubernetes/gpumgr.conf"}}},
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
}

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
