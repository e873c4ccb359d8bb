import pytest

from gpumgr.web.listening import needs_loopback


@pytest.mark.parametrize(
    ("addresses", "needed"),
    [
        (["127.0.0.1"], False),
        (["::1"], False),
        (["0.0.0.0"], False),
        (["::"], False),
        (["10.1.2.3"], True),
        (["fd00::5"], True),
        (["10.1.2.3", "127.0.0.1"], False),
    ],
)
def test_a_pods_own_address_is_not_all(addresses: list[str], needed: bool) -> None:
    assert needs_loopback(addresses) == needed
