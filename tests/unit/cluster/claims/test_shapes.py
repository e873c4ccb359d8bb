"""Names of templates: spelling and parsing are inverse, and every other text is refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.cluster.claims.shapes import MAX_DEVICES, MAX_NAME, MAX_REQUESTS, PREFIX, Shape, ShapeRequest, parse, template

AMOUNTS = st.one_of(
    st.tuples(st.integers(1, 99), st.integers(1, 1 << 20)),
    st.tuples(st.integers(1, 8).map(lambda count: 100 * count), st.integers(0, 1 << 20)),
)
SHAPES = st.dictionaries(st.tuples(st.booleans(), st.integers(0, 99)), AMOUNTS, min_size=1, max_size=12).map(
    lambda found: tuple(ShapeRequest(*place, *found[place]) for place in sorted(found))
)


def spell(shape: Shape) -> str:
    return PREFIX + "-".join(f"{each.name}-{each.cores}-{each.blocks}" for each in shape)


@given(SHAPES)
def test_what_is_spelled_is_parsed_or_too_large(shape: tuple[ShapeRequest, ...]) -> None:
    name = spell(shape)
    if len(name) <= MAX_NAME and sum(max(1, each.cores // 100) for each in shape) <= MAX_DEVICES and len(shape) <= MAX_REQUESTS:
        assert parse(name) == shape
    else:
        with pytest.raises(ValueError, match="at most"):
            parse(name)


PARTS = st.tuples(
    st.sampled_from(["c0", "c1", "i0", "i3", "c00"]),
    st.sampled_from(["30", "100", "200", "030", "٣"]),
    st.sampled_from(["20", "1", "020"]),
).map("-".join)


@given(st.one_of(st.text(), st.lists(PARTS, min_size=1, max_size=3).map(lambda parts: "-".join(["vcuda", *parts]))))
def test_a_name_that_is_parsed_is_spelled_the_same(name: str) -> None:
    """So one shape has one name, and no name has another meaning."""
    try:
        shape = parse(name)
    except ValueError:
        return
    assert spell(shape) == name


@pytest.mark.parametrize(("name", "reason"), [
    ("vcuda-", "it is not vcuda-PLACE"),
    ("c0-30-20", "it is not vcuda-PLACE"),
    ("vcuda-c0-030-20", "it is not vcuda-PLACE"),
    ("vcuda-c0-30-20-", "it is not vcuda-PLACE"),
    ("vcuda-c0-30-20\n", "it is not vcuda-PLACE"),
    ("vcuda-c0-٣٠-20", "it is not vcuda-PLACE"),
    ("vcuda-c0-150-0", "request c0: "),
    ("vcuda-c0-30-0", "request c0: "),
    ("vcuda-c0-0-4", "request c0: "),
    ("vcuda-c0-30-20-i1-0-0", "request i1: "),
    ("vcuda-c0-30-1048577", "more than 1048576"),
    ("vcuda-c1-30-20-c0-30-20", "each container must be named once"),
    ("vcuda-c0-30-20-c0-30-20", "each container must be named once"),
    ("vcuda-i0-30-20-c0-30-20", "each container must be named once"),
    ("vcuda-c0-3300-0", "at most 32 requests and 32 GPUs"),
    ("vcuda" + "-c0-30-20" * 30, "at most 253 characters"),
])  # fmt: skip
def test_a_name_that_is_no_shape_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse(name)


def test_the_template_has_what_the_name_spells() -> None:
    shape = parse("vcuda-c0-30-20-c1-100-0-c2-400-10-i0-5-1")
    made = template("team", spell(shape), shape)
    assert made["metadata"]["namespace"] == "team"
    devices = made["spec"]["spec"]["devices"]
    share, whole, several, init = devices["requests"]
    capacity = {"requests": {"cores": "30", "memory": "5120Mi"}}
    assert share == {"name": "c0", "exactly": {"deviceClassName": "gpu.gpumgr.io", "capacity": capacity}}
    assert whole == {"name": "c1", "exactly": {"deviceClassName": "gpu.gpumgr.io", "count": 1}}
    assert init["exactly"]["capacity"] == {"requests": {"cores": "5", "memory": "256Mi"}}
    assert [(each["name"], each["count"]) for each in several["firstAvailable"]] == [("island", 4), ("numa", 4), ("any", 4)]
    (selector,) = several["firstAvailable"][0]["selectors"]  # ten blocks on four GPUs
    assert selector["cel"]["expression"] == 'device.capacity["gpu.gpumgr.io"].memory.compareTo(quantity("768Mi")) >= 0'
    assert [(each["requests"], each["matchAttribute"]) for each in devices["constraints"]] == [
        (["c2/island"], "gpu.gpumgr.io/island"),
        (["c2/numa"], "resource.kubernetes.io/numaNode"),
    ]
    assert "constraints" not in template("team", "x", parse("vcuda-c0-30-20"))["spec"]["spec"]["devices"]


def test_the_policy_has_the_same_limits() -> None:
    text = (Path(__file__).parents[4] / "config" / "claims" / "admission-policies.yaml").read_text()
    for condition in ("size(variables.requests) <= 32", ".sum() <= 32", "size(variables.template) <= 253", "a[1] <= 1048576"):
        assert condition in text
    assert (MAX_REQUESTS, MAX_DEVICES, MAX_NAME) == (32, 32, 253)
