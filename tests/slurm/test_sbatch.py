"""Our scripts and parsers, held against a real Slurm with typed GPUs, licences, features, accounts and a reservation.

All sbatch options in the scripts of typical sites exist on this cluster (there are no leaf switches, but --switches is
taken all the same). Containers, modules and conda are no options, and `sbatch --test-only` does not look at them.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from stoker.conf.schema import ClusterConfig, Config, GpuRequest
from stoker.conf.slurm_gpus import Gpus, asked, listed
from stoker.conf.slurm_hostlist import compress, expand
from stoker.conf.slurm_jobid import parse_job_id
from stoker.conf.slurm_memory import parse_memory
from stoker.conf.slurm_time import parse_time
from stoker.launcher.rehearsal.cluster import Cluster, wait_until
from stoker.launcher.rehearsal.spec import ClusterSpec
from stoker.launcher.render import option_line, render, script_of

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("sbatch")]
SITES = Path(__file__).parent.parent / "launcher" / "golden" / "sites"
SPEC = ClusterSpec(
    nodes=4,
    cpus=128,
    memory=2_000_000,
    gpus=8,
    gpu_type="h100",
    node_options="Features=ib,rack1 TmpDisk=900000",
    database=True,
    settings=("Licenses=matlab:10,lustre@storage:20", "AccountingStorageEnforce=associations,limits,qos"),
)
ENTITIES = (
    ("add", "qos", "long"),
    ("add", "account", "physics"),
    ("add", "user", "root", "account=physics", "qos=normal,long"),
)


@pytest.fixture(scope="module")
def cluster(slurm_available: None) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="stk-") as base, Cluster.start(SPEC, Path(base) / "c") as found:
        for entity in ENTITIES:
            found.run(["sacctmgr", "-i", "-Q", *entity])
        for partition in ("batch", "h100", "preempt"):
            found.run(["scontrol", "create", f"partitionname={partition}", "nodes=ALL"])
        yield found


SAMPLES = [pytest.param(25, id="sample"), pytest.param(1000, id="large", marks=pytest.mark.full)]


def test_slurm_takes_the_scripts_of_all_sites(cluster: Cluster) -> None:
    refused = {}
    scripts = sorted(SITES.glob("*.sbatch"), key=lambda path: path.stem == "reservation")
    assert len(scripts) >= 12
    for script in scripts:
        if script.stem == "reservation":  # last: it keeps the others off its nodes
            words = ("ReservationName=course", "starttime=now", "duration=60", "nodes=n1,n2", "users=root")
            cluster.run(["scontrol", "create", "reservation", *words])
        done = cluster.run(["sbatch", "--test-only", str(script)], check=False)
        if done.returncode != 0 or " to start at " not in done.stderr:
            refused[script.stem] = done.stderr
    cluster.run(["scontrol", "delete", "reservation=course"])
    assert refused == {}


SIGNS = " #'\"\\$`=:,;%@!()[]{}<>|&*?~^-_a\u00e9\u20ac"


@pytest.mark.parametrize("count", SAMPLES)
def test_every_text_in_a_script_reaches_slurm_unharmed(cluster: Cluster, tmp_path: Path, count: int) -> None:
    rng = random.Random(count)
    texts = ["a b", " lead", "trail ", "# x", "it's", '"', "\\", "a\\\\b", "$HOME `id`", "\u65e5\u672c", "--nice=3"]
    texts += ["".join(rng.choices(SIGNS, k=rng.randint(1, 20))) for _ in range(count)]
    sent = {}
    for text in texts:
        script = tmp_path / "job.sbatch"
        # The line after it is read as one of its own.
        script.write_text(f"#!/bin/bash\n#SBATCH {option_line('comment', text)}\n#SBATCH --job-name=after\ntrue\n")
        sent[cluster.submit(["--hold", str(script)])] = text
    shown = cluster.run(["squeue", "--noheader", "--name=after", "--format=%i\x1f%k\x1f"]).stdout
    cluster.run(["scancel", "--name=after"])
    assert {row.split("\x1f")[0]: row.split("\x1f")[1] for row in shown.splitlines()} == sent


def host_lists(rng: random.Random, count: int) -> Iterator[str]:
    """Well-formed ones, at most two brackets to a name, none with text behind the last: Slurm takes no others."""

    def ranges() -> str:
        parts = []
        for _ in range(rng.randint(1, 3)):
            low, width = rng.choice([0, 1, 7, 8, 9, 95, 98, 99, 998]), rng.randint(1, 4)
            parts.append(str(low).zfill(width) + rng.choice(["", f"-{low + rng.randint(0, 4)}"]))
        return f"[{','.join(parts)}]"

    for _ in range(count):
        names = (
            "".join(rng.choice(["n", "rack-", "x1y", "7"]) + ranges() for _ in range(rng.randint(1, 2)))
            if rng.random() < 0.8
            else rng.choice(["login", "n1", "n01", "n-2", "a.b", "10"])
            for _ in range(rng.randint(1, 4))
        )
        yield ",".join(names)


@pytest.mark.parametrize("count", SAMPLES)
def test_host_lists_are_slurm_s(cluster: Cluster, count: int) -> None:
    for text in host_lists(random.Random(count), count):
        names = expand(text)
        assert names == cluster.run(["scontrol", "show", "hostnames", text]).stdout.split(), text
        assert compress(names) == cluster.run(["scontrol", "show", "hostlist", ",".join(names)]).stdout.strip(), text


BROKEN_LISTS = ["n[3-1]", "n[]", "n[1,,2]", "n[1,]", "n[[1-2]]", "n[1-2]]", "n[1-2-3]", "n[a-b]", "n[-1]", "n[1-65537]"]


def test_broken_host_lists_are_broken_for_slurm(cluster: Cluster) -> None:
    for text in BROKEN_LISTS:
        with pytest.raises(ValueError, match="expected"):
            expand(text)
        assert "Invalid hostlist" in cluster.run(["scontrol", "show", "hostnames", text], check=False).stderr, text


def made_of(cluster: Cluster, option: str, texts: Sequence[str], field: str) -> dict[str, str]:
    """What `scontrol show job` says of jobs that were submitted with an option; nothing of those refused."""
    jobs = {}
    for text in texts:
        command = ["sbatch", "--parsable", "--hold", "--job-name=made", f"--{option}={text}", "--wrap=true"]
        done = cluster.run(command, check=False)
        if done.returncode == 0:
            jobs[done.stdout.strip()] = text
    shown = cluster.run(["scontrol", "--oneliner", "show", "job"]).stdout
    cluster.run(["scancel", "--name=made"])
    records = (dict(word.split("=", 1) for word in line.split() if "=" in word) for line in shown.splitlines())
    return {jobs[record["JobId"]]: record.get(field, "") for record in records if record["JobId"] in jobs}


def read(parse: object, text: str) -> object:
    assert callable(parse)
    try:
        return parse(text)
    except ValueError:
        return "refused"


@pytest.mark.parametrize("count", SAMPLES)
def test_sizes_of_memory_are_slurm_s(cluster: Cluster, count: int) -> None:
    rng = random.Random(count)
    ends = ["", "K", "M", "G", "T", "KB", "gb", "Mb", "B", "P", "MiB", " ", ".5G", "GG"]
    texts = [f"{rng.choice([0, 1, 7, 1023, 1024, 1025, 4097])}{rng.choice(ends)}" for _ in range(count)]
    made = made_of(cluster, "mem", texts, "MinMemoryNode")
    for text in texts:
        ours, theirs = read(parse_memory, text), made.get(text, "refused")
        theirs = f"{1024 * int(theirs[:-1])}T" if theirs.endswith("P") else theirs  # shown, but not taken
        assert ours == (theirs if theirs == "refused" else parse_memory(theirs)), (text, theirs)


@pytest.mark.parametrize("count", SAMPLES)
def test_time_limits_are_slurm_s(cluster: Cluster, count: int) -> None:
    rng = random.Random(count)
    forms = ["{}", "{}:{}", "{}:{}:{}", "{}-{}", "{}-{}:{}", "{}-{}:{}:{}", "{}-", "{}:", "{}-{}-{}", "{}:{}-{}", "{}h"]
    texts = []
    for _ in range(count):
        form = rng.choice(forms)
        # "1-" is taken by sbatch for one day, and by us for a slip of the finger.
        texts.append(form.format(*(rng.choice(["0", "1", "05", "23", "59", "75"]) for _ in range(form.count("{}")))))
    made = made_of(cluster, "time", texts, "TimeLimit")
    for text in texts:
        if text.endswith("-"):
            assert read(parse_time, text) == "refused"
            continue
        ours, theirs = read(parse_time, text), made.get(text, "refused")
        # Without a limit the partition's counts, which has none.
        assert ours == (theirs if theirs == "refused" else parse_time(theirs)), (text, theirs)


def test_gpus_are_slurm_s(cluster: Cluster) -> None:
    texts = ["8", "h100:8", "gpu:2", "h100", "h100:1", "08", "h100:", ":8", "h100:x"]
    made = made_of(cluster, "gpus-per-node", texts, "TresPerNode")
    for text in texts:
        assert read(asked, text) == read(listed, made[text]) if text in made else read(asked, text) == "refused", text
    assert set(made) == {"8", "h100:8", "gpu:2", "h100", "h100:1", "08"}
    shown = cluster.run(["sinfo", "--noheader", "--partition=main", "--format=%G"]).stdout.strip()
    assert listed(shown) == (Gpus(8, "h100"),)
    nodes = cluster.run(["scontrol", "--oneliner", "show", "node", "n1"]).stdout
    fields = dict(word.split("=", 1) for word in nodes.split() if "=" in word)
    assert listed(fields["CfgTRES"]) == (Gpus(8),)


def test_each_way_of_asking_for_gpus_gives_the_agents_all_of_them(cluster: Cluster, tmp_path: Path) -> None:
    """Under the srun flags that agents are started with."""
    flags = (
        "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 --overlap --cpu-bind=none --mpi=none --export=ALL"
    )
    srun = f"srun {flags} sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    jobs = {}
    for request in GpuRequest:
        run_dir = tmp_path / request.value
        (run_dir / "slurm").mkdir(parents=True)
        made = ClusterConfig(nodes=2, gpus_per_node=8, gpu_type="h100", gpu_request=request, cpus_per_task=4, mem="1G")
        text = render(script_of(Config(cluster=made), run_dir, "r", "0", "python"))
        options = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
        (run_dir / "job.sbatch").write_text("\n".join(["#!/bin/bash", *options, srun, ""]))
        jobs[cluster.submit([str(run_dir / "job.sbatch")])] = run_dir
    for job, run_dir in jobs.items():
        cluster.wait_for_job(job, "COMPLETED")
        lines = (run_dir / "slurm" / f"{job}.log").read_text().splitlines()
        said = sorted(line for line in lines if line.startswith("n"))
        assert [line.split()[1] for line in said] == ["0,1,2,3,4,5,6,7"] * 2, (run_dir, lines)


def test_job_ids_are_slurm_s(cluster: Cluster, tmp_path: Path) -> None:
    het = tmp_path / "het.sh"
    het.write_text("#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=1\nsleep 60\n")
    array = cluster.submit(["--hold", "--array=1-4,7%2", "--output=/dev/null", "--wrap=true"])
    parts = cluster.submit(["--output=/dev/null", str(het)])
    tasks = cluster.submit(["--array=1-2", "--output=/dev/null", "--wrap=srun sleep 60"])
    expected = {f"{tasks}_1.batch", f"{tasks}_1.0", f"{tasks}_2.0", f"{parts}.batch"}
    steps: set[str] = set()

    def running() -> bool:
        steps.update(cluster.run(["squeue", "--steps", "--noheader", "--format=%i"]).stdout.split())
        return expected <= steps

    wait_until(running, 30, lambda: f"steps {expected} among {steps}")
    shown = set(cluster.run(["squeue", "--noheader", "--format=%i"]).stdout.split())
    cluster.run(["scancel", array, parts, tasks])
    assert {f"{array}_[1-4,7%2]", f"{parts}+0", f"{parts}+1", f"{tasks}_1", f"{tasks}_2"} <= shown
    assert [text for text in shown | steps if str(parse_job_id(text)) != text] == []
    waiting = parse_job_id(f"{array}_[1-4,7%2]")
    assert (waiting.job, waiting.tasks, waiting.is_job) == (int(array), "1-4,7%2", False)


def test_what_waits_for_a_job_goes_on_waiting_while_that_is_requeued(cluster: Cluster) -> None:
    first = cluster.submit(["--requeue", "--output=/dev/null", "--wrap=sleep 60"])
    cluster.wait_for_job(first, "RUNNING")
    second = cluster.submit([f"--dependency=afterany:{first}", "--output=/dev/null", "--wrap=true"])
    cluster.run(["scontrol", "requeue", first])
    cluster.wait_for_job(first, "PENDING")
    assert (cluster.job(second).state, cluster.job(second).reason) == ("PENDING", "Dependency")
    cluster.run(["scancel", first])
    cluster.wait_for_job(second, "COMPLETED")


def test_a_begin_on_the_command_line_wins_over_the_script_s(cluster: Cluster, tmp_path: Path) -> None:
    """What a resumed run and the next job of a chain rely on."""
    script = tmp_path / "later.sh"
    script.write_text("#!/bin/bash\n#SBATCH --begin=now+2hours\n#SBATCH --output=/dev/null\ntrue\n")
    later, at_once = cluster.submit([str(script)]), cluster.submit(["--begin=now", str(script)])
    cluster.wait_for_job(at_once, "COMPLETED")
    assert (cluster.job(later).state, cluster.job(later).reason) == ("PENDING", "BeginTime")
    cluster.run(["scancel", later])
