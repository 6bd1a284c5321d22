"""docs/configuration.md, made from the schema, its comments and the YAML files: `python -m stoker.conf.reference`.

Owns: that page. With --check it only tells whether the page is up to date.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import sys
import tokenize
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from . import schema
from .compose import DIRECTORY, default_groups
from .fields import container, is_section, members, show, without_none
from .load import to_plain
from .schema import Config
from .yaml_files import choices

PAGE = DIRECTORY.parent / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Made by `python -m stoker.conf.reference` from conf/schema.py and the YAML files beside it. Change those. -->

A run's configuration is one choice per group, then an experiment over all of them, then single fields:

```
stoker launch experiment=smoke model=small cluster=local train.steps=200
```

Later overrides win. A string is taken as it stands (`cluster.exclude=n1,n2`); quotes within quotes keep what would be
read as something else (`name="'null'"`). Entries of mappings are added by naming them (`cluster.env.NCCL_DEBUG=INFO`)
and removed with `~`. A list is given whole (`tracking.tags=[a,b]`) or changed in place (`data.sources.0.weight=2`).
`${section.field}` and `${oc.env:NAME}` are replaced by that value. Relative paths are those of the current directory.

Your own choices are YAML files below any directory, one folder per group, found with `--config-dir DIR`:

```yaml
# DIR/experiment/mine.yaml
# @package _global_
defaults:
  - override /model: small
name: mine
train:
  steps: 5000
cluster:
  time: "12:00:00"  # quoted: YAML reads 12:00:00 as the number 43200
```

Every mistake that can be seen is told at once, before anything is submitted.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [_INTRODUCTION, "## Choices\n", *_choices()]
    for name, section in [("", Config), *_sections()]:
        parts += ["", f"## {name or 'Top level'}\n", *_table(name, section)]
    return "\n".join(parts) + "\n"


def _choices() -> Iterator[str]:
    yield from ("| Choice | What it is |", "|---|---|")
    found = choices([DIRECTORY])
    for group in default_groups():
        for choice in found[group]:
            yield f"| `{group}={choice}` | {_first_comment(DIRECTORY / group / f'{choice}.yaml')} |"


def _first_comment(file: Path) -> str:
    comments = [line.lstrip("# ") for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return next(comment for comment in comments if not comment.startswith("@package"))


def _sections() -> Iterator[tuple[str, type]]:
    for name, hint in members(Config).items():
        if is_section(hint):
            yield name, hint
            for inner, (_, item) in ((n, container(h)) for n, h in members(hint).items()):
                if is_section(item):
                    yield f"{name}.{inner}.0", item


def _table(prefix: str, section: type) -> Iterator[str]:
    comments = field_comments()[section.__name__]
    default = to_plain(Config()) if section is Config else _defaults(section)
    if section.__doc__ and section is not Config and not section.__doc__.startswith(section.__name__):
        yield f"{section.__doc__.strip().splitlines()[0]}\n"
    yield from ("| Field | Type | Default | Meaning |", "|---|---|---|---|")
    for name, hint in members(section).items():
        if not is_section(hint):
            field = f"{prefix}.{name}" if prefix else name
            value = show(default[name]) or '""'
            yield f"| `{field}` | {_type(hint)} | `{value}` | {comments.get(name, '').replace('|', chr(92) + '|')} |"


def _defaults(section: type) -> dict[str, Any]:
    built: Any = section()
    return {field.name: _plain(getattr(built, field.name)) for field in dataclasses.fields(built)}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def _type(hint: Any) -> str:
    hint, nullable = without_none(hint)
    kind, inner = container(hint)
    inner, _ = without_none(inner)
    if kind is list:
        text = "list of " + ("mappings" if is_section(inner) else f"{_TYPES[inner]}s")
    elif kind is dict:
        text = f"mapping to {_TYPES[inner]}s"
    elif issubclass(hint, Enum):
        text = ", ".join(f"`{member.value}`" for member in hint)
    else:
        text = _TYPES[hint]
    return text + (" or null" if nullable else "")


def field_comments() -> dict[str, dict[str, str]]:
    """Class -> field -> the comment behind it in schema.py."""
    assert schema.__file__ is not None
    source = Path(schema.__file__).read_text(encoding="utf-8")
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and item.end_lineno in by_line]
            found[node.name] = {ast.unparse(item.target): by_line[item.end_lineno or 0] for item in fields}
    return found


def main(argv: list[str] | None = None) -> int:
    """Write the page, or compare with it; 1 if it is out of date."""
    parser = argparse.ArgumentParser(prog="python -m stoker.conf.reference", description=__doc__)
    parser.add_argument("page", nargs="?", type=Path, default=PAGE, help=f"default: {PAGE.name} in docs/")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    arguments = parser.parse_args(argv)
    text = page()
    if not arguments.check:
        arguments.page.write_text(text, encoding="utf-8")
    elif not arguments.page.is_file() or arguments.page.read_text(encoding="utf-8") != text:
        print(f"{arguments.page} is out of date; run `python -m stoker.conf.reference`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
