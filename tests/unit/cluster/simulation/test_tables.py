"""Files of nodes and pods: both sets of columns, both formats, and what is refused with its place."""

import json

import pytest

from gpumgr.cluster.simulation.model import NodeSpec, Shape
from gpumgr.cluster.simulation.tables import read_nodes, read_pods
from gpumgr.common.errors import InputError
from gpumgr.placement.requests import Constraints

NODE = NodeSpec(name="a", gpus=2, model="A100", memory_blocks=40, cpu_milli=8000, ram_mebibytes=64)
POD_HEADER = "name,gpus,cores,memory_blocks,cpu_milli,ram_mebibytes,gpu_models,arrival_seconds"
ALIBABA = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"


def lines(*rows: str) -> list[str]:
    return [f"{row}\n" for row in rows]


def test_own_columns_in_csv_and_json_are_the_same() -> None:
    table = lines("name,gpus,model,memory_blocks,cpu_milli,ram_mebibytes", "a,2,A100,40,8000,64")
    objects = [{"name": "a", "gpus": 2, "model": "A100", "memory_blocks": 40, "cpu_milli": 8000, "ram_mebibytes": 64}]
    assert read_nodes("n.csv", table)[0] == read_nodes("n.json", [json.dumps(objects)])[0] == [NODE]


def test_alibabas_columns() -> None:
    nodes, skipped = read_nodes("n.csv", lines("sn,cpu_milli,memory_mib,gpu,model", "a,8000,64,2,A100", "b,1,1,0,", "c,1,1,0,"))
    assert nodes == [NodeSpec(name="a", gpus=2, model="A100", cpu_milli=8000, ram_mebibytes=64)]
    assert skipped == ["b", "c"]
    share, whole, none = read_pods(
        "p.csv", lines(ALIBABA, "x,500,16,1,460,A100|T4,LS,Running,5,25,6", "y,1,2,2,1000,,,,,,", "z,1,2,0,0,,,,,,"), nodes
    )
    assert share.shape == Shape(
        gpus=1, gpu_milli=460, cpu_milli=500, ram_mebibytes=16, constraints=Constraints(use_models=("A100", "T4"))
    )
    assert (share.arrival_seconds, share.duration_seconds, share.shape.kind) == (5, 19, "share")
    assert (whole.shape.total_milli, whole.shape.kind, whole.duration_seconds) == (2000, "2", None)
    assert none.shape.kind == "none"


