"""Stacks of running processes: told while they hang, by the kernel where they cannot, equal ones once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stoker.launcher import procfs
from stoker.launcher.run.heartbeat import Heartbeat, Phase, Segment
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.stacks import SIGNAL, Offer
from stoker.launcher.stacks_node import Answer, Beat, collect, decode, encode, targets
from stoker.launcher.stacks_text import behind, parse, ranges, render, shorten

PROGRAM = """
import os, sys, time
from pathlib import Path
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.stacks import offer
rank = sys.argv[2]
offer(RunDir(Path(sys.argv[1])), 1, "zygote")
if os.fork():
    os.wait()
    sys.exit()
offer(RunDir(Path(sys.argv[1])), 1, "g1-r" + rank)
child = os.fork()  # a data worker of the user's: it inherits the offer and is none of ours
def stuck_here():
    os.write(1, b"%d\\n" % os.getpid()); time.sleep(600)  # one line, so that it is in it once it has said so
stuck_here()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], int]]:
    """Start a worker that hangs; its pid."""
    (tmp_path / "run").mkdir()
    started = []

    def begin(rank: int) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        pids = {int(process.stdout.readline()), int(process.stdout.readline())}
        (worker,) = (p for p in pids if procfs.status(p)["PPid"] == str(process.pid))
        return worker

    yield begin
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_hanging_workers_tell_their_line_and_go_on(start: Callable[[int], int], tmp_path: Path) -> None:
    pids = {0: start(0), 1: start(1)}
    run = RunDir(tmp_path / "run")
    for _ in range(2):  # the second time is as good as the first
        found = [t for t in targets(run, 1, None) if t.offer.rank is not None]
        assert [(t.offer.rank, t.pid) for t in found] == sorted(pids.items()), "forks of a worker are not asked"
        for answer in collect(found, limit=60.0):
            assert answer.state == ""
            assert parse(answer.text)[0].frames[0] == "<string>:14 in stuck_here"
    assert targets(run, 2, None) == [], "another attempt"
    assert targets(RunDir(tmp_path / "other"), 1, None) == []
    assert targets(run, 1, "another-node") == []
    assert all(procfs.standing(pid) for pid in pids.values())


def test_a_run_directory_of_the_same_name_elsewhere_is_another_run(start: Callable[[int], int], tmp_path: Path) -> None:
    start(0)
    namesake, link = tmp_path / "elsewhere" / "run", tmp_path / "linked" / "run"
    namesake.mkdir(parents=True)
    link.parent.mkdir()
    link.symlink_to(tmp_path / "run")
    assert targets(RunDir(namesake), 1, None) == []
    assert len(targets(RunDir(link), 1, None)) == 2, "by whatever path"


OWN_SCRIPT = """
import os, subprocess, sys
from pathlib import Path
from stoker.launcher.run.heartbeat import Heartbeat, Phase, Segment
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.stacks import offer
offer(RunDir(Path(sys.argv[1])), 1, "zygote")
import time
segment = Segment.create("g2-r5")
segment.beat(Heartbeat(2, Phase.STEP, 0, 9, 4, time.monotonic(), 0.1))
child = subprocess.Popen(["sleep", "600"], env=os.environ | {"RANK": "5"})
other = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
child.wait()
"""


def test_a_program_of_the_users_own_is_told_by_the_kernel_and_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no py-spy
    (tmp_path / "run").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", OWN_SCRIPT, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PATH": "/bin:/usr/bin"},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            found = [t for t in targets(RunDir(tmp_path / "run"), 1, None) if t.offer.rank is not None]
            assert [(t.offer.role, t.pid) for t in found] == [("g2-r5", child)]
            (answer,) = collect(found, limit=1.0)
            assert "a program of your own: its Python stacks need py-spy" in answer.state
            assert answer.beat is not None
            assert (answer.beat.step, answer.beat.sequence) == (9, 4)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_stopped_worker_is_told_by_the_kernel_and_the_others_are_not_waited_for(
    start: Callable[[int], int], tmp_path: Path
) -> None:
    stopped = start(0)
    start(1)
    os.kill(stopped, signal.SIGSTOP)
    found = [t for t in targets(RunDir(tmp_path / "run"), 1, None) if t.offer.rank is not None]
    began = time.monotonic()
    first, second = collect(found, limit=60.0)
    assert time.monotonic() - began < 30
    assert (first.state, first.text) == ("stopped", "")
    assert second.state == ""
    # Nothing is left that would hit it when it wakes.
    assert not procfs.has_signal(procfs.status(stopped)["ShdPnd"], SIGNAL)


