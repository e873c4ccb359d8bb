"""Checks that ask the API server. If it refuses, or its answer can't be used, this is the result of the check."""

from collections.abc import Awaitable, Callable
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, error, error_of
from gpumgr.common.errors import GpumgrError
from gpumgr.kube.client import API_FAILURES, UNREADABLE, AnswerError, ApiServer
from gpumgr.settings import Settings

IF_HUNG: Final = "the API server is overloaded or can't be reached: look at the cluster line of the kubeconfig"
_ACCOUNT: Final = "run it with an account that may read this, for example an administrator's kubeconfig"


async def judged(look: Awaitable[CheckResult]) -> CheckResult:
    """The result of `look`, or its failure as an error."""
    try:
        return await look
    except GpumgrError as failure:
        return error_of(failure, _ACCOUNT if isinstance(failure, AnswerError) else IF_HUNG)
    except API_FAILURES as failure:
        return error(f"the API server can't be asked: {' '.join(str(failure).split()) or 'no answer in time'}", IF_HUNG)
    except (*UNREADABLE, IndexError) as failure:
        return error(f"an object has another structure: {type(failure).__name__}: {failure}", "look at the object with kubectl")


async def ask(settings: Settings, look: Callable[[ApiServer], Awaitable[CheckResult]]) -> CheckResult:
    """Calls `look` with the API server of the settings, and returns the judged result."""
    try:
        server = await ApiServer.connect(settings.kubernetes.kubeconfig)
    except GpumgrError as failure:
        return error_of(failure, IF_HUNG)
    try:
        return await judged(look(server))
    finally:
        await server.close()
