"""Every parser of Slurm's text against recorded outputs of 22.05, 24.11 and 25.05, and against their JSON as oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stoker.conf.slurm_time import parse_time
from stoker.launcher import jobinfo, site, slurm, slurm_text
from stoker.launcher.policy_types import JobFate
from stoker.launcher.rehearsal import observe

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = ("22.05", "24.11", "25.05")
pytestmark = pytest.mark.parametrize("version", VERSIONS)


def text(version: str, name: str) -> str:
    return (RECORDED / version / f"{name}.txt").read_text()


def oracle(version: str, what: str) -> list[dict[str, Any]]:
    """Entries of a JSON recording, in one shape for all versions."""
    content = json.loads((RECORDED / version / f"{what}.json").read_text())
    release = next(content["meta"][key] for key in ("slurm", "Slurm") if key in content["meta"])["release"]
    assert release.startswith(version)
    return [plain(entry) for entry in content[what]]


def plain(value: Any) -> Any:
    """{set, infinite, number} becomes the number, None for not set, "infinite"; a list of words one text."""
    if isinstance(value, dict) and {"set", "infinite", "number"} == set(value):
        return "infinite" if value["infinite"] else value["number"] if value["set"] else None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "+".join(value)
    return value


def jobs(version: str) -> dict[str, jobinfo.JobInfo]:
    """By JobId, each record read alone, as the supervisor reads its own."""
    records = text(version, "scontrol-show-job").split("\n\n")
    found = [jobinfo.parse(record.strip("\n")) for record in records if record.strip()]
    return {info.fields["JobId"]: info for info in found}


STATES = {
    "1": "COMPLETED", "2": "FAILED", "3": "FAILED", "4": "RUNNING", "5": "PENDING", "6": "PENDING", "7": "PENDING",
    "8": "PENDING", "9": "PENDING", "10": "PENDING", "11": "PENDING", "12": "SUSPENDED", "13": "CANCELLED",
    "14": "RUNNING", "15": "RUNNING", "16": "RUNNING", "17": "RUNNING", "18": "PENDING",
}  # fmt: skip


def test_jobs(version: str) -> None:
    found = jobs(version)
    # 22.05 was recorded while its job 17 was being requeued, the others before.
    expected = STATES | ({"17": "COMPLETING"} if version == "22.05" else {})
    assert {job: info.state for job, info in found.items()} == expected
    assert found["14"].fields["JobName"] == "name with spaces"
    assert found["5"].fields["ArrayTaskId"] == "2,4,6%1"
    assert found["4"].fields["NodeList"] == "n[1-2]"
    assert found["8"].fields["Dependency"] == "afterok:4(unfulfilled)"
    assert found["1"].fields["ReqB:S:C:T"] == "0:0:*:*"
    assert found["17"].fields["Restarts"] == ("1" if version == "22.05" else "0")
    assert found["3"].evidence["ExitCode"] == "0:9"
    assert {found[job].fields["WorkDir"] for job in found} == {"/cluster"}


def test_jobs_agree_with_json(version: str) -> None:
    found = jobs(version)
    known = {str(entry["job_id"]): entry for entry in oracle(version, "jobs")}
    assert known.keys() == found.keys()
    for job, entry in known.items():
        info = found[job]
        assert info.fields["JobName"] == entry["name"]
        assert info.state == entry["job_state"]
        assert info.fields["Reason"] == entry["state_reason"] or info.fields["Reason"].startswith(("Raised", "job_req"))
        assert int(info.fields["Restarts"]) == entry["restart_cnt"]
        assert (info.fields["Requeue"] == "1") == entry["requeue"]
        assert info.fields["NodeList"].replace("(null)", "") == (entry["nodes"] or "")
        for name, key in (("StartTime", "start_time"), ("EndTime", "end_time"), ("PreemptTime", "preempt_time")):
            if not (name == "EndTime" and info.fields["TimeLimit"] == "UNLIMITED"):  # JSON says in a year
                assert (info.time(name) or 0) == (entry[key] or 0), (job, name)
        limit = parse_time(info.fields["TimeLimit"])
        assert limit == (None if entry["time_limit"] in (None, "infinite", 0) else entry["time_limit"] * 60)


FATES = {
    "1": JobFate.CANCELLED, "4": JobFate.RUNNING, "7": JobFate.REQUEUED, "12": JobFate.RUNNING,
    "13": JobFate.CANCELLED, "18": JobFate.REQUEUED,
}  # fmt: skip


def test_fates(version: str) -> None:
    found = jobs(version)
    assert {job: jobinfo.fate(found[job], restarts=0) for job in FATES} == FATES
    requeued = JobFate.REQUEUED if version == "22.05" else JobFate.RUNNING
    assert jobinfo.fate(found["17"], restarts=0) is requeued


def test_times(version: str) -> None:
    found = jobs(version)
    assert [found["10"].time(name) for name in ("StartTime", "EndTime", "PreemptTime")] == [None, None, None]
    start, end = found["4"].time("StartTime"), found["4"].time("EndTime")
    assert start is not None
    assert end is not None
    assert (start // 86400, end - start) == (1796034257 // 86400, 365 * 86400)


def test_a_job_that_is_unknown_is_none(version: str) -> None:
    assert jobinfo.parse(text(version, "scontrol-unknown-job")).fields == {}


def test_free_text_passes_for_nothing_else(version: str) -> None:
    record = text(version, "scontrol-show-job").split("\n\n")[3]
    record = record.replace("JobName=running", "JobName=x JobState=FAILED Restarts=7")
    record += "\n   Comment=mine JobState=CANCELLED\n   JobState=TIMEOUT"
    info = jobinfo.parse(record.strip("\n"))
    assert (info.state, info.fields["Restarts"]) == ("RUNNING", "0")
    assert info.fields["JobName"] == "x JobState=FAILED Restarts=7"
    assert info.fields["Comment"] == "mine JobState=CANCELLED"
    assert observe.parse_job(record.strip("\n")).state == "RUNNING"


def test_queue(version: str) -> None:
    """Recorded rows, brought into the order of our own format."""
    rows = [line.split("|") for line in text(version, "squeue-fields").splitlines()[1:]]
    ours = [
        "\x1f".join([job, state, time, nodes, reason, "/w d", "c", "/s"])
        for job, state, reason, nodes, _, time, *_ in rows
    ]
    found = {job.job_id: job for job in slurm.parse_squeue("\n".join(ours))}
    assert len(found) == 14
    assert not any(job.is_over for job in found.values())
    assert (found["4"].state, found["4"].nodes, found["4"].elapsed) == ("RUNNING", "n[1-2]", "0:09")
    assert found["5_[2,4,6%1]"].reason == "JobArrayTaskLimit"
    assert found["18"].reason == ("Priority" if version == "22.05" else "job requeued in held state")
    states = {j.job_id: j.state for j in found.values() if j.job_id.isdigit()}
    known = {str(entry["job_id"]): entry["job_state"] for entry in oracle(version, "jobs")}
    assert {job: known[job] for job in states} == states


def accounted(version: str) -> dict[str, str]:
    """State of each job as sacct gave it; 22.05, which has no field Restarts, in columns."""
    lines = text(version, "sacct-X" if version == "22.05" else "sacct-fields").splitlines()
    if version != "22.05":
        rows = [line.split("|") for line in lines[1:]]
        return {job: state for _, job, state, *_ in rows if "." not in job}
    ends = [end for end, (a, b) in enumerate(zip(lines[1], lines[1][1:], strict=False), 1) if (a, b) == ("-", " ")]
    return {line[: ends[0]].strip(): line[ends[4] : ends[5]].strip() for line in lines[2:]}


def test_accounting(version: str) -> None:
    """Of all jobs, one was cancelled by a person; the step of one that was requeued ended as CANCELLED, too."""
    states = accounted(version)
    assert {"1", "2", "3", "4", "5_0", "13", "17", "18"} <= states.keys()
    assert {job for job, state in states.items() if slurm.parse_cancelled(f"{state}\n")} == {"13"}
    assert states["13"] == ("CANCELLED+" if version == "22.05" else "CANCELLED by 0")
    assert slurm.parse_cancelled("REQUEUED\n" + states["13"] + "\n") is True  # a start before is a row of its own
    assert slurm.parse_cancelled("\n") is None


def test_accounting_is_asked_for_whole_jobs_and_may_not_know(version: str, fake_slurm: Any) -> None:
    rows = text(version, "sacct-fields")
    fake_slurm.program("sacct", f"echo '{rows.splitlines()[0]}' >&2; exit 1")
    assert slurm.was_cancelled("13") is None
    fake_slurm.program("sacct", f"printf '%s\\n' '{accounted(version)['13']}'")
    assert slurm.was_cancelled("13") is True
    assert "--noheader --parsable2 --allocations --format=State --jobs=13" in fake_slurm.calls("sacct")[-1]


def test_nodes(version: str) -> None:
    partitions = ("main", "low", "high")
    assert site.parse_hardware(text(version, "scontrol-show-node")) == (
        site.Hardware(("n1", "n2", "n3", "n4"), partitions, 8, 8000, 0, (("", 8),), ()),
    )
    for entry in oracle(version, "nodes"):
        assert (entry["cpus"], entry["real_memory"], entry["gres"]) == (8, 8000, "gpu:8")
        assert entry["partitions"] == "+".join(partitions)


def test_nodes_have_values_with_spaces(version: str) -> None:
    third = slurm_text.records(text(version, "scontrol-show-node"), "NodeName")[2]
    assert third["OS"] == "Linux 6.18.44-fc-v769 #1 SMP PREEMPT_DYNAMIC @0"
    assert third["Reason"].startswith("ECC errors: GPU 3 [root@2026-11-30T10:24:")
    assert third["State"] == "ALLOCATED+DRAIN"
    states = {e["name"]: e["state"].upper() for e in oracle(version, "nodes")}
    # 22.05's JSON leaves the flags out.
    assert states["n3"] == ("ALLOCATED" if version == "22.05" else third["State"])


def test_nodes_out_of_service(version: str) -> None:
    """Recorded rows, brought into the order of our own format."""
    rows = [line.split("|") for line in text(version, "sinfo-fields").splitlines()[1:]]
    away = [site.SEPARATOR.join(row[:3]) for row in rows if row[1] == "draining"]
    assert len(away) == 3
    assert site.parse_out_of_service("\n".join(away)) == {"n3": ("draining", "ECC errors: GPU 3")}


def test_partitions(version: str) -> None:
    def partition(name: str, tier: int, mode: str, grace: int = 0) -> site.Partition:
        return site.Partition(
            name, is_default=name == "main", total_nodes=4, preempt_mode=mode, grace_time=grace, tier=tier
        )

    assert site.parse_partitions(text(version, "scontrol-show-partition")) == (
        partition("main", 10, "OFF"),
        partition("low", 1, "REQUEUE", 20),
        partition("high", 100, "OFF"),
    )


def test_partitions_agree_with_json(version: str) -> None:
    if version == "22.05":  # has no JSON for them
        return
    known = {entry["name"]: entry for entry in oracle(version, "partitions")}
    for found in site.parse_partitions(text(version, "scontrol-show-partition")):
        entry = known[found.name]
        assert found.total_nodes == entry["nodes"]["total"]
        assert (found.grace_time, found.tier) == (entry["grace_time"], entry["priority"]["tier"])
        assert (found.min_nodes, found.state) == (entry["minimums"]["nodes"], entry["partition"]["state"])
        limits = entry["maximums"]
        assert {limits["time"], limits["nodes"], limits["cpus_per_node"]} == {"infinite"}
        assert (found.max_time, found.max_nodes, found.max_cpus) == (None, None, None)


def test_configuration(version: str) -> None:
    found = slurm_text.settings(text(version, "scontrol-show-config"))
    assert found["SLURM_VERSION"].startswith(version)
    expected = {
        "ClusterName": "mini", "JobRequeue": "1", "PreemptMode": "REQUEUE", "PreemptType": "preempt/qos",
        "KillWait": "5 sec", "MaxArraySize": "10001", "AccountingStorageType": "accounting_storage/slurmdbd",
        "SlurmctldHost[0]": "vm(127.0.0.1)", "PrivateData": "none", "SlurmctldParameters": "preempt_send_user_signal",
        "AuthInfo": "socket=/cluster/run/munge.socket,cred_expire=5",
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    assert found["PriorityFlags" if version != "22.05" else "PowerPlugin"] == ""
    assert site.number_of_seconds(found["KillWait"]) == 5


REFUSED = ("bad-array", "bad-gres", "bad-partition", "bad-time")


@pytest.mark.parametrize("name", [*REFUSED, "bad-dependency", "too-many-nodes"])
def test_refusals_of_sbatch(version: str, name: str) -> None:
    said = text(version, f"sbatch-{name}")
    if version == "22.05" and name not in REFUSED:
        assert slurm.parse_job_id(said) is not None
    else:
        assert slurm.parse_job_id(said) is None
        assert slurm.is_sure_refusal(slurm.Reply(1, "", said))