def test_a_process_that_does_not_answer_is_waited_for_up_to_the_limit(
    start: Callable[[int], int], tmp_path: Path
) -> None:
    start(0)
    (target,) = (t for t in targets(RunDir(tmp_path / "run"), 1, None) if t.offer.rank is not None)
    os.kill(target.pid, signal.SIGSTOP)
    # As a process that is stopped, or hangs in the kernel, right after the signal was sent.
    unaware = procfs.Standing("S", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procfs, "standing", lambda *_: unaware)
        (answer,) = collect([target], limit=0.2)
    assert answer.state == "sleeping, but it gave no answer within 0.2 s"


def test_a_process_that_does_not_catch_the_signal_is_never_sent_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        sleeper = Offer("run", 1, "n1", "g1-r0", process.pid)
        from stoker.launcher.stacks_node import Target

        (answer,) = collect([Target(sleeper, process.pid, 0)], limit=0.2)
        assert answer.text == ""
        assert process.poll() is None
        process.kill()


def test_the_heartbeat_is_read_from_the_process_itself(tmp_path: Path) -> None:
    segment = Segment.create("g1-r3")
    try:
        segment.beat(Heartbeat(1, Phase.EVAL, 2, 7, 41, time.monotonic() - 5, 0.1))
        from stoker.launcher.stacks_node import Target, read_beat

        target = Target(Offer("run", 1, "n1", "g1-r3", os.getpid()), os.getpid(), 0, (os.getpid(), segment.fd))
        beat = read_beat(target)
        assert beat is not None
        assert (beat.phase, beat.step, beat.micro, beat.sequence) == ("eval", 7, 2, 41)
        assert 5 <= beat.age < 60
    finally:
        segment.close()


# ---- /proc


def test_state_is_read_from_proc(tmp_path: Path) -> None:
    process = tmp_path / "42"
    for thread, letter in ((42, "D"), (43, "S"), (44, "D")):
        directory = process / "task" / str(thread)
        directory.mkdir(parents=True)
        # A program may be called anything.
        (directory / "stat").write_text(f"{thread} (a) b (c) {letter} 1 42 42 0 -1 4194560")
        (directory / "status").write_text("Name:\ta) R\nSigBlk:\t0000004000000000\n")
    (process / "wchan").write_text("rpc_wait_bit_killable")
    (process / "stack").write_text("[<0>] rpc_wait_bit_killable+0x1e/0xa0 [sunrpc]\n[<0>] nfs_wait+0x1/0x2\n")
    (process / "status").write_text("Name:\ta\nNSpid:\t42\t7\n")
    found = procfs.standing(42, tmp_path)
    assert found is not None
    assert (found.words, found.wchan, found.blocked_threads) == (
        "in uninterruptible sleep", "rpc_wait_bit_killable", 1,
    )  # fmt: skip
    assert found.kernel == ("rpc_wait_bit_killable+0x1e/0xa0 [sunrpc]", "nfs_wait+0x1/0x2")
    assert procfs.own_pid(42, tmp_path) == 7
    assert procfs.has_signal(procfs.status(42, tmp_path, 43)["SigBlk"], 39)
    assert not procfs.has_signal(procfs.status(42, tmp_path, 43)["SigBlk"], 38)
    assert procfs.standing(99, tmp_path) is None


# ---- text

