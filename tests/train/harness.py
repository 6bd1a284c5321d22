"""What trainer tests share: tiny data and configurations, and ranks forked from a process that has run no torch op.

Run as a program it is that process: it reads requests as lines of JSON, forks a process per rank, and answers with
what they returned. A fork after torch operations may hang, and importing torch in every rank takes seconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.conf.schema import Config, DataSource
from stoker.launcher.run.attempts import Fence
from stoker.launcher.run.files import append_line, to_json, write_json
from stoker.launcher.run.layout import RunDir

HOST = "127.0.0.1"


# ---- data, configuration, context


def make_data(prefix: Path, tokens: int = 20_000, vocab: int = 64, seed: int = 0) -> None:
    """A learnable text of short documents: each token is the last one plus a small random number."""
    import numpy as np
    from stoker.train.data.indexed_writer import IndexWriter

    random = np.random.default_rng(seed)
    text = np.cumsum(random.integers(1, 4, tokens)) % vocab
    with IndexWriter(prefix, np.uint16) as writer:
        for document in np.array_split(text, max(1, tokens // 100)):
            writer.add(document)


def tiny_config(prefix: str | Path, steps: int = 10, **sections: dict[str, Any]) -> Config:
    """A model that takes milliseconds per step; `sections` changes fields: train={"micro_batch": 2}."""
    config = Config(seed=7)
    config.train = replace(config.train, steps=steps, global_batch=8, micro_batch=4)
    config.model = replace(
        config.model, vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48
    )
    config.data = replace(config.data, sources=[DataSource(str(prefix))], seq_len=32, validation_tokens=2_000)
    config.optim = replace(config.optim, lr=1e-2, min_lr=1e-3, warmup_steps=min(2, steps))
    config.checkpoint = replace(config.checkpoint, interval=0)
    config.parallel = replace(config.parallel, bucket_mb=0.01, timeout=60)
    for name, fields in sections.items():
        setattr(config, name, replace(getattr(config, name), **fields))
    return config


def make_context(run: str | Path, attempt: int = 1, generation: int = 1, pulse: Any = None) -> Any:
    """A run directory as the launcher and supervisor leave it; reports are appended to its attempt's events."""
    from stoker.train.context import RunContext
    from stoker.train.pulse import Pulse

    directory = RunDir(Path(run))
    number = directory.attempt(attempt)
    (number.path / "events").mkdir(parents=True, exist_ok=True)
    if not directory.run.exists():
        write_json(directory.run, {"id": "tiny"})

    def report(event: str, **fields: Any) -> None:
        append_line(number.events("test"), to_json({"event": event, **fields}))

    return RunContext(
        directory, "tiny", number, generation, Fence(directory, attempt), pulse or Pulse(None, generation), report
    )


def train(
    run: str | Path, config: Config, grid: Any = None, attempt: int = 1, generation: int = 1, pulse: Any = None
) -> Any:
    """One pass: build, run, close. Returns the Trainer (for its weights) and Ended."""
    from stoker.train.grid import single
    from stoker.train.loop import Trainer

    context = make_context(run, attempt, generation, pulse)
    trainer = Trainer.build(config, grid or single(), context)
    try:
        return trainer, trainer.run()
    finally:
        trainer.close()


def metrics(run: str | Path, attempt: int = 1, generation: int = 1) -> list[dict[str, Any]]:
    text = RunDir(Path(run)).attempt(attempt).metrics(generation).read_text()
    return [json.loads(line) for line in text.splitlines()]


def events(run: str | Path, attempt: int = 1) -> list[dict[str, Any]]:
    text = RunDir(Path(run)).attempt(attempt).events("test").read_text()
    return [json.loads(line) for line in text.splitlines()]


def digest(trainer: Any) -> str:
    """Of all persistent tensors, bit by bit."""
    import hashlib

    import torch

    sha = hashlib.sha256()
    for entry in trainer.entries():
        sha.update(entry.name.encode())
        sha.update(entry.tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


# ---- ranks


class Ranks:
    """The client's side: `ranks.run(2, function, key=value)` runs a module-level function in forked ranks.

    The function gets a Membership of its rank and the JSON values, and returns one. An exception in any rank ends all
    of them and is raised here with its traceback; `may_die` lists ranks whose death is part of the test (their result
    is None). lean: ranks begin with what every worker imports, and nothing that only some need.
    """

    def __init__(self, lean: bool = False) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__, *(["--lean"] if lean else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *,
        may_die: tuple[int, ...] = (),
        timeout: float = 60,
        **values: Any,
    ) -> list[Any]:
        request = {
            "file": function.__code__.co_filename,
            "function": function.__name__,
            "size": size,
            "values": values,
            "may_die": may_die,
            "timeout": timeout,
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return list(answer["results"])

    def close(self) -> None:
        # Nothing of it is needed any more, and an orderly end of Python with torch takes long on a busy machine.
        self._server.kill()
        self._server.communicate()


def _serve() -> None:
    # Imported once, before the forks.
    import stoker.train.loop

    if "--lean" not in sys.argv:
        import stoker.train.parallel.fsdp  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print must not mix with the answers
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed import TCPStore

    pipes: dict[int, int] = {}
    pids: list[int] = []
    port_read, port_write = os.pipe()
    for rank in range(request["size"]):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _rank(request, rank, port_read, write)
        os.close(write)
        pids.append(pid)
        pipes[read] = rank
    # Only now: the store has threads, and a fork beside a thread at work may inherit a lock that nobody opens.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    os.write(port_write, struct.pack("=i", store.port) * request["size"])
    try:
        return _collect(request, pipes)
    finally:
        os.close(port_read)
        os.close(port_write)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # ended ones are zombies until the next line, so the number is still theirs
            os.waitpid(pid, 0)
        for read in pipes:
            os.close(read)


def _collect(request: dict[str, Any], pipes: dict[int, int]) -> dict[str, Any]:
    results: dict[int, Any] = {}
    texts = dict.fromkeys(pipes, b"")
    deadline = time.monotonic() + request["timeout"]
    while len(results) < len(pipes):
        ready = select.select([p for p, r in pipes.items() if r not in results], [], [], deadline - time.monotonic())[0]
        if not ready:
            return {"error": f"ranks {sorted(set(pipes.values()) - set(results))} gave no answer in time"}
        for pipe in ready:
            data = os.read(pipe, 1 << 20)
            texts[pipe] += data
            if data:
                continue
            rank, text = pipes[pipe], texts[pipe].decode()
            if not text and rank not in request["may_die"]:
                return {"error": f"rank {rank} died"}
            answer = json.loads(text) if text else {"result": None}
            if "error" in answer:
                return {"error": f"rank {rank}:\n{answer['error']}"}
            results[rank] = answer["result"]
    return {"results": [results[r] for r in sorted(results)]}


def _rank(request: dict[str, Any], rank: int, port_read: int, write: int) -> None:
    """In the fork; never returns."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    try:
        (port,) = struct.unpack("=i", os.read(port_read, 4))
        import torch
        from stoker.train.grid import Membership

        torch.set_num_threads(1)
        spec = importlib.util.spec_from_file_location("rank_module", request["file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["rank_module"] = module  # where dataclasses look for the module of a class
        spec.loader.exec_module(module)
        member = Membership(rank, request["size"], rank, 1, 1, HOST, port)
        answer = {"result": getattr(module, request["function"])(member, **request["values"])}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    os.write(write, json.dumps(answer).encode())
    # Not sys.exit: the exit handlers of the parent's libraries are not this process's to run.
    os._exit(0)


if __name__ == "__main__":
    _serve()
