"""A node that cannot start a run: the batch script really runs, with stand-ins for Slurm's commands on its PATH."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from stoker.conf.schema import ClusterConfig, Config, Continuation, ResilienceConfig
from stoker.launcher.render import render, script_of
from stoker.launcher.run.badnodes import known
from stoker.launcher.run.layout import RunDir
from stoker.launcher.run.submissions import new_submission, submissions

RUN_ID = "261130-104733-x7q2"
SHOWN = "JobId=7 JobName=x JobState={} Reason=None Requeue=1 Restarts=0 BatchFlag=1 ExcNodeList=n9 NodeList=n1"
NODES = "n1 mix\nn2 idle\nn3 alloc\nn4 drain\nn5 down*\nn9 idle\n"
# Each call is one line; a `fail` file names how many calls are refused before one is heard.
PROGRAM = """#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
left=$(cat "$CALLS.fail-$(basename "$0")" 2>/dev/null || echo 0)
[ "$left" -le 0 ] || { echo $((left - 1)) > "$CALLS.fail-$(basename "$0")"; exit 1; }
case "$(basename "$0") $*" in
    "scontrol -o show job "*) cat "$CALLS.job" ;;
    "scontrol show hostnames "*) tr , '\\n' <<< "${@: -1}" ;;
    sinfo*) cat "$CALLS.nodes" ;;
    sbatch*) env > "$CALLS.env"; echo "Submitted batch job 8" ;;
