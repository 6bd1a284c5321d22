"""docs/configuration.md follows the schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.conf import reference
from stoker.conf.fields import paths


def test_the_page_is_up_to_date(repository: Path) -> None:
    written = (repository / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == reference.page(), "run `python -m stoker.conf.reference`"


def test_the_page_has_every_field_with_type_default_and_meaning() -> None:
    page = reference.page()
    assert "| `optim.lr` | number | `0.0003` | highest learning rate |" in page
    assert "| `model.head_dim` | integer or null | `null` | even; default hidden_size / num_heads |" in page
    assert "| `tracking.mode` | `disabled`, `offline`, `online` | `disabled` |" in page
    assert "| `model=tiny` | 1.3 million parameters;" in page
    sections = {path.rpartition(".")[0] for path in paths()}
    assert [path for path in paths() if path not in sections and f"| `{path}` |" not in page] == []


def test_a_page_out_of_date_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert reference.main([str(page), "--check"]) == 1
    assert capsys.readouterr().err == f"{page} is out of date; run `python -m stoker.conf.reference`\n"
    assert reference.main([str(page)]) == 0
    assert reference.main([str(page), "--check"]) == 0
