"""What a run that the watch starts again gets of the environment it was launched with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from stoker.launcher.run.layout import RunDir
from stoker.launcher.watch_fix import environment_of_launch


def test_a_run_resumed_from_cron_gets_the_path_of_its_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {"PATH": "/opt/venv/bin:/usr/bin", "LD_LIBRARY_PATH": "/opt/lib", "HOSTNAME": "login1"}
    (tmp_path / "env.json").write_text(json.dumps({"variables": recorded}))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("HOSTNAME", "cron1")
    monkeypatch.setenv("HF_TOKEN", "of the crontab")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    with environment_of_launch(RunDir(tmp_path)):
        names = ("PATH", "LD_LIBRARY_PATH", "HOSTNAME", "HF_TOKEN")
        assert [os.environ[n] for n in names] == ["/opt/venv/bin:/usr/bin", "/opt/lib", "cron1", "of the crontab"]
    assert os.environ["PATH"] == "/usr/bin:/bin"
    assert "LD_LIBRARY_PATH" not in os.environ


@pytest.mark.parametrize("text", ["", "[]", '{"variables": 3}'])
def test_a_damaged_record_changes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "env.json").write_text(text)
    before = dict(os.environ)
    with environment_of_launch(RunDir(tmp_path)):
        assert dict(os.environ) == before
