"""Metrics and probes of `gpumgr claims`. Every label has a fixed set of values."""

import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from aiohttp import web

import gpumgr
from gpumgr.claims.controller import OBJECTS, OUTCOMES, ClaimsController
from gpumgr.claims.watches import ClaimWatches
from gpumgr.metrics.text_format import Family, RenderedFamily, counter, gauge, label_text, page, render
from gpumgr.web.access import AuthPolicy, Scope
from gpumgr.web.middleware import MAX_BODY_BYTES, make_middleware
from gpumgr.web.responses import json_response, on_response_prepare

_SCOPES: Final[Mapping[str, Scope]] = {"/metrics": "metrics", "/healthz": "probe", "/readyz": "probe"}

_BUILD: Final = gauge("claims_build_info", "Version of gpumgr and of Python; always 1.", "version", "python")
_LEADER: Final = gauge("claims_leader", "1 on the replica that writes.")
_SYNCED: Final = gauge("claims_synced", "1 once all objects have been read.")
_TEMPLATES: Final = gauge("claims_templates", "ResourceClaimTemplates of gpumgr in all namespaces.")
_GATED: Final = gauge("claims_gated_pods", "Pods with the scheduling gate gpumgr.io/quota.")
_REFUSED: Final = gauge("claims_refused_pods", "Those of them that the quota of their namespace does not allow.")
_WRITES: Final = counter(
    "claims_writes_total",
    "Requests that write, by object (template, gate, event, sweep: a template that is deleted) and outcome (ok, error).",
    "object",
    "outcome",
)
FAMILIES: Final = (_BUILD, _LEADER, _SYNCED, _TEMPLATES, _GATED, _REFUSED, _WRITES)


class ClaimsPages:
    def __init__(self, watches: ClaimWatches, controller: ClaimsController) -> None:
        self._watches, self._controller = watches, controller

    def application(self, policy: Callable[[], AuthPolicy], names: tuple[str, ...] = ()) -> web.Application:
        app = web.Application(middlewares=[make_middleware(_SCOPES, policy, names)], client_max_size=MAX_BODY_BYTES)
        handlers = (self._scrape, self._healthz, self._readyz)
        app.add_routes([web.get(path, handler) for path, handler in zip(_SCOPES, handlers, strict=True)])
        app.on_response_prepare.append(on_response_prepare)
        return app

    async def _scrape(self, _: web.Request) -> web.Response:
        body = page(self._families(), openmetrics=False)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _healthz(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.Response:
        synced = self._watches.synced
        return json_response({"status": "ok" if synced else "failing"}, status=200 if synced else 503)

    def _families(self) -> Iterator[RenderedFamily]:
        families: dict[Family, Mapping[tuple[str, ...], float]] = {
            _BUILD: {(gpumgr.__version__, platform.python_version()): 1},
            _LEADER: {(): self._controller.leads},
            _SYNCED: {(): self._watches.synced},
            _TEMPLATES: {(): sum(each.managed for each in self._watches.templates.values())},
            _GATED: {(): sum(each.gate is not None for each in self._watches.pods.values())},
            _REFUSED: {(): self._controller.refused},
            _WRITES: {(about, outcome): self._controller.writes[about, outcome] for about in OBJECTS for outcome in OUTCOMES},
        }
        for family, series in families.items():
            yield render(family, {label_text(family.labels, key): value for key, value in series.items()})
