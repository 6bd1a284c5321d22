"""The YAML files that a configuration is made of: which choices a directory has, and problems in people's own files.

Owns: listing, and checking a file against the schema with the line of each problem. Reading the files into a
configuration is Hydra's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from .fields import check_part, container, is_section, lookup, members, unknown_key, without_none
from .problems import Problem, nearest, no_such_choice

Choices = Mapping[str, Sequence[str]]  # group -> its choices

_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*)?(?:\.\d*)?(?:[eE][-+]?\d+)?")
_DECIMAL = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_YAML = "tag:yaml.org,2002:"
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_ABSOLUTE = re.compile(r"(?:(?:override|optional)\s+)*/(?P<group>[^@\s]+)")


def choices(directories: Sequence[Path]) -> dict[str, tuple[str, ...]]:
    """Group -> choices, over all directories; a choice in a sub-folder is `folder/name`."""
    found: dict[str, set[str]] = {}
    for directory in directories:
        for file in _files(directory):
            group, *rest = file.relative_to(directory).with_suffix("").parts
            if rest:
                found.setdefault(group, set()).add("/".join(rest))
    return {group: tuple(sorted(names)) for group, names in sorted(found.items())}


def _files(directory: Path) -> list[Path]:
    # Not deeper than group/folder/name: a directory given by mistake may be a whole home.
    found = [file for depth in ("*.yaml", "*/*.yaml", "*/*/*.yaml") for file in directory.glob(depth)]
    return sorted(f for f in found if not any(part.startswith(".") for part in f.relative_to(directory).parts))


def clashes(own: Path, ours: Path) -> list[Problem]:
    """Files of a user's directory that would never be read, because a file of ours has the same name."""
    problems = []
    for file in _files(own):
        name = file.relative_to(own)
        if (ours / name).exists():
            message = "is the name of one of stoker's own files, which would be read instead; give it another name"
            problems.append(Problem(name.as_posix(), None, message, where=str(own)))
    return problems


def package_of(file: Path, group: str) -> str:
    """Where a file's keys go: what its `# @package` line says, else its group; "" is the top level."""
    found = _PACKAGE.search(file.read_bytes()[:512].decode(errors="replace"))
    return (found[1] if found else "_group_").replace("_group_", group).replace("_global_", "").lstrip(".")


def check_file(file: Path, package: str, choices: Choices) -> list[Problem]:
    """Problems with a file whose content goes to `package` ("" for the top level), each with its line.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            root = yaml.compose(stream, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        return [unreadable(e, str(file))]
    path = package.split(".") if package else []
    if isinstance(lookup(path), Problem):
        message = "its keys would go below an unknown section; let the file begin with `# @package _global_`"
        return [Problem(package, None, message, where=str(file))]
    if root is None:
        return []
    return [_placed(problem, file, node) for problem, node in (*_defaults(root, choices), *_walk(root, path, True))]


def _defaults(root: yaml.Node, choices: Choices) -> Iterator[tuple[Problem, yaml.Node]]:
    """Problems with those entries of a defaults list that name a group by its whole path (`override /model: tiny`)."""
    keys = root.value if isinstance(root, yaml.MappingNode) else []
    entries = [value for key, value in keys if key.value == "defaults" and isinstance(value, yaml.SequenceNode)]
    for entry in (entry for value in entries for entry in value.value if isinstance(entry, yaml.MappingNode)):
        for key, value in entry.value:
            form = _ABSOLUTE.fullmatch(key.value)
            if form is None or not isinstance(value, yaml.ScalarNode) or value.tag == f"{_YAML}null":
                continue
            group, chosen = form["group"], value.value
            if group not in choices:
                yield Problem(group, None, no_such_group(group, choices)), key
            elif chosen not in choices[group] and "${" not in chosen:
                yield no_such_choice(group, chosen, choices[group]), key


def no_such_group(group: str, choices: Choices) -> str:
    near = nearest(group, choices)
    return "no such group; " + (f"did you mean {near}?" if near else f"there are: {', '.join(choices)}")


def unreadable(e: Exception, file: str) -> Problem:
    """The problem with a file that is no YAML."""
    mark = getattr(e, "problem_mark", None)
    where = f"{file}:{mark.line + 1}" if mark is not None else file
    return Problem("YAML", None, f"cannot be read: {getattr(e, 'problem', None) or e}", where=where)


def _placed(problem: Problem, file: Path, node: yaml.Node) -> Problem:
    where = f"{file}:{node.start_mark.line + 1}"
    return Problem(problem.field or "top level", problem.value, problem.message, problem.severity, where)


def _walk(node: yaml.Node, path: list[str], is_top: bool) -> Iterator[tuple[Problem, yaml.Node]]:
    """Problems below a node, each with the node that has the line."""
    hint = lookup(path)
    assert not isinstance(hint, Problem)
    kind, _ = container(without_none(hint)[0])
    if isinstance(node, yaml.MappingNode) and (is_section(hint) or kind is dict):
        yield from _walk_mapping(node, path, hint, is_top)
    elif isinstance(node, yaml.SequenceNode) and kind is list:
        for position, item in enumerate(node.value):
            yield from _walk(item, [*path, str(position)], False)
    else:
        value = _value(node)
        misread = _misread(node, value)
        if misread:
            yield Problem(".".join(path), node.value, misread), node
        else:
            yield from ((problem, node) for problem in check_part(hint, value, path))


def _walk_mapping(node: yaml.MappingNode, path: list[str], hint: Any, is_top: bool) -> Iterator[tuple[Problem, Any]]:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(key_node.value)
        if key == "<<" or (is_top and key == "defaults"):
            continue
        if key in seen:
            yield Problem(".".join([*path, key]), None, "is there twice; keep one"), key_node
        elif is_section(hint) and key not in members(hint):
            yield unknown_key(path, key, hint), key_node
        else:
            yield from _walk(value_node, [*path, key], False)
        seen.add(key)


def _value(node: yaml.Node) -> Any:
    """The plain value of a node. 1e-4 is a number, as for OmegaConf; for YAML 1.1 itself it is not."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _value(item) for key, item in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    text = str(node.value)
    kind = node.tag.removeprefix(_YAML)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("yes", "true", "on", "y")
    if kind == "int" and _DECIMAL.fullmatch(text):
        return int(text)
    is_number = kind == "float" or (node.style is None and _NUMBER.fullmatch(text) and any(map(str.isdigit, text)))
    try:
        return float(text) if is_number else text
    except ValueError:
        return text


def _misread(node: yaml.Node, value: Any) -> str:
    """What to do about a scalar that YAML takes for another number than people mean (10:00 is 600, 010 is 8), or that
    Hydra drops in silence."""
    if value == "???":
        return "has no effect, because every field has a default; leave it out"
    if node.tag == f"{_YAML}int" and not isinstance(value, int):
        return "read by YAML as another number; put it in quotes, or write it as a plain decimal"
    return ""
