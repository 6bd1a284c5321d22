"""Check the Markdown files against the tree: links, anchors, and the names of things in code.

Owns: what `make docs` reports. In code spans and blocks it looks at repository paths, `make` targets,
`python -m stoker...` modules, `stoker VERB` commands and configuration keys. It does not judge prose.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDERS = "conf|launcher|slurm_templates|train|kernels|tests|docs|benchmarks|tools|requirements"

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^|\n\n)((?: {4}.*\n?)+)")
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#+\s+(.*?)\s*#*\s*$", re.MULTILINE)
_PATH = re.compile(rf"(?<![\w./<-])((?:{FOLDERS})/[\w./-]*\w/?)(?![\w*<{{-])")
_MAKE = re.compile(r"(?:^|[\s(])make ([a-z][a-z-]*)")
_MODULE = re.compile(r"python3? -m (stoker[\w.]*)")
_VERB = re.compile(r"(?:^\s*(?:\$ )?|[;&|]\s*|/bin/)stoker ([a-z][a-z-]*)", re.MULTILINE)
# An override (key=value) anywhere, or a code span that is a dotted name and nothing else.
_KEY = re.compile(r"(?:(?<![\w./-])|(?<=\+))([a-z_]+(?:\.[a-z_][a-z0-9_]*)+)(?==)|\A([a-z_]+(?:\.[a-z_][a-z0-9_]*)+)\Z")


def without_code(text: str) -> str:
    """Prose of a Markdown text: fenced blocks and code spans blanked, links kept."""
    return _SPAN.sub("", _FENCE.sub("", text))


def code_of(text: str) -> Iterator[str]:
    """Code spans, fenced blocks and indented blocks of a Markdown text."""
    for fence in _FENCE.finditer(text):
        yield "\n".join(fence.group(0).splitlines()[1:-1])
    rest = _FENCE.sub("", text)
    for block in _INDENTED.finditer(rest):
        yield block.group(1)
    for span in _SPAN.finditer(rest):
        yield span.group(1)


def anchors_of(text: str) -> set[str]:
    """Anchors of a file's headings, as the usual Markdown viewers make them."""
    anchors: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]|\]\([^)]*\)", "", heading).lower()).strip().replace(" ", "-")
        repeats = sum(1 for known in anchors if re.fullmatch(re.escape(slug) + r"(-\d+)?", known))
        anchors.add(f"{slug}-{repeats}" if repeats else slug)
    return anchors


def broken_links(root: Path, page: Path, text: str) -> Iterator[str]:
    """Relative links of a page that lead nowhere; links with a scheme are not followed."""
    for target in _LINK.findall(without_code(text)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.is_relative_to(root):
            yield f"link '{target}' leads out of the repository"
        elif not there.exists():
            yield f"link '{target}': no such file"
        elif anchor and there.suffix == ".md" and anchor not in anchors_of(there.read_text(encoding="utf-8")):
            yield f"link '{target}': no such heading"


@dataclasses.dataclass(frozen=True)
class Tree:
    """What the tree knows; None where a part does not exist yet, then its names are not checked."""

    root: Path
    targets: frozenset[str]
    verbs: frozenset[str] | None
    schema: type | None

    @staticmethod
    def read(root: Path) -> Tree:
        makefile = root / "Makefile"
        rules = makefile.read_text(encoding="utf-8") if makefile.exists() else ""
        return Tree(root, frozenset(re.findall(r"^([a-z][a-z-]*):", rules, re.MULTILINE)), _verbs(), _schema())

    def has_key(self, key: str) -> bool:
        """Is key (dotted) a field of the schema, or below a field whose content is free?

        Names that begin with no group of the schema, and modules (`kernels.x`), are not keys and pass.
        """
        assert self.schema is not None
        parts = key.split(".")
        groups = typing.get_type_hints(self.schema)
        if not dataclasses.is_dataclass(groups.get(parts[0])) or _is_module(self.root, f"stoker.{key}"):
            return True
        node: object = self.schema
        for part in parts:
            if not (isinstance(node, type) and dataclasses.is_dataclass(node)):
                return not isinstance(node, type) or node in (dict, object)
            hints = typing.get_type_hints(node)
            if part not in hints:
                return False
            node = _plain(hints[part])
        return True


def _plain(hint: object) -> object:
    """The class in `X | None`; other unions and generics come back as they are."""
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    is_union = typing.get_origin(hint) is typing.Union or type(hint).__name__ == "UnionType"
    return members[0] if is_union and len(members) == 1 else hint


def _verbs() -> frozenset[str] | None:
    if importlib.util.find_spec("stoker.launcher.cli") is None:
        return None
    cli = importlib.import_module("stoker.launcher.cli")
    table = getattr(cli, "VERBS", None)
    if table is None:
        raise SystemExit("check_docs: stoker.launcher.cli has no table VERBS; adapt tools/check_docs.py")
    return frozenset(table)


def _schema() -> type | None:
    if importlib.util.find_spec("stoker.conf.schema") is None:
        return None
    schema = importlib.import_module("stoker.conf.schema")
    return getattr(schema, "Config", None)


def unknown_names(tree: Tree, text: str) -> Iterator[str]:
    """Names in the code of a page that the tree does not have."""
    checks: list[tuple[re.Pattern[str], Callable[[str], bool], str]] = [
        (_PATH, lambda name: (tree.root / name).exists(), "path '{}' does not exist"),
        (_MAKE, lambda name: name in tree.targets, "'make {}' is not a target of the Makefile"),
        (_MODULE, lambda name: _is_module(tree.root, name), "module '{}' does not exist"),
    ]
    if tree.verbs is not None:
        verbs = tree.verbs
        checks.append((_VERB, lambda name: name in verbs, "'stoker {}' is not a command"))
    if tree.schema is not None:
        checks.append((_KEY, tree.has_key, "configuration key '{}' is not in the schema"))
    for code in code_of(text):
        for pattern, is_known, message in checks:
            for match in pattern.finditer(code):
                name = next(group for group in match.groups() if group)
                if not is_known(name):
                    yield message.format(name)


def _is_module(root: Path, name: str) -> bool:
    path = root.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def pages(root: Path) -> list[Path]:
    """Markdown files that git knows or would add."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", "*.md"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return sorted(root / name for name in listing.split("\0") if name and (root / name).exists())


def problems(root: Path) -> list[str]:
    """All problems of all pages, one line each."""
    tree = Tree.read(root)
    found: list[str] = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        # The changelog speaks of what was, so only its links must hold.
        names = [] if page.name == "CHANGELOG.md" else unknown_names(tree, text)
        found += [f"{page.relative_to(root)}: {problem}" for problem in [*broken_links(root, page, text), *names]]
    return list(dict.fromkeys(found))


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    found = problems(root)
    for line in found:
        print(line)
    print(f"docs: {len(pages(root))} pages, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
