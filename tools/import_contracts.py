"""Import rules that import-linter's own contract types cannot say; configured in pyproject.toml, run by `make lint`.

Owns: Arrows (which folder may import which) and Reach (what may be loaded by importing one module).
Both name modules that may not exist yet or any more: a rule about a missing module holds.
"""

from __future__ import annotations

import sys
from collections import deque

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

Finding = tuple[str, str, str]  # importer, imported, where in the source


def _internal(module: str, root: str) -> bool:
    return module == root or module.startswith(root + ".")


def _where(graph: ImportGraph, importer: str, imported: str) -> str:
    return ", ".join(
        f"line {detail['line_number']}" for detail in graph.get_import_details(importer=importer, imported=imported)
    )


class Arrows(Contract):  # type: ignore[misc]
    """Folders (chapters) may import one another only along the listed arrows; inside a chapter everything goes.

    A module belongs to the chapter with the longest matching name. The root package and what belongs to no chapter
    may be imported by all and import nothing of ours.
    """

    type_name = "arrows"

    root = fields.StringField()
    chapters = fields.ListField(subfield=fields.StringField())
    allow = fields.ListField(subfield=fields.StringField())

    def _chapter(self, module: str) -> str | None:
        inner = module.removeprefix(f"{self.root}.")
        matches = [name for name in self.chapters if inner == name or inner.startswith(f"{name}.")]
        return max(matches, key=len, default=None)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        allowed = {tuple(part.strip() for part in arrow.split("->")) for arrow in self.allow}
        findings: list[Finding] = []
        for importer in sorted(graph.modules):
            if not _internal(importer, self.root):
                continue
            source = self._chapter(importer)
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                if not _internal(imported, self.root):
                    continue
                target = self._chapter(imported)
                if target is None or target == source or (source, target) in allowed:
                    continue
                findings.append((importer, imported, _where(graph, importer, imported)))
        return ContractCheck(kept=not findings, metadata={"findings": findings})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported, where in check.metadata["findings"]:
            output.print_error(f"{importer} imports {imported} ({where})")
        output.print_error("allowed: " + "; ".join(self.allow))


class Reach(Contract):  # type: ignore[misc]
    """Nothing forbidden is reached from the named modules, through any chain of our own modules.

    Imports inside functions count too. forbidden names third-party packages, or is the one word "third-party".
    """

    type_name = "reach"

    root = fields.StringField()
    modules = fields.ListField(subfield=fields.StringField())
    forbidden = fields.ListField(subfield=fields.StringField())

    def _is_forbidden(self, imported: str) -> bool:
        package = imported.partition(".")[0]
        if self.forbidden == ["third-party"]:
            return package not in sys.stdlib_module_names
        return package in self.forbidden

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        findings: list[tuple[str, list[str]]] = []
        for start in self.modules:
            for module in sorted(name for name in graph.modules if _internal(name, start)):
                findings += [(module, chain) for chain in self._chains(graph, module)]
        return ContractCheck(kept=not findings, metadata={"findings": findings})

    def _chains(self, graph: ImportGraph, start: str) -> list[list[str]]:
        """Shortest chain of imports from start to each forbidden package."""
        chains: list[list[str]] = []
        came_from: dict[str, str | None] = {start: None}
        queue = deque([start])
        while queue:
            module = queue.popleft()
            for imported in sorted(self._loaded_with(graph, module)):
                if imported in came_from:
                    continue
                came_from[imported] = module
                if _internal(imported, self.root):
                    queue.append(imported)
                elif self._is_forbidden(imported):
                    chains.append(self._path(came_from, imported))
        return chains

    def _loaded_with(self, graph: ImportGraph, module: str) -> set[str]:
        """What module imports, and the packages above it: their __init__ runs first."""
        above = module.rpartition(".")[0]
        return graph.find_modules_directly_imported_by(module) | ({above} if _internal(above, self.root) else set())

    @staticmethod
    def _path(came_from: dict[str, str | None], end: str) -> list[str]:
        path = [end]
        while (previous := came_from[path[-1]]) is not None:
            path.append(previous)
        return path[::-1]

    def render_broken_contract(self, check: ContractCheck) -> None:
        for _, chain in check.metadata["findings"]:
            output.print_error(" -> ".join(chain))
