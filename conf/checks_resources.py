"""Rules for what sbatch is asked for: one reader per field, and what excludes or needs what.

Owns: the values of cluster's resource fields and of `cluster.sbatch`. Whether the site has them is the launcher's to
ask; how they are written into the script is render.py's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .problems import Problem, nearest
from .sbatch_options import TYPED, problem_with
from .schema import ClusterConfig, Config, GpuRequest
from .slurm_gpus import listed
from .slurm_hostlist import expand
from .slurm_memory import parse_memory
from .slurm_time import check_begin, parse_time

LONGEST_COMMENT = 900  # bytes; Slurm takes 1,024, and our token follows
HIGHEST_NICE = 2**31 - 3

_MAIL: tuple[str, ...] = ("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT")
_MAIL += ("TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50")
_LICENSE = re.compile(r"[A-Za-z0-9_.+/-]+(?:@[A-Za-z0-9_.-]+)?(?::[1-9]\d{0,8})?", re.ASCII)
_SWITCHES = re.compile(r"[1-9]\d{0,8}(?:@(.+))?", re.ASCII)
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
_GRES = re.compile(r"[A-Za-z0-9_.-]+(?::[A-Za-z0-9_.-]+){0,2}", re.ASCII)


def resource_rules(config: Config) -> Iterator[Problem]:
    """All rules of this file."""
    cluster = config.cluster
    for name in (*TYPED.values(), "gres", "gpu_type"):
        value = getattr(cluster, name)
        if isinstance(value, str) and name != "time":
            yield from _text(name, value)
    yield from _one_memory(cluster)
    yield from _gpus(cluster)
    yield from _nodes(cluster)
    yield from _mail_and_priority(cluster)
    for option, found in cluster.sbatch.items():
        message = problem_with(option, found)
        if message:
            yield Problem(f"cluster.sbatch.{option}", found, message)


def _text(name: str, value: str) -> Iterator[Problem]:
    field = f"cluster.{name}"
    if not value.strip():
        yield Problem(field, value, "is empty; expected text, or null to leave it out")
    elif name == "comment":
        if len(value.encode(errors="replace")) > LONGEST_COMMENT:
            yield Problem(field, f"{value[:20]}...", f"expected at most {LONGEST_COMMENT} bytes")
    elif re.search(r"\s", value):
        yield Problem(field, value, "expected text without spaces, or null to leave it out")
    else:
        try:
            _READERS.get(name, _nothing)(value)
        except ValueError as e:
            yield Problem(field, value, str(e))


def _nothing(_: str) -> None:
    pass


def _list(item: re.Pattern[str], expected: str) -> Callable[[str], None]:
    def read(value: str) -> None:
        for part in value.split(","):
            if not item.fullmatch(part):
                raise ValueError(f"expected {expected}, with commas between them; found {part!r}")

    return read


def _constraint(value: str) -> None:
    """Slurm's own words for a bracket that is missing name neither the field nor the place."""
    opened = ""
    for sign in re.sub(r"[^][()]", "", value):
        if sign in "[(":
            opened += sign
        elif opened[-1:] + sign not in ("[]", "()"):
            raise ValueError(f"expected features with & and |; {sign} closes nothing")
        else:
            opened = opened[:-1]
    if opened:
        raise ValueError(f"expected features with & and |; {opened[-1]} is not closed")


def _gres(value: str) -> None:
    _list(_GRES, "NAME[:TYPE][:COUNT]")(value)
    if listed(value):
        raise ValueError("GPUs are asked for by cluster.gpus_per_node and cluster.gpu_type; leave them out here")


def _gpu_type(value: str) -> None:
    if not _TYPE.fullmatch(value):
        raise ValueError("expected the type's name alone, like h100; the count is cluster.gpus_per_node")


def _switches(value: str) -> None:
    found = _SWITCHES.fullmatch(value)
    if not found:
        raise ValueError("expected COUNT or COUNT@TIME: leaf switches at most, and how long to wait for that")
    if found[1]:
        parse_time(found[1])


def _mail_type(value: str) -> None:
    for word in value.split(","):
        if word.upper() not in _MAIL:
            near = nearest(word, _MAIL)
            hint = f"; did you mean {near}?" if near else f"; there are {', '.join(_MAIL)}"
            raise ValueError(f"no event that mail is sent for: {word!r}{hint}")


_READERS: Mapping[str, Callable[[str], Any]] = {
    "mem": parse_memory,
    "mem_per_cpu": parse_memory,
    "mem_per_gpu": parse_memory,
    "tmp": parse_memory,
    "begin": check_begin,
    "partition": _list(re.compile(r"[^,]+"), "partitions"),
    "constraint": _constraint,
    "nodelist": expand,
    "exclude": expand,
    "licenses": _list(_LICENSE, "NAME or NAME:COUNT"),
    "switches": _switches,
    "gres": _gres,
    "gpu_type": _gpu_type,
    "mail_type": _mail_type,
}


def _one_memory(cluster: ClusterConfig) -> Iterator[Problem]:
    given = [name for name in ("mem", "mem_per_cpu", "mem_per_gpu") if getattr(cluster, name) is not None]
    for name in given[1:]:
        message = f"excludes cluster.{given[0]}={getattr(cluster, given[0])}; keep one"
        yield Problem(f"cluster.{name}", getattr(cluster, name), message)
    if cluster.mem_per_gpu is not None and cluster.gpus_per_node == 0:
        yield Problem("cluster.mem_per_gpu", cluster.mem_per_gpu, "needs cluster.gpus_per_node; or use cluster.mem")


def _gpus(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.gpu_type is not None and cluster.gpus_per_node == 0:
        yield Problem("cluster.gpu_type", cluster.gpu_type, "asks for no GPU; set cluster.gpus_per_node too")
    if cluster.gpu_request is GpuRequest.gpus_per_task and cluster.gpus_per_node:
        message = (
            "some versions of Slurm bind GPUs to tasks for it and hide them from others; the agent is the only task of "
            "a node, so take it only where the site accepts nothing else"
        )
        yield Problem("cluster.gpu_request", "gpus_per_task", message, "warning")


def _nodes(cluster: ClusterConfig) -> Iterator[Problem]:
    try:
        wanted, excluded = (list(dict.fromkeys(expand(text or ""))) for text in (cluster.nodelist, cluster.exclude))
    except ValueError:
        return  # told already
    if len(wanted) > cluster.nodes > 0:
        message = f"names {len(wanted)} nodes, and all of them must be used; cluster.nodes={cluster.nodes}"
        yield Problem("cluster.nodelist", cluster.nodelist, message)
    both = [node for node in wanted if node in set(excluded)]
    if both:
        yield Problem("cluster.exclude", cluster.exclude, f"holds {both[0]}, which cluster.nodelist asks for")


def _mail_and_priority(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.mail_user is not None and cluster.mail_type is None:
        message = "gets no mail without cluster.mail_type, e.g. FAIL,TIME_LIMIT"
        yield Problem("cluster.mail_user", cluster.mail_user, message, "warning")
    nice = cluster.nice
    if nice is not None and abs(nice) > HIGHEST_NICE:
        yield Problem("cluster.nice", str(nice), f"expected at most {HIGHEST_NICE}")
    elif nice is not None and nice < 0:
        message = "raises the priority, which Slurm allows administrators only; it takes 0 from others"
        yield Problem("cluster.nice", str(nice), message, "warning")
