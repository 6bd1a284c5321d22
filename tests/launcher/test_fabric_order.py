"""A node's place in the network, as Slurm tells it, and the order of ranks that follows."""

from __future__ import annotations

import pytest
from stoker.launcher.fabric_order import place_of, rank_key


@pytest.mark.parametrize(
    ("address", "pattern", "node", "place"),
    [
        ("top.leaf1.n1", "switch.switch.node", "n1", ("top", "leaf1")),
        ("block3.n1", "block.node", "n1", ("block3",)),
        ("n1", "node", "n1", ()),
        ("", "", "n1", ()),
        ("top.leaf1.n1.example.org", "switch.switch.node", "n1.example.org", ("top", "leaf1")),
        # Slurm's name of the node is not ours.
        ("top.leaf1.n1.example.org", "switch.switch.node", "other", ("top", "leaf1")),
        ("nonsense", "switch.switch.node", "n1", ()),
    ],
)
def test_the_switches_above_a_node(address: str, pattern: str, node: str, place: tuple[str, ...]) -> None:
    environ = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert place_of(environ, node) == place


@pytest.mark.parametrize(
    ("places", "order"),
    [
        ({"n1": (), "n10": (), "n2": ()}, ["n1", "n2", "n10"]),
        ({"n1": ("s1",), "n2": ("s2",), "n3": ("s1",), "n4": ("s2",)}, ["n1", "n3", "n2", "n4"]),
        ({"n1": ("s10",), "n2": ("s9",), "n3": ("s10",)}, ["n2", "n1", "n3"]),
        # Leaves of one spine stay together, whatever their own names.
        (
            {"a": ("core", "spine2", "leaf1"), "b": ("core", "spine1", "leaf9"), "c": ("core", "spine2", "leaf1")},
            ["b", "a", "c"],
        ),
        ({"n1": ("s1",), "n2": (), "n3": ("s1",)}, ["n2", "n1", "n3"]),
    ],
)
def test_nodes_of_one_switch_are_neighbours(places: dict[str, tuple[str, ...]], order: list[str]) -> None:
    assert sorted(places, key=lambda node: rank_key(places[node], node)) == order
