"""Host lists, held against `scontrol show hostnames` and `show hostlist` of 22.05 (more in tests/slurm/)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stoker.conf.slurm_hostlist import MOST, compress, expand

EXPANDED = {
    "": "",
    "n1": "n1",
    "n[1-3]": "n1 n2 n3",
    "n[01-03]": "n01 n02 n03",
    "n[001,3,5-6]": "n001 n3 n5 n6",
    "n[9-11]": "n9 n10 n11",
    "n[09-11]": "n09 n10 n11",
    "n[00-1]": "n00 n01",
    "n[1-03]": "n1 n2 n3",
    "n[5,1-2,5]": "n5 n1 n2 n5",
    "a,a": "a a",
    "n[1-2],m[3,4],login": "n1 n2 m3 m4 login",
    "r[1-2]n[1-2]": "r1n1 r1n2 r2n1 r2n2",
    "r[1-2]-n[08-10]": "r1-n08 r1-n09 r1-n10 r2-n08 r2-n09 r2-n10",
    "[1-3]": "1 2 3",
    "1[1-2]": "11 12",
    "n[1-2]-ib,m.x": "n1-ib n2-ib m.x",  # Slurm 22.05 takes no text behind the last bracket
    "n[1]": "n1",
}
REFUSED = [
    "n[3-1]", "n[1-", "n1]", "n[]", "n[1,,2]", "n[,1]", "n[1,]", ",a", "a,", "a,,b", "n[[1-2]]", "n[1-2]]", "a b", " a",
    "a\n", "n[1-2-3]", "n[a-b]", "n[-1]", "n[1 -2]", "n[0x1]", f"n[1-{MOST + 1}]", "n[1-300]m[1-300]",
    "n[1-40000],m[1-40000]", "n[1-99999999999999999999]", "n[\u0661]",
]  # fmt: skip
COMPRESSED = {
    "n1": "n1",
    "n1 n2": "n[1-2]",
    "n2 n1": "n[2,1]",
    "n1 n3": "n[1,3]",
    "n1 n1": "n[1,1]",
    "n1 n2 n3 m1": "n[1-3],m1",
    "n1 m1 n2": "n1,m1,n2",
    "n9 n10": "n[9-10]",
    "n09 n10": "n[09-10]",
    "n099 n100": "n[099-100]",
    "n1 n01 n02": "n[1,01-02]",
    "n0 n00": "n[0,00]",
    "n7 n8 n9 n11": "n[7-9,11]",
    "1 2": "[1-2]",
    "r1n1 r1n2 r2n1": "r1n[1-2],r2n1",
    "n1-ib n2-ib": "n1-ib,n2-ib",
    "a b": "a,b",
    "": "",
}


@pytest.mark.parametrize("text", EXPANDED)
def test_a_list_is_expanded(text: str) -> None:
    assert expand(text) == EXPANDED[text].split()


@pytest.mark.parametrize("text", REFUSED)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        expand(text)


@pytest.mark.parametrize("hosts", COMPRESSED)
def test_hosts_are_compressed_in_their_order(hosts: str) -> None:
    assert compress(hosts.split()) == COMPRESSED[hosts]


@pytest.mark.parametrize("host", ["", "a b", "a,b", "n[1", "n]"])
def test_what_names_no_host_is_not_compressed(host: str) -> None:
    with pytest.raises(ValueError, match="expected the name of a host"):
        compress([host])


def test_a_large_cluster_is_quick() -> None:
    hosts = expand("rack[01-99]-n[001-600]")
    assert len(hosts) == 99 * 600
    assert expand(compress(hosts)) == hosts


names = st.from_regex(r"[a-z]{0,2}[0-9]{0,4}([a-z-][0-9]{0,3})?", fullmatch=True, alphabet="abz-0123456789").filter(
    bool
)


@given(st.lists(names, max_size=12))
def test_what_is_compressed_expands_to_the_same(hosts: list[str]) -> None:
    assert expand(compress(hosts)) == hosts


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """What stands between two brackets, and the numbers that it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        low, width, more = draw(st.integers(0, 1100)), draw(st.integers(1, 5)), draw(st.integers(0, 4))
        written = f"{low:0{width}}"
        texts.append(f"{written}-{low + more:0{draw(st.integers(1, 5))}}" if more or draw(st.booleans()) else written)
        numbers += [f"{low + j:0{len(written)}}" for j in range(more + 1)]
    return ",".join(texts), numbers


@st.composite
def host_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A well-formed list and its hosts: words and brackets in turn, the last word often empty as Slurm wants it."""
    items, hosts = [], []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.sampled_from(["n", "rack-", "a.b", "x1y", "7"]))
        mine = [text]
        for (inner, numbers), word in draw(
            st.lists(st.tuples(ranges(), st.sampled_from(["", "", "-n", "."])), max_size=2)
        ):
            text += f"[{inner}]{word}"
            mine = [name + number + word for name, number in itertools.product(mine, numbers)]
        items.append(text)
        hosts += mine
    return ",".join(items), hosts


@given(host_lists())
def test_a_well_formed_list_is_expanded(made: tuple[str, list[str]]) -> None:
    text, hosts = made
    assert expand(text) == hosts
    assert expand(compress(hosts)) == hosts


@given(host_lists(), st.sampled_from([",", "[", "]", "[]", "[2-1]", "[1,]", " ", ",,a", "[x]", "[1-2-3]"]))
def test_one_slip_spoils_a_well_formed_list(made: tuple[str, list[str]], slip: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        expand(made[0] + slip)


@given(st.text(st.sampled_from("n[]-,0123 x\n"), max_size=12))
def test_no_text_does_worse_than_be_refused(text: str) -> None:
    try:
        hosts = expand(text)
    except ValueError:
        return
    assert all(hosts)
    assert expand(compress(hosts)) == hosts
