"""Texts to and from NVIDIA's control program."""

import math
from pathlib import Path

import pytest

from gpumgr.common.errors import MpsError
from gpumgr.enforcement.mps import commands

GIB = 1 << 30
OLD_HELP = "nvidia-cuda-mps-control [-d | -f]\n  starts nvidia-cuda-mps-server processes"
NEW_HELP = "-d, --daemon\n-m, --multiuser  Enable multiuser mode.\n-p, --protocol <2|3>"
MODULES = "server, namespace, client, device, sm-partition, feature"


def test_an_old_program_uses_protocol_2_for_one_user_at_a_time() -> None:
    assert commands.parse_help(OLD_HELP, "Unrecognized option") == {2: ""}


@pytest.mark.parametrize("option", ["-multiuser-server", "--multiuser-server", "--multiuser"])
def test_the_multi_user_option_is_taken_as_the_program_spells_it(option: str) -> None:
    found = commands.parse_help(f" -d\n {option}  one server for all users\n", "")
    assert found == {2: option}
    assert commands.start_arguments(2, option) == ("-d", option)


def test_help_names_mps_and_how_to_start_it() -> None:
    assert commands.is_help(OLD_HELP)
    assert commands.is_help(f"{NEW_HELP}\nMPS")
    assert not commands.is_help("")
    assert not commands.is_help("ls: invalid option -- 'p'\nnvidia-cuda-mps-control")
    assert not commands.is_help("usage: ls -d")
    assert not commands.is_help("mps-d --daemonize")


def test_a_new_program_supports_both_protocols() -> None:
    found = commands.parse_help(NEW_HELP, f"{NEW_HELP}\nModules: {MODULES}")
    assert found.keys() == {2, 3}
    assert commands.start_arguments(3, found[3]) == ("-d", "-p", "3", "--multiuser")


def test_each_protocol_has_its_own_spelling_of_the_multi_user_option() -> None:
    """As driver r615 prints it."""
    found = commands.parse_help(
        "MPS\n  -d,--daemon\n  -M,--multiuser-server    Enable multi-user mode\n",
        f"  -m, --multiuser              Enable multiuser mode\n{MODULES}",
    )
    assert found == {2: "--multiuser-server", 3: "--multiuser"}


@pytest.mark.parametrize("output", ["Server 12345 not found\n", 'Unknown command "nonsense"\n'])
def test_a_refusal_of_protocol_2_is_recognized_by_its_text(output: str) -> None:
    command = commands.Command(text="get_client_list 12345\n")
    assert commands.refusal_in(command, output) == output.strip()
    assert commands.refusal_in(command, "4711\n4712\n") is None


def test_the_daemon_sees_one_gpu_and_its_own_folders_and_has_its_protocol_whatever_the_agent_has() -> None:
    assert commands.environment(2, "GPU-1", Path("/p"), Path("/l")) == {
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "CUDA_MPS_PIPE_DIRECTORY": "/p",
        "CUDA_MPS_LOG_DIRECTORY": "/l",
        "CUDA_MPS_PROTOCOL_VERSION": "2",
    }


def test_each_servers_bounds_are_identified_by_their_number() -> None:
    asked = [None, 77]
    assert commands.parse_bounds(asked, "30.0\n3G\n40.0\n4G\n") == {None: "30.0\n3G", 77: "40.0\n4G"}
    for answer in ("30.0\n3G\nserver 77 is gone\n", "30.0\n3G\n"):  # the latter: it says nothing of one that is gone
        assert commands.parse_bounds(asked, answer) == {}


@pytest.mark.parametrize("name", ["A1", "a-b", "", "a" * 65, "a/b", "a\n"])
def test_a_name_that_mps_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(MpsError, match="can't be the name of an MPS namespace"):
        commands.create_namespace(name)


def test_servers_and_clients_of_protocol_2() -> None:
    assert commands.parse_servers(2, "12\n34\n") == {"12": 12, "34": 34}
    assert commands.parse_servers(2, "") == {}
    assert commands.parse_clients(2, "51\n52\n") == {51: None, 52: None}


def test_servers_and_clients_of_protocol_3() -> None:
    servers = "gpu,0,48201,Ready,/run/nvidia-mps/gpu,GPU-abcd-1234,-\nnext,0,-,Stopped,/run/nvidia-mps/next,-,-\n"
    assert commands.parse_servers(3, servers) == {"gpu": 48201, "next": None}
    clients = "51023,gpu,0,default,python train.py\n51087,gpu,0,ab12,python eval.py --sizes 1,2\n"
    assert commands.parse_clients(3, clients) == {51023: "default", 51087: "ab12"}
    namespaces = "default,gpu,Ready,-,100.00,0,/p\nab12,gpu,Ready,4G,30.00,0,/p\n"
    assert commands.parse_namespaces(namespaces) == {"default": ("-", "100.00"), "ab12": ("4G", "30.00")}


@pytest.mark.parametrize(
    ("limits", "memory_bytes", "kept"),
    [
        (("4G", "30.00"), 4 * GIB, True),
        (("4G", "29"), 4 * GIB, True),
        (("4G", "31"), 4 * GIB, False),
        (("5G", "30"), 4 * GIB, False),
        (("-", "30"), 4 * GIB, False),
        (("4G", "-"), 4 * GIB, False),
    ],
)
def test_a_namespace_may_be_narrower_than_granted_and_never_wider(limits: tuple[str, str], memory_bytes: int, kept: bool) -> None:
    assert commands.within(limits, 30, memory_bytes) is kept


@pytest.mark.parametrize(("text", "number"), [("30\n", 30), ("30.0", 30), (" 30.00 ", 30), ("12.5%", 12.5)])
def test_percentages(text: str, number: float) -> None:
    assert commands.within(("1G", text), math.ceil(number), GIB)
    assert not commands.within(("1G", text), math.ceil(number) - 1, GIB)


@pytest.mark.parametrize(
    ("text", "number"), [("4G\n", 4 * GIB), ("512M", GIB // 2), ("1.5G", 3 * GIB // 2), ("7", 7), ("1 GiB", GIB)]
)
def test_sizes(text: str, number: int) -> None:
    assert commands.within((text, "1"), 1, number)
    assert not commands.within((text, "1"), 1, number - 1)


@pytest.mark.parametrize("text", ["Segmentation fault", "12 x", "-3", "99999999999", "0", "१२"])
def test_what_is_no_list_of_pids_is_named(text: str) -> None:
    with pytest.raises(MpsError, match="not process ids"):
        commands.parse_pids(text)


@pytest.mark.parametrize("text", ["", "much", "-", "4X"])
def test_what_is_no_number_is_no_limit(text: str) -> None:
    assert not commands.within((text, "1"), 100, 1 << 60)
    assert not commands.within(("1", text), 100, 1 << 60)


def test_a_short_row_is_named() -> None:
    with pytest.raises(MpsError, match="not lines of 4 or more columns"):
        commands.parse_servers(3, "gpu,0\n")
