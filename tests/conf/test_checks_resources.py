"""What sbatch is asked for: a golden line for every rule, and silence for what is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stoker.conf.checks_resources import resource_rules
from stoker.conf.schema import ClusterConfig, Config, GpuRequest

BLANK = "expected text without spaces, or null to leave it out"
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"partition": ""}, ["e cluster.partition=: is empty; expected text, or null to leave it out"]),
    ({"account": "a b"}, [f"e cluster.account=a b: {BLANK}"]),
    ({"qos": " "}, ["e cluster.qos= : is empty; expected text, or null to leave it out"]),
    ({"partition": "a,,b"}, ["e cluster.partition=a,,b: expected partitions, with commas between them; found ''"]),
    ({"mem": "4.5G"}, ["e cluster.mem=4.5G: expected an integer with K, M, G or T (MiB without one)"]),
    ({"tmp": "1P"}, ["e cluster.tmp=1P: expected an integer with K, M, G or T (MiB without one)"]),
    ({"mem": "1G", "mem_per_cpu": "2G"}, ["e cluster.mem_per_cpu=2G: excludes cluster.mem=1G; keep one"]),
    ({"mem_per_gpu": "80G"}, ["e cluster.mem_per_gpu=80G: needs cluster.gpus_per_node; or use cluster.mem"]),
    ({"begin": "soon"}, [
        "e cluster.begin=soon: expected a time like now+2hours, 16:00, midnight, tomorrow, 2026-12-24 or "
        "2026-12-24T18:00",
    ]),
    ({"constraint": "[a|b"}, ["e cluster.constraint=[a|b: expected features with & and |; [ is not closed"]),
    ({"constraint": "(a&b])"}, ["e cluster.constraint=(a&b]): expected features with & and |; ] closes nothing"]),
    ({"nodelist": "n[1-"}, [
        "e cluster.nodelist=n[1-: expected a host list like n[01-16],m3; found 'n[1-' in it",
    ]),
    ({"exclude": "n[3-1]"}, [
        "e cluster.exclude=n[3-1]: expected numbers and ranges like 01-16 between the brackets; found '3-1'",
    ]),
    ({"nodelist": "n[1-3]", "nodes": 2}, [
        "e cluster.nodelist=n[1-3]: names 3 nodes, and all of them must be used; cluster.nodes=2",
    ]),
    ({"nodelist": "n[1-2]", "exclude": "n[02,2]", "nodes": 2}, [
        "e cluster.exclude=n[02,2]: holds n2, which cluster.nodelist asks for",
    ]),
    ({"licenses": "a:0"}, [
        "e cluster.licenses=a:0: expected NAME or NAME:COUNT, with commas between them; found 'a:0'",
    ]),
    ({"switches": "0"}, [
        "e cluster.switches=0: expected COUNT or COUNT@TIME: leaf switches at most, and how long to wait for that",
    ]),
    ({"switches": "1@x"}, [
        "e cluster.switches=1@x: expected one of sbatch's forms: minutes, minutes:seconds, hours:minutes:seconds, "
        "days-hours, days-hours:minutes, days-hours:minutes:seconds, or UNLIMITED",
    ]),
    ({"gres": "nvme:1,gpu:h100:2"}, [
        "e cluster.gres=nvme:1,gpu:h100:2: GPUs are asked for by cluster.gpus_per_node and cluster.gpu_type; leave "
        "them out here",
    ]),
    ({"gres": "nvme="}, [
        "e cluster.gres=nvme=: expected NAME[:TYPE][:COUNT], with commas between them; found 'nvme='",
    ]),
    ({"gpu_type": "h100:8", "gpus_per_node": 8}, [
        "e cluster.gpu_type=h100:8: expected the type's name alone, like h100; the count is cluster.gpus_per_node",
    ]),
    ({"gpu_type": "h100"}, ["e cluster.gpu_type=h100: asks for no GPU; set cluster.gpus_per_node too"]),
    ({"gpu_request": GpuRequest.gpus_per_task, "gpus_per_node": 8}, [
        "w cluster.gpu_request=gpus_per_task: some versions of Slurm bind GPUs to tasks for it and hide them from "
        "others; the agent is the only task of a node, so take it only where the site accepts nothing else",
    ]),
    ({"comment": "x" * 901}, ["e cluster.comment=xxxxxxxxxxxxxxxxxxxx...: expected at most 900 bytes"]),
    ({"mail_type": "FAIL,TIMELIMIT"}, [
        "e cluster.mail_type=FAIL,TIMELIMIT: no event that mail is sent for: 'TIMELIMIT'; did you mean TIME_LIMIT?",
    ]),
    ({"mail_type": "FAIL, END"}, [f"e cluster.mail_type=FAIL, END: {BLANK}"]),  # sbatch drops what follows the blank
    ({"mail_user": "me@x.org"}, [
        "w cluster.mail_user=me@x.org: gets no mail without cluster.mail_type, e.g. FAIL,TIME_LIMIT",
    ]),
    ({"nice": 2**31}, ["e cluster.nice=2147483648: expected at most 2147483645"]),
    ({"nice": -5}, [
        "w cluster.nice=-5: raises the priority, which Slurm allows administrators only; it takes 0 from others",
    ]),
    ({"sbatch": {"nodes": "3", "deadlin": None}}, [
        "e cluster.sbatch.nodes=3: set by stoker; use cluster.nodes",
        "e cluster.sbatch.deadlin: no long option of sbatch; did you mean deadline?",
    ]),
]  # fmt: skip
RIGHT: list[dict[str, Any]] = [
    {"mem": "0", "tmp": "800G", "time": "1-0", "begin": "now+2hours"},
    {"mem_per_gpu": "80GB", "gpus_per_node": 8, "gpu_type": "nvidia_h100_80gb_hbm3", "gres": "nvme:1,lustre"},
    {"nodelist": "n[1-2]", "exclude": "n[3-9],m1", "nodes": 3, "constraint": "[rack1*2&rack2*2]|(a&b)"},
    {"licenses": "matlab:2,lustre@storage", "switches": "1@12:00:00", "nice": 0, "comment": 'any "text" #1'},
    {"mail_type": "FAIL,time_limit_80", "mail_user": "me@x.org,you@x.org", "partition": "a,b"},
    {"sbatch": {"hold": "", "time-min": "1:00:00", "hint": None, "wckey": "a b"}},
]


def lines(fields: dict[str, Any]) -> list[str]:
    config = Config(cluster=replace(ClusterConfig(), **fields))
    return [f"{p.severity[0]} {p}" for p in resource_rules(config)]


@pytest.mark.parametrize(("fields", "expected"), WRONG, ids=lambda value: str(value)[:60])
def test_what_cannot_be_asked_for_is_told(fields: dict[str, Any], expected: list[str]) -> None:
    assert lines(fields) == expected


@pytest.mark.parametrize("fields", RIGHT, ids=lambda value: str(value)[:60])
def test_what_can_be_asked_for_is_silent(fields: dict[str, Any]) -> None:
    assert lines(fields) == []
