"""What a cluster's spec accepts, and how it survives on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.launcher.rehearsal.spec import ClusterSpec, Layout, node_range


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0}, "nodes = 0: expected 1 to 120"),
        ({"nodes": 121}, "nodes = 121: expected 1 to 120"),
        ({"cpus": 0}, "cpus = 0: expected 1 or more"),
        ({"gpus": -1}, "gpus = -1: expected 0 or more"),
        ({"preempt_mode": "SUSPEND"}, "preempt_mode = 'SUSPEND': expected 'REQUEUE' or 'CANCEL'"),
        ({"settings": ("no equals sign",)}, "is not one 'Key=Value' line"),
        ({"settings": ("A=1\nB=2",)}, "is not one 'Key=Value' line"),
        ({"gpu_type": "h 100"}, "gpu_type = 'h 100': expected letters, digits and _"),
        ({"node_options": "Features"}, "node_options: 'Features' is not words like Features=ib"),
        ({"node_options": "A=1\nB=2"}, "is not words like Features=ib"),
        ({"share": ("here",)}, "'here' is not an absolute path"),
    ],
)
def test_impossible_values_are_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        ClusterSpec(**values)  # type: ignore[arg-type]


def test_spec_survives_json() -> None:
    spec = ClusterSpec(nodes=7, isolate=True, share=("/tmp/a",), settings=("KillWait=9",), preempt_mode="CANCEL")
    assert ClusterSpec.from_json(spec.to_json()) == spec
    assert "\n" not in spec.to_json()


def test_spec_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown fields colour"):
        ClusterSpec.from_json('{"nodes": 2, "colour": "red"}')


def test_node_names_are_the_only_ones_accepted() -> None:
    spec = ClusterSpec(nodes=2)
    assert spec.node_names() == ("n1", "n2")
    assert spec.node_number("n2") == 2
    with pytest.raises(ValueError, match=r"no node 'n3' in this cluster: it has n\[1-2\]"):
        spec.node_number("n3")


def test_node_range_of_one_node_has_no_brackets() -> None:
    assert [node_range(ClusterSpec(nodes=count)) for count in (1, 2, 12)] == ["n1", "n[1-2]", "n[1-12]"]


@pytest.mark.parametrize("name", ["with blank", "c#omment", "a,b", "x[1]", "percent%n", "\u00fcmlaut"])
def test_directories_that_slurm_cannot_name_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name it"):
        Layout.of(Path("/tmp") / name)


def test_directories_too_long_for_sockets_are_refused() -> None:
    assert Layout.of("/tmp/" + "x" * 59).root.name == "x" * 59
    with pytest.raises(ValueError, match=r"65 bytes long; .* allow 64"):
        Layout.of("/tmp/" + "x" * 60)