esac
"""
# CODE: how the supervisor ends; LAST: how its aftermath does.
PYTHON = """#!/bin/bash
[ "$1" != -c ] || exit 0
echo "$*" >> "$CALLS"
case "$*" in *aftermath*) exit "${LAST:-75}" ;; esac
exit "${CODE:-0}"
"""


class Node:
    """A batch host n1 on which job 7 begins."""

    def __init__(self, tmp_path: Path) -> None:
        self.run = RunDir(tmp_path / "run")
        self.run.path.mkdir()
        self.run.submissions.mkdir()
        self.calls = tmp_path / "calls"
        self.job, self.nodes = Path(f"{self.calls}.job"), Path(f"{self.calls}.nodes")
        self.job.write_text(SHOWN.format("RUNNING") + "\n")
        self.nodes.write_text(NODES)
        self.bin = tmp_path / "bin"
        self.bin.mkdir()
        for name in ("scontrol", "sinfo", "sbatch", "sleep"):
            (self.bin / name).write_text(PROGRAM)
            (self.bin / name).chmod(0o755)
        self.python = self.bin / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def refuse(self, program: str, times: int) -> None:
        Path(f"{self.calls}.fail-{program}").write_text(str(times))

    def start(
        self, *setup: str, chain: bool = False, job: str = "7", python: str | None = None, **env: str
    ) -> tuple[int, str]:
        """Exit code and standard error; the calls are in `made`."""
        self.calls.write_text("")
        continuation = Continuation.chain if chain else Continuation.requeue
        config = Config(
            cluster=ClusterConfig(setup=list(setup), nodes=2, comment="mine"),
            resilience=ResilienceConfig(continuation=continuation, backoff=20.0),
        )
        file = self.run.path / "submit.sbatch"
        file.write_text(render(script_of(config, self.run.path, RUN_ID, "0.1.0", python or str(self.python))))
        slurm = {"SLURM_JOB_ID": job, "SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "p"}
        environ = os.environ | slurm | {"CALLS": str(self.calls), "PATH": f"{self.bin}:{os.environ['PATH']}"} | env
        done = subprocess.run(["bash", str(file)], env=environ, capture_output=True, text=True, timeout=60, check=False)
        self.made = self.calls.read_text().splitlines()
        return done.returncode, done.stderr

    def asked(self) -> list[str]:
        """What was asked of Slurm that changes anything."""
        return [c for c in self.made if c.startswith(("scontrol requeue", "scontrol update", "sbatch"))]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


ELSEWHERE = ["scontrol requeue 7", "scontrol update jobid=7 ExcNodeList=n9,n1 StartTime=now+0"]


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ("cat /nonexistent/module", "cluster.setup failed with exit code 1 at: cat /nonexistent/module"),
        ("exit 3", "cluster.setup failed with exit code 3 at: exit 3"),
        ("set -u; : $nowhere", "cluster.setup failed with exit code"),
        ("false 'it\\'", "cluster.setup failed with exit code 1 at: false 'it'"),
    ],
)
def test_what_fails_in_the_set_up_of_one_node_is_tried_on_another(node: Node, setup: str, reason: str) -> None:
    code, error = node.start(setup)
    assert code == 1
    assert node.asked() == ELSEWHERE, error
    found = known(node.run.path.parent / ".bad-nodes", RUN_ID)
    assert list(found) == ["n1"]
    assert found["n1"].reason.startswith(reason)
    assert found["n1"].is_own, "another run's environment may well work on this node"


def test_an_interpreter_that_does_not_work_is_tried_on_another_node(node: Node) -> None:
    _, error = node.start(python="/nonexistent/python")
    assert node.asked() == ELSEWHERE, error


def test_code_that_cannot_be_unpacked_is_tried_on_another_node(node: Node) -> None:
    _, error = node.start(CODE="71")
    assert node.asked() == ELSEWHERE, error


def test_a_mistake_that_fails_everywhere_ends_on_the_third_node_and_waits_in_between(node: Node) -> None:
    for number, delay in ((1, 0), (2, 20)):
        node.start("false", SLURMD_NODENAME=f"n{number}")
        assert node.asked()[-1].endswith(f"StartTime=now+{delay}")
    code, error = node.start("false", SLURMD_NODENAME="n3")
    assert (code, node.asked()) == (1, [])
    assert "not tried elsewhere: 3 nodes in a row could not start it" in error


def test_only_failed_starts_since_the_last_attempt_of_this_job_count(node: Node) -> None:
    for number in (1, 2):
        node.start("false", SLURMD_NODENAME=f"n{number}", SLURM_RESTART_COUNT="40")
    node.run.attempts.mkdir()
    node.start("false", SLURMD_NODENAME="n3", SLURM_RESTART_COUNT="41")
    assert node.asked() != []
    node.start("false", SLURMD_NODENAME="n3", job="17")
    assert node.asked() != []


def test_without_a_place_for_findings_the_restarts_are_counted(node: Node) -> None:
    (node.run.path.parent / ".bad-nodes").write_text("")
    node.start("false", SLURM_RESTART_COUNT="1")
    assert node.asked() != []
    node.start("false", SLURM_RESTART_COUNT="2")
    assert node.asked() == []


def test_a_controller_that_is_away_for_a_moment_is_asked_again(node: Node) -> None:
    node.refuse("scontrol", 3)
    node.start("false")
    assert node.asked() == ELSEWHERE
    assert [c for c in node.made if c.startswith("sleep")] == ["sleep 1", "sleep 3", "sleep 9"]


def test_where_sinfo_does_not_answer_the_run_goes_on(node: Node) -> None:
    node.refuse("sinfo", 99)
    node.start("false")
    assert node.asked() == ELSEWHERE


def test_nodes_that_are_down_or_drained_are_none_to_go_to(node: Node) -> None:
    node.nodes.write_text(NODES.replace("n3 alloc", "n3 drng"))
    _, error = node.start("false")
    assert node.asked() == []
    assert "too few other nodes are left" in error


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "PENDING"])
def test_a_job_that_is_being_ended_is_not_requeued(node: Node, state: str) -> None:
    node.job.write_text(SHOWN.format(state))
    assert node.start("false")[0] == 1
    assert node.asked() == []


def test_an_allocation_of_the_user_s_own_is_left_alone(node: Node) -> None:
    node.job.write_text(SHOWN.format("RUNNING").replace("BatchFlag=1", "BatchFlag=0"))
    node.start("false", chain=True)
    assert node.asked() == []


@pytest.mark.parametrize(("required", "asked"), [("n1,n2", []), ("n2", ELSEWHERE), ("(null)", ELSEWHERE)])
def test_a_job_that_asks_for_this_very_node_cannot_do_without_it(node: Node, required: str, asked: list[str]) -> None:
    node.job.write_text(f"{SHOWN.format('RUNNING')} ReqNodeList={required}".replace("NodeList=n1 ", ""))
    node.start("false")
    assert node.asked() == asked


def test_in_a_chain_another_job_with_a_token_of_its_own_takes_its_place(node: Node) -> None:
    new_submission(node.run, "sbatch", token="aa").set_job("7")
    node.refuse("sbatch", 1)  # whether it was heard or not: the token tells
    env = {"STOKER_WARNED": "1", "STOKER_SUBMISSION": "aa", "SLURM_RESTART_COUNT": "0", "SLURM_CONF": "/c"}
    node.start("false", chain=True, **env)
    _, again = submissions(node.run)
    token = again.intention["token"]
    assert (again.number, again.mode, again.intention["after"], again.job_id) == (2, "chain", "7", None)
    wanted = f"sbatch --dependency=afterany:7 --begin=now+0 --exclude=n9,n1 --comment=mine stoker:{token} "
    assert node.asked() == [f"{wanted}{node.run.path}/submit.sbatch"] * 2
    given = dict(line.split("=", 1) for line in Path(f"{node.calls}.env").read_text().splitlines() if "=" in line)
    assert (given["STOKER_SUBMISSION"], given["STOKER_AFTER"], given["STOKER_FAILED_STARTS"]) == (token, "7", "1")
    assert [k for k in given if k.startswith(("SLURM", "STOKER_WARNED"))] == ["SLURM_CONF"]
    assert not list(node.run.submissions.glob(".tmp*"))


def test_a_chain_ends_on_the_third_node_too(node: Node) -> None:
    node.start("false", chain=True, STOKER_FAILED_STARTS="1")
    assert "--begin=now+20" in node.asked()[0]
    node.start("false", chain=True, STOKER_FAILED_STARTS="2")
    assert node.asked() == []


def test_shell_options_of_the_set_up_do_not_outlive_it(node: Node) -> None:
    code, error = node.start("set -euf -o pipefail")
    assert (code, error) == (0, "")
    assert [c.split()[2] for c in node.made] == ["stoker.launcher.supervise"]


def test_an_exit_trap_of_the_set_up_stays(node: Node) -> None:
    node.start('trap \'echo "ended $?" >> "$CALLS"\' EXIT', CODE="75")
    assert node.made[-1] == "ended 75"


@pytest.mark.parametrize(
    ("code", "says"), [(0, []), (1, []), (2, []), (75, []), (70, ["70"]), (137, ["137"]), (143, ["143"])]
)
def test_a_supervisor_that_could_not_say_its_last_word_has_it_said(node: Node, code: int, says: list[str]) -> None:
    assert node.start(CODE=str(code))[0] == (75 if says else code)
    words = [c.split() for c in node.made]
    assert [w[-1] for w in words if "stoker.launcher.aftermath" in w] == says


def test_where_even_that_breaks_down_another_node_is_tried(node: Node) -> None:
    _, error = node.start(CODE="137", LAST="70")
    assert node.asked() == ELSEWHERE, error
    node.start(CODE="137", LAST="70", chain=True)
    assert node.asked() == [], "the successor may be in the queue already"


def test_the_last_word_is_given_by_a_child_of_the_batch_script(node: Node) -> None:
    """chain.batch_environment takes the job's own environment from it."""
    node.python.write_text(
        '#!/bin/bash\n[ "$1" = -c ] || { [ $PPID = $STOKER_BATCH ] && echo "$3" >> "$CALLS"; exit 137; }'
    )
    node.start()
    assert node.made[-1] == "stoker.launcher.aftermath"


def test_a_supervisor_is_born_deaf_to_the_warning(node: Node) -> None:
    """A shell that resets a trap between fork and exec dies of a warning that comes then: it is handed on only to what
    hears it, and the first thing that the child does is to ignore it."""
    text = (node.run.path / "submit.sbatch", node.start())[0].read_text()
    assert text.index("(trap '' USR1; ") < text.index("child=$!") < text.index("trap warn USR1")
    assert text.count("-USR1") == 1
    assert text.index("|| hears ||") < text.index('kill -USR1 "$child"')
