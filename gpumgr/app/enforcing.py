"""Builds the node's enforcement out of the settings."""

import time
from collections.abc import Callable

import structlog

from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import Backend
from gpumgr.enforcement.limits import Limits
from gpumgr.enforcement.nothing import Nothing
from gpumgr.settings import Settings

log = structlog.get_logger(__name__)

#: A pod's warning: tenant, reason in one word, sentence.
Warn = Callable[[Tenant, str, str], None]


def build_limits(settings: Settings, *, warn: Warn) -> Limits:
    """All mechanisms that gpumgr knows, whether this node can carry them or not."""
    chosen = settings.enforcement
    backends: list[Backend] = [Nothing(lambda tenant, message: warn(tenant, "NotEnforced", message))]
    return Limits(
        backends,
        setting=chosen.backend,
        overrides=chosen.overrides,
        cdi_dir=chosen.cdi_dir if chosen.injection == "cdi" else None,
        orphan_grace_seconds=chosen.orphan_grace_seconds,
        clock=time.monotonic,
    )
