"""How a failed request is named in the log and on pages."""

import pytest

from gpumgr.common.errors import GpumgrError
from gpumgr.kube.client import AnswerError, failure_text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "TimeoutError"),
        (OSError("reset"), "OSError: reset"),
        (AnswerError("HTTP 503: no leader", status=503), "HTTP 503: no leader"),
        (GpumgrError("the server did not answer"), "the server did not answer"),
    ],
)
def test_a_failure_has_its_own_text_or_the_name_of_its_type(error: Exception, text: str) -> None:
    assert failure_text(error) == text
