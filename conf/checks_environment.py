"""Rules for what the processes run in: modules, conda, containers, staging and node-local storage.

Owns: the rules for container.* and for the environment fields of cluster.*. What the files of a Python environment
say about staging is launcher/stage.py's.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .mounts import is_file_image, parse_mount, separators_in
from .problems import Problem
from .schema import ClusterKind, Config, ContainerRuntime

# Options that have a field of their own (pyxis takes each only once).
_PYXIS_FIELDS = {"container-image": "container.image", "container-mounts": "container.mounts"}
_PYXIS_OURS = ("container-workdir",)
# Variables that differ from node to node.
_OF_ONE_NODE = ("SLURMD_NODENAME", "HOSTNAME", "SLURM_NODEID", "SLURM_PROCID")
# Options of apptainer that keep the environment out, and with it how an agent finds its supervisor.
_CLEANING = ("-e", "--cleanenv", "-C", "--containall")

_PLACEHOLDERS = ("image", "source", "target")  # launcher/container.py puts something in their place
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")


def environment_rules(config: Config) -> Iterator[Problem]:
    """All rules of this file that look at no file."""
    yield from _words(config)
    yield from _staging(config)
    runtime = config.container.runtime
    if runtime is ContainerRuntime.none:
        yield from _without_container(config)
        return
    yield from _image(config)
    yield from _mounts(config)
    yield from _local_dir(config)
    if runtime is ContainerRuntime.command:
        yield from _command(config)
    elif runtime is ContainerRuntime.pyxis:
        yield from _pyxis(config)
    else:
        yield from _apptainer(config)


def image_rules(config: Config) -> Iterator[Problem]:
    """The image, where it is a file; the program that container.command begins with."""
    container = config.container
    yield from _program(config)
    image, runtime = container.image, container.runtime
    if not is_file_image(runtime.value, image):
        return
    assert image is not None
    if not Path(image).exists():
        yield Problem("container.image", image, "no such file; expected an image on storage that the nodes see")
    elif runtime is ContainerRuntime.pyxis and not Path(image).is_file():
        yield Problem("container.image", image, "expected a squashfs file; `enroot import -o FILE.sqsh` makes one")
    elif not os.access(image, os.R_OK):
        yield Problem("container.image", image, "cannot be read by you")


def _program(config: Config) -> Iterator[Problem]:
    """Said, not refused: nodes may have what this machine has not."""
    container, cluster = config.container, config.cluster
    if container.runtime is not ContainerRuntime.command or not container.command or cluster.modules or cluster.setup:
        return
    word = container.command[0]
    if not _PLACEHOLDER.search(word) and shutil.which(word) is None:
        message = "no such program here; if it is so on the nodes, too, nothing starts: give its path on the nodes"
        yield Problem("container.command.0", word, message, "warning")


def _words(config: Config) -> Iterator[Problem]:
    cluster = config.cluster
    for position, module in enumerate(cluster.modules):
        if not module or module.startswith("-") or any(c.isspace() for c in module):
            message = "expected one module per entry, like cuda/12.8"
            yield Problem(f"cluster.modules.{position}", module, message)
    if cluster.conda is not None and (not cluster.conda or cluster.conda.startswith("-")):
        yield Problem("cluster.conda", cluster.conda, "expected an environment's name or prefix, or null")
    if cluster.local_dir is not None and not cluster.local_dir.startswith(("/", "$")):
        message = "expected an absolute path on the nodes; it may contain variables like $SLURM_JOB_ID"
        yield Problem("cluster.local_dir", cluster.local_dir, message)
    elif cluster.local_dir is not None and ("$(" in cluster.local_dir or "`" in cluster.local_dir):
        message = "no command is run for it; it may contain variables like $SLURM_JOB_ID"
        yield Problem("cluster.local_dir", cluster.local_dir, message)


def _staging(config: Config) -> Iterator[Problem]:
    cluster = config.cluster
    if not cluster.stage_env:
        return
    if config.container.runtime is not ContainerRuntime.none:
        yield Problem(
            "cluster.stage_env", "true", "the image of the container is the environment; leave one of them out"
        )
    elif cluster.kind is ClusterKind.local:
        yield Problem("cluster.stage_env", "true", "has no effect with cluster.kind=local; leave it out", "warning")
    elif cluster.conda is not None and cluster.python is None and "/" not in cluster.conda:
        message = "with cluster.stage_env give its prefix (`conda env list` shows it): that directory is packed"
        yield Problem("cluster.conda", cluster.conda, message)


def _without_container(config: Config) -> Iterator[Problem]:
    container = config.container
    for name in ("image", "mounts", "options", "command"):
        if getattr(container, name):
            yield Problem(
                f"container.{name}", None, "has no effect without container.runtime; set it, or leave this out"
            )


def _image(config: Config) -> Iterator[Problem]:
    container, runtime = config.container, config.container.runtime
    if runtime is ContainerRuntime.command:
        if container.image and not any("{image}" in word for word in container.command):
            yield Problem("container.image", container.image, "no word of container.command contains {image}")
    elif not container.image:
        yield Problem("container.image", None, f"container.runtime={runtime.value} needs an image")
    if not container.python:
        yield Problem("container.python", "", "expected the interpreter inside the container")
    if runtime is not ContainerRuntime.command and container.command:
        yield Problem("container.command", None, "is for container.runtime=command; leave it out")


def _mounts(config: Config) -> Iterator[Problem]:
    runtime = config.container.runtime
    for position, text in enumerate(config.container.mounts):
        field = f"container.mounts.{position}"
        try:
            mount = parse_mount(text)
        except ValueError as e:
            yield Problem(field, text, str(e))
            continue
        if mount.read_only and runtime is ContainerRuntime.command:
            yield Problem(field, text, "with container.runtime=command write read-only mounts into container.command")
        yield from _mountable(field, text, runtime, mount.source + mount.target)
    derived = [("run_root", config.run_root), ("cluster.local_dir", config.cluster.local_dir)]
    derived += [("data.tokenizer", config.data.tokenizer and os.path.dirname(config.data.tokenizer))]
    derived += [(f"data.sources.{k}.prefix", os.path.dirname(s.prefix)) for k, s in enumerate(config.data.sources)]
    for field, path in derived:
        if path:
            yield from _mountable(field, path, runtime, path)


def _mountable(field: str, value: str, runtime: ContainerRuntime, path: str) -> Iterator[Problem]:
    found = separators_in(runtime.value, path)
    if found:
        message = f"{runtime.value} cannot mount a path with {' '.join(map(repr, found))}; rename it, or link to it"
        yield Problem(field, value, message)


def _local_dir(config: Config) -> Iterator[Problem]:
    """The mounts stand in one line for all nodes, so the directory must have one name."""
    text = config.cluster.local_dir or ""
    own = [name for name in _OF_ONE_NODE if f"${name}" in text or f"${{{name}}}" in text]
    if own:
        message = f"with a container the directory must have the same name on all nodes; leave ${own[0]} out"
        yield Problem("cluster.local_dir", text, message)


def _command(config: Config) -> Iterator[Problem]:
    container = config.container
    if not container.command:
        message = "container.runtime=command needs the words before the interpreter, like [bwrap, --bind, /img, /]"
        yield Problem("container.command", "[]", message)
    if container.options:
        yield Problem("container.options", None, "with container.runtime=command they belong into container.command")
    for position, word in enumerate(container.command):
        unknown = [name for name in _PLACEHOLDER.findall(word) if name not in _PLACEHOLDERS]
        if unknown:
            message = f"no such placeholder: {{{unknown[0]}}}; there are {{image}}, {{source}} and {{target}}"
            yield Problem(f"container.command.{position}", word, message)
    sources, targets = (any(f"{{{p}}}" in word for word in container.command) for p in ("source", "target"))
    if sources != targets:
        yield Problem("container.command", None, "expected {source} and {target} of each mount, or neither")
    elif container.mounts and not sources:
        message = "no words of container.command contain {source} and {target}, so nothing is mounted"
        yield Problem("container.mounts", None, message)


def _pyxis(config: Config) -> Iterator[Problem]:
    container, cluster = config.container, config.cluster
    if cluster.kind is ClusterKind.local:
        yield Problem(
            "container.runtime", "pyxis", "is a part of Slurm; with cluster.kind=local use apptainer or command"
        )
    for position, option in enumerate(container.options):
        field, name = f"container.options.{position}", option.lstrip("-").partition("=")[0]
        if not option.startswith("-"):
            yield Problem(field, option, "expected an option of srun in one word, like --container-writable")
        elif name in _PYXIS_FIELDS:
            yield Problem(field, option, f"use {_PYXIS_FIELDS[name]}")
        elif name in _PYXIS_OURS:
            yield Problem(field, option, "set by stoker; leave it out")
    image = container.image
    if image and not is_file_image("pyxis", image):
        registry = image.partition("/")[0]
        if "." in registry and "#" not in image:
            right = f"{registry}#{image.partition('/')[2]}"
            yield Problem("container.image", image, f"a registry is followed by #: write {right}", "warning")
        message = "is fetched by every node at every start; `enroot import -o FILE.sqsh` once and name that file"
        yield Problem("container.image", image, message, "warning")


def _apptainer(config: Config) -> Iterator[Problem]:
    for position, option in enumerate(config.container.options):
        if option.partition("=")[0] in _CLEANING:
            message = "keeps stoker's own variables out of the container; unset what disturbs in cluster.setup instead"
            yield Problem(f"container.options.{position}", option, message)