@pytest.mark.parametrize(("rows", "message"), [
    ([], "it has no pods"),
    (["name,gpus,cpu_milli", "x,1,1"], "line 1: the column ram_mebibytes or memory_mib is missing; there are name, gpus"),
    (["name,gpus,num_gpu,cpu_milli,ram_mebibytes", "x,1,1,1,1"], "line 1: the columns gpus and num_gpu have one meaning; keep one of them"),
    (["name,gpus,cores,gpu_milli,cpu_milli,ram_mebibytes", "x,1,50,500,1,1"],
     "line 1: the columns cores and gpu_milli have one meaning; keep one of them"),
    ([POD_HEADER, "x,1,50,1,-5,1,,"], "line 2: Expected `int` >= 0 - at `$.cpu_milli`"),
    ([POD_HEADER, "x,1,50,1,1,1" + "0" * 30 + ",,"], "line 2: Expected `int` <= 1000000000000 - at `$.ram_mebibytes`"),
    ([POD_HEADER, "x,one,50,1,1,1,,"], "line 2: Expected `int`, got `str` - at `$.gpus`"),
    ([POD_HEADER, "x,1,50,1,1,1,,", "", "y,1,50,1,1,1,H100,"], "line 4, column gpu_models: no node has a GPU of model 'H100'"),
    ([POD_HEADER, "x,1,0,1,1,1,,"], "line 2, column cores: it is 0 and the pod requests 1 GPU"),
    ([POD_HEADER, "x,2,50,1,1,1,,"], "line 2, column cores: a pod with several GPUs requests whole ones"),
    ([POD_HEADER, "x,0,50,0,1,1,,"], "line 2, column cores: it is not 0 and the pod requests no GPU"),
    ([POD_HEADER, "x,0,0,4,1,1,,"], "line 2, column memory_blocks: it is not 0"),
    ([POD_HEADER, "x,1,50,1,1,1,,nan"], "line 2: Expected `float` >= 0.0 - at `$.arrival_seconds`"),
    ([POD_HEADER, "x,1,50"], "line 2: 3 columns, and the header has 8"),
    (["name,name", "x,y"], "line 1: the column name is there twice"),
    ([",".join(map(str, range(60_000))), "x"], "line 2: 1 column, and the header has 60000"),
    ([ALIBABA, "x,1,1,1,500,,,,9,5,"], "line 2, column deletion_time: arrival at 9, start at 9 and end at 5 are not in order"),
    ([ALIBABA, "x,1,1,1,500,,,,1,5,6"], "line 2, column deletion_time: arrival at 1, start at 6 and end at 5 are not in order"),
])  # fmt: skip
def test_bad_pods(rows: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_pods("p.csv", lines(*rows), [NODE])
    assert str(error.value).startswith(f"p.csv, {message}" if message.startswith("line") else f"p.csv: {message}")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["name,gpus,cpu_milli,ram_mebibytes", "a,0,1,1"], "n.csv: no node has a GPU"),
        (["name,gpus,cpu_milli,ram_mebibytes"], "n.csv: it has no nodes"),
        ([], "n.csv: it has no nodes"),
        (["name,gpus,cpu_milli,ram_mebibytes", "a,65,1,1"], "n.csv, line 2: Expected `int` <= 64 - at `$.gpus`"),
        (["name,gpus,cpu_milli,ram_mebibytes", "a,1,1,1", "a,1,1,1"], "n.csv, line 3, column name: the name 'a' is there twice"),
        (["name,gpus,cpu_milli,ram_mebibytes", ",1,1,1"], "n.csv, line 2: Object missing required field `name`"),
    ],
)
def test_bad_nodes(rows: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_nodes("n.csv", lines(*rows))
    assert str(error.value) == message


GOOD = '{"name": "x", "gpus": 1, "cpu_milli": 1, "ram_mebibytes": 1}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"name": ', "Input data was truncated"),
        ("\n{}", "Expected `array`, got `object`"),
        ("[1]", "Expected `object`, got `int` - at `$[0]`"),
        (f'[{GOOD},\n{{"name": ["x"]}}]', "Expected `int | float | str | null`, got `array` - at `$[1][...]`"),
        (f"[{GOOD}\n{GOOD}]", "JSON is malformed: expected ',' or ']' (byte 62)"),
        (f"[{GOOD}]\n5", "JSON is malformed: trailing characters (byte 64)"),
        (f"[{GOOD},\n{GOOD.replace('1', '1' * 5000, 1)}]", "Integer value out of range"),
        ("[" * 100_000, "Expected `object`, got `array` - at `$[0]`"),
        (f"[{GOOD},\n{GOOD.replace('1', '1.5', 1)}]", "p.json, element 2: Expected `int`, got `str` - at `$.gpus`"),
        (f"[{GOOD.replace('x', '{}')},\n{{}}]", "p.json, element 2: the column name or sn is missing"),
        ("[]", "p.json: it has no pods"),
    ],
)
def test_bad_json(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read_pods("p.json", [text], [NODE])
    no_list = "p.json: it is not a list of objects with texts and numbers in JSON: "
    assert str(error.value).removeprefix(no_list).startswith(message)


def test_gpu_memory_that_no_node_has() -> None:
    without = [NodeSpec(name="a", gpus=1, cpu_milli=1, ram_mebibytes=1)]
    with pytest.raises(InputError, match=r"line 2, column memory_blocks: the file of the nodes has no GPU memory"):
        read_pods("p.csv", lines(POD_HEADER, "x,1,50,1,1,1,,"), without)
