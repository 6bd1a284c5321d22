"""A W&B server as far as wandb's service asks for one: runs, their history lines by offset, and how to resume them.

It keeps lines as the real one does: a request says at which offset its lines stand, so that a repeated request
changes nothing. Only for tests; nothing leaves this machine.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StoredRun:
    config: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # by offset
    exit_codes: list[int] = field(default_factory=list)

    @property
    def history(self) -> list[dict[str, Any]]:
        return [self.lines[offset] for offset in sorted(self.lines)]

    @property
    def steps(self) -> list[int]:
        return [line["_step"] for line in self.history]


class Server:
    """`runs`: by id. `refuses`: keys are not accepted. `requests`: everything that was asked, as text."""

    def __init__(self) -> None:
        self.url = ""
        self.runs: dict[str, StoredRun] = {}
        self.refuses = False
        self.requests: list[str] = []
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/graphql"):
            handler = {
                "UpsertBucket": self._upsert,
                "RunResumeStatus": self._resume_status,
                "CreateRunFiles": self._create_files,
            }.get(body.get("operationName", ""))
            return {"data": handler(body["variables"]) if handler else {}}
        if path.endswith("/file_stream"):
            self._store(path.split("/")[-2], body)
        return {}

    def _upsert(self, v: dict[str, Any]) -> dict[str, Any]:
        is_new = v["name"] not in self.runs
        run = self.runs.setdefault(v["name"], StoredRun())
        run.name = v.get("displayName") or run.name
        run.config |= {k: item["value"] for k, item in json.loads(v.get("config") or "{}").items()}
        project = {"id": "p", "name": v.get("project") or "p", "entity": {"id": "e", "name": "team"}}
        bucket = {"id": v["name"], "name": v["name"], "displayName": run.name, "description": "", "sweepName": None}
        bucket |= {"config": "{}", "project": project, "historyLineCount": len(run.lines)}
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}

    def _resume_status(self, v: dict[str, Any]) -> dict[str, Any]:
        bucket = None
        if run := self.runs.get(v["name"]):
            tail = json.dumps([json.dumps(line) for line in run.history[-1:]])
            bucket = {"id": v["name"], "name": v["name"], "displayName": run.name, "tags": [], "notes": ""}
            bucket |= {"summaryMetrics": "{}", "config": json.dumps({k: {"value": x} for k, x in run.config.items()})}
            bucket |= {"historyLineCount": len(run.lines), "historyTail": tail, "eventsLineCount": 0}
            bucket |= {"eventsTail": "[]", "logLineCount": 0, "wandbConfig": json.dumps({"t": 1})}
        return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "team"}, "bucket": bucket}}

    def _create_files(self, v: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in v["files"]]
        return {"createRunFiles": {"runID": v["run"], "uploadHeaders": [], "files": files}}

    def _store(self, run_id: str, body: dict[str, Any]) -> None:
        run = self.runs[run_id]
        if history := (body.get("files") or {}).get("wandb-history.jsonl"):
            for i, line in enumerate(history["content"]):
                run.lines[history["offset"] + i] = json.loads(line)
        if body.get("complete"):
            run.exit_codes.append(body["exitcode"])


@contextmanager
def running() -> Iterator[Server]:
    """A server on a free port of the loopback interface."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            if server.refuses:
                self._reply(401, b'{"errors": [{"message": "permission denied"}]}')
                return
            with server.lock:
                server.requests.append(f"{self.path} {data.decode('utf-8', 'replace')}")
                is_json = self.headers.get("content-type") == "application/json"
                answer = server.answer(self.path, json.loads(data)) if is_json else {}
            self._reply(200, json.dumps(answer).encode())

        do_GET = do_PUT = do_POST

        def _reply(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class QuietServer(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass  # a killed client

    with QuietServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
