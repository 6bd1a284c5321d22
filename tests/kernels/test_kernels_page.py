"""docs/kernels.md promises no implementation that is not in the table, and shows what the command prints."""

from pathlib import Path

from stoker.kernels.device import Device
from stoker.kernels.implementations import APEX, IMPLEMENTATIONS, NATIVE
from stoker.kernels.overview import overview, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def rows() -> dict[str, list[str]]:
    """op -> the other columns."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        ops, *columns = (cell.strip() for cell in line.strip("|").split("|"))
        if line.startswith("|") and len(columns) == 4 and ops not in ("op", "---"):
            found |= dict.fromkeys(ops.split(", "), columns)
    return found


def test_the_page_lists_ops_with_the_implementations_that_they_have() -> None:
    found = rows()
    assert len(found) > 10
    others: dict[str, list[str]] = {}
    for row in IMPLEMENTATIONS:
        if row.name not in ("reference", "native", "apex"):
            others.setdefault(row.op, []).append(row.name)
    for op, (native, apex, other, dtypes) in found.items():
        assert native == ("yes" if op in NATIVE else ""), op
        assert apex in ("", f"`{APEX[op][0]}`" if op in APEX else ""), op
        assert sorted(filter(None, other.split(", "))) == sorted(others.get(op, [])), op
        assert bool(dtypes) == bool(native), op


def test_the_page_shows_what_the_command_prints() -> None:
    # Without the first line, which has torch's version in it.
    shown = table(overview(Device("cpu"))).splitlines()
    block = "\n".join(f"    {line}".rstrip() for line in shown)
    assert f"\n\n{block}\n\n" in PAGE.read_text(encoding="utf-8")
