"""Rules for modules, conda, containers and staging: each mistake named by field, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stoker.conf.checks_environment import environment_rules, image_rules
from stoker.conf.compose import compose
from stoker.conf.mounts import Mount, parse_mount
from stoker.conf.schema import (
    ClusterConfig,
    ClusterKind,
    Config,
    ContainerConfig,
    ContainerRuntime,
    DataConfig,
    DataSource,
)


def found(container: dict[str, Any], cluster: dict[str, Any] | None = None, **rest: Any) -> list[str]:
    runtime = ContainerRuntime(container.pop("runtime", "none"))
    cluster = cluster or {}
    config = Config(cluster=ClusterConfig(**cluster), container=ContainerConfig(runtime, **container), **rest)
    return [f"{p.severity}: {p}" for p in environment_rules(config)]


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({"image": "/x.sif"}, "error: container.image: has no effect without container.runtime"),
        ({"options": ["--nv"]}, "error: container.options: has no effect without container.runtime"),
        ({"runtime": "pyxis"}, "error: container.image: container.runtime=pyxis needs an image"),
        ({"runtime": "apptainer"}, "error: container.image: container.runtime=apptainer needs an image"),
        ({"runtime": "command"}, "error: container.command=[]: container.runtime=command needs the words"),
        (
            {"runtime": "command", "command": ["bwrap"], "mounts": ["/a"]},
            "error: container.mounts: no words of container.command contain {source} and {target}",
        ),
        (
            {"runtime": "command", "command": ["bwrap", "{source}"]},
            "error: container.command: expected {source} and {target} of each mount, or neither",
        ),
        (
            {"runtime": "command", "command": ["bwrap"], "image": "/x"},
            "error: container.image=/x: no word of container.command contains {image}",
        ),
        (
            {"runtime": "command", "command": ["b", "{source}", "{target}"], "mounts": ["/a:/b:ro"]},
            "error: container.mounts.0=/a:/b:ro: with container.runtime=command write read-only mounts into",
        ),
        (
            {"runtime": "command", "command": ["x", "{src}", "${HOME}"]},
            "error: container.command.1={src}: no such placeholder: {src}; there are {image}, {source} and {target}",
        ),
        ({"runtime": "command", "command": ["x"], "options": ["--y"]}, "error: container.options: with container.run"),
        ({"runtime": "apptainer", "image": "/x", "command": ["y"]}, "error: container.command: is for container.runt"),
        ({"runtime": "apptainer", "image": "/x", "mounts": ["rel"]}, "error: container.mounts.0=rel: expected HOST, H"),
        ({"runtime": "apptainer", "image": "/x", "mounts": ["/a:/b:rx"]}, "error: container.mounts.0=/a:/b:rx: expect"),
        (
            {"runtime": "apptainer", "image": "/x", "options": ["--cleanenv"]},
            "error: container.options.0=--cleanenv: keeps stoker's own variables out of the container",
        ),
        ({"runtime": "pyxis", "image": "/x.sqsh", "mounts": ["/a b"]}, "error: container.mounts.0=/a b: pyxis cannot"),
        (
            {"runtime": "pyxis", "image": "/x.sqsh", "options": ["--container-mounts=/a:/b"]},
            "error: container.options.0=--container-mounts=/a:/b: use container.mounts",
        ),
        ({"runtime": "pyxis", "image": "/x.sqsh", "options": ["x"]}, "error: container.options.0=x: expected an"),
        ({"runtime": "pyxis", "image": "torch:1"}, "warning: container.image=torch:1: is fetched by every node at eve"),
        (
            {"runtime": "pyxis", "image": "nvcr.io/nvidia/pytorch:1"},
            "warning: container.image=nvcr.io/nvidia/pytorch:1: a registry is followed by #",
        ),
    ],
)  # fmt: skip
def test_mistakes_with_containers(container: dict[str, Any], expected: str) -> None:
    problems = found(container)
    assert problems
    assert problems[0].startswith(expected)


@pytest.mark.parametrize(
    "container",
    [
        {},
        {"runtime": "pyxis", "image": "/x.sqsh", "mounts": ["/a:/b:ro"], "options": ["--container-writable"]},
        {"runtime": "apptainer", "image": "/x y.sif", "mounts": ["/a b"], "options": ["--rocm"]},
        {"runtime": "command", "command": ["bwrap", "--bind", "{source}", "{target}"], "mounts": ["/a,b c"]},
    ],
)
def test_nothing_is_wrong_with(container: dict[str, Any]) -> None:
    assert found(container) == []


@pytest.mark.parametrize(
    ("cluster", "container", "expected"),
    [
        ({"kind": ClusterKind.local}, {"runtime": "pyxis", "image": "/x.sqsh"}, "error: container.runtime=pyxis: is a"),
        ({"stage_env": True}, {"runtime": "apptainer", "image": "/x"}, "error: cluster.stage_env=true: the image of t"),
        ({"stage_env": True, "kind": ClusterKind.local}, {}, "warning: cluster.stage_env=true: has no effect"),
        ({"stage_env": True, "conda": "train"}, {}, "error: cluster.conda=train: with cluster.stage_env give its pref"),
        ({"modules": ["cuda", "a b"]}, {}, "error: cluster.modules.1=a b: expected one module per entry"),
        ({"modules": ["--force"]}, {}, "error: cluster.modules.0=--force: expected one module per entry"),
        ({"conda": ""}, {}, "error: cluster.conda=: expected an environment's name or prefix"),
        ({"local_dir": "scratch"}, {}, "error: cluster.local_dir=scratch: expected an absolute path on the nodes"),
        (
            {"local_dir": "/s/${HOSTNAME}"},
            {"runtime": "apptainer", "image": "/x"},
            "error: cluster.local_dir=/s/${HOSTNAME}: with a container the directory must have the same name on all",
        ),
        ({"local_dir": "/s:1"}, {"runtime": "apptainer", "image": "/x"}, "error: cluster.local_dir=/s:1: apptainer c"),
    ],
)  # fmt: skip
def test_mistakes_with_the_environment(cluster: dict[str, Any], container: dict[str, Any], expected: str) -> None:
    (problem,) = found(container, cluster)
    assert problem.startswith(expected)


def test_data_that_cannot_be_mounted_is_named() -> None:
    data = DataConfig(sources=[DataSource("/data/a,b/train")])
    (problem,) = found({"runtime": "pyxis", "image": "/x.sqsh"}, data=data)
    assert problem == (
        "error: data.sources.0.prefix=/data/a,b: pyxis cannot mount a path with ','; rename it, or link to it"
    )


def test_an_image_that_is_a_file_must_be_there(tmp_path: Path) -> None:
    def said(runtime: str, image: str) -> list[str]:
        return [str(p) for p in image_rules(Config(container=ContainerConfig(ContainerRuntime(runtime), image)))]

    image = tmp_path / "x.sqsh"
    assert said("pyxis", str(image)) == [
        f"container.image={image}: no such file; expected an image on storage that the nodes see"
    ]
    image.touch()
    assert said("pyxis", str(image)) == []
    assert said("apptainer", str(tmp_path)) == [], "a sandbox is a directory"
    assert "expected a squashfs file" in said("pyxis", str(tmp_path))[0]
    assert said("apptainer", "docker://x/y") == said("pyxis", "x/y:1") == []


def test_a_relative_image_is_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for runtime, image, expected in (
        ("apptainer", "a.sif", f"{tmp_path}/a.sif"),
        ("apptainer", "docker://a", "docker://a"),
        ("pyxis", "a.sqsh", f"{tmp_path}/a.sqsh"),
        ("pyxis", "nvidia/cuda", "nvidia/cuda"),
    ):
        overrides = [f"container.runtime={runtime}", f"container.image='{image}'"]
        assert compose(overrides).config.container.image == expected


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/a", Mount("/a", "/a")),
        ("/a:/b", Mount("/a", "/b")),
        ("/a b:/b:ro", Mount("/a b", "/b", True)),
        ("/a:/b:rw", Mount("/a", "/b")),
    ],
)
def test_mounts(text: str, mount: Mount) -> None:
    assert parse_mount(text) == mount


@pytest.mark.parametrize("text", ["/tmp/$(id -u)", "/tmp/`id`"])
def test_a_node_local_directory_is_no_command(text: str) -> None:
    (problem,) = found({}, {"local_dir": text})
    assert problem.startswith(f"error: cluster.local_dir={text}: no command is run for it")


def test_a_command_that_begins_with_no_program_is_warned_of(tmp_path: Path) -> None:
    def said(word: str, **cluster: Any) -> list[str]:
        container = ContainerConfig(ContainerRuntime.command, command=[word, "x"])
        config = Config(cluster=ClusterConfig(**cluster), container=container)
        return [f"{p.severity}: {p}" for p in image_rules(config)]

    assert said("sh") == said("/bin/sh") == said("no-such-program", modules=["bwrap"]) == []
    for word in ("no-such-program", str(tmp_path), "/no/such"):
        assert said(word) == [
            f"warning: container.command.0={word}: no such program here; if it is so on the nodes, too, nothing starts:"
            " give its path on the nodes"
        ]