DUMP = """Thread 0x00007f1c2d7fa640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f1c2d7fa641 (most recent call first):
  <no Python frame>

Current thread 0x00007f1c4f2a9740 [python] (most recent call first):
  File "/tmp/stoker-0/0123456789abcdef0123456789abcdef.2/code/stoker/train/comm.py", line 47 in wait
  File "<string>", line ??? in <module>
  File "<frozen runpy>", line 88 in _run_code
"""


def test_a_dump_is_parsed_main_thread_first() -> None:
    main, other = parse(DUMP)
    assert main.is_main
    assert main.frames == ("stoker/train/comm.py:47 in wait", "<string>:??? in <module>")
    assert other.frames == ("threading.py:327 in wait",)
    assert parse("garbage\n  File torn") == ()


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/x/.venv/lib/python3.11/site-packages/torch/nn/a.py", "torch/nn/a.py"),
        ("/home/me/train.py", "/home/me/train.py"),
        ("<frozen runpy>", "<frozen runpy>"),
    ],
)
def test_paths_are_shortened_to_what_differs(path: str, short: str) -> None:
    assert shorten(path) == short


def answer(rank: int, text: str, sequence: int, step: int = 5, **fields: str) -> Answer:
    return Answer(f"n{rank // 4 + 1}", f"g1-r{rank}", rank, 100 + rank, fields.get("state", ""), text,
                  fields.get("wchan", ""), beat=Beat("step", step, 1, sequence, 30.0 + rank))  # fmt: skip


def test_equal_stacks_are_told_once_and_the_one_behind_is_named() -> None:
    here = 'Current thread 0x1 (most recent call first):\n  File "/a/comm.py", line 47 in wait\n'
    there = 'Current thread 0x2 (most recent call first):\n  File "/a/data.py", line 9 in read\n'
    answers = [answer(7, there, 12), *(answer(r, here.replace("0x1", f"0x{r}1"), 13) for r in range(7))]
    assert render(answers) == (
        "[0-6] on n1, n2\n"
        "  phase step, 5 steps done, micro-batch 1, 13 collectives begun; moved 36.0 s ago\n"
        "  main thread:\n"
        "    /a/comm.py:47 in wait\n"
        "\n"
        "[7] on n2, pid 107\n"
        "  phase step, 5 steps done, micro-batch 1, 12 collectives begun; moved 37.0 s ago\n"
        "  main thread:\n"
        "    /a/data.py:9 in read\n"
        "\n"
        "rank 7 (n2) behind the others: fewest steps, then collectives"
    )


def test_nobody_is_behind_when_all_are_in_one_place() -> None:
    assert behind([answer(0, "", 3), answer(1, "", 3)]) == []
    assert behind([answer(0, "", 3, step=4), answer(1, "", 2, step=5)]) == [0]


def test_a_rank_without_python_stack_shows_what_the_kernel_says() -> None:
    text = render([answer(0, "", 3, state="in uninterruptible sleep", wchan="nfs_wait")])
    assert "  in uninterruptible sleep in nfs_wait" in text.splitlines()


def test_ranges() -> None:
    assert ranges([9, 0, 1, 2, 5, 6, 2]) == "0-2, 5-6, 9"


# ---- the way back


def test_answers_of_nodes_survive_being_mixed_and_banners() -> None:
    first, second = [answer(0, DUMP * 50, 3)], [answer(4, "x\u00e9\n" * 500, 4)]
    lines = [line for pair in zip(encode("n1", first), encode("n2", second), strict=False) for line in pair]
    lines += [*encode("n1", first)[1:], *encode("n2", second)[1:]]
    found = decode("\n".join(["module: loaded", *reversed(lines), "srun: error: x"]))
    assert found == {"n1": first, "n2": second}


def test_a_node_whose_answer_is_cut_off_has_none() -> None:
    lines = encode("n1", [answer(0, os.urandom(2000).hex(), 3)])
    assert len(lines) > 2
    assert decode("\n".join(lines[:-1])) == {}
    assert decode("\n".join([*lines[:-1], "stoker-stacks n1 x y z"])) == {}
