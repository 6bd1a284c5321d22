"""Job ids as sbatch, squeue, scontrol and sacct of 22.05 printed them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stoker.conf.slurm_jobid import JobId, parse_job_id

SPELLINGS = {
    "12": JobId(12),
    "12;alpha": JobId(12, cluster="alpha"),
    "12_3": JobId(12, task=3),
    "12_0": JobId(12, task=0),
    "12_[1-4,7%2]": JobId(12, tasks="1-4,7%2"),
    "12_[0,5,10,15]": JobId(12, tasks="0,5,10,15"),
    "12_[0-15:5]": JobId(12, tasks="0-15:5"),
    "12_[1,3,5,...%4]": JobId(12, tasks="1,3,5,...%4"),  # squeue cuts long lists short
    "12.0": JobId(12, step="0"),
    "12.batch": JobId(12, step="batch"),
    "12.extern": JobId(12, step="extern"),
    "12_3.4": JobId(12, task=3, step="4"),
    "12+1": JobId(12, part=1),
    "12+1.0": JobId(12, part=1, step="0"),
    "12.0+1": JobId(12, step="0", step_part=1),
    "12_3.batch;alpha-2": JobId(12, task=3, step="batch", cluster="alpha-2"),
}
NONE = [
    "", "x", "0", "-1", " 12", "12 ", "12\n", "12_", "12_x", "12_[", "12_[]", "12_[1-]", "12_[1,,2]", "12_[a]",
    "12_[%2]", "12.", "12.x", "12+", "12+x", "12;", "12; ", "12_3_4", "12_3+1", "12_[1-2]_3", "1e3",
    "\u0661\u0662", "99999999999",
]  # fmt: skip


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_spelling_is_read_and_written_back(text: str) -> None:
    assert parse_job_id(text) == SPELLINGS[text]
    assert str(SPELLINGS[text]) == text


@pytest.mark.parametrize("text", NONE)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no job id; expected one like 12, 12_3"):
        parse_job_id(text)


def test_what_can_be_waited_for_is_a_job_or_one_task_of_an_array() -> None:
    assert {text for text in SPELLINGS if parse_job_id(text).is_job} == {"12", "12;alpha", "12_3", "12_0"}


numbers = st.integers(0, 2**32 - 1)
spans = st.from_regex(r"[0-9]{1,5}(-[0-9]{1,5}(:[0-9]{1,2})?)?", fullmatch=True, alphabet="0123456789-:")
task_lists = st.lists(spans, min_size=1, max_size=4).map(",".join)
ids = st.builds(
    lambda job, of_job, step, cluster: JobId(job=job, cluster=cluster, **of_job, **step),
    st.integers(1, 2**32 - 1),
    st.one_of(
        st.just({}),
        st.builds(lambda n: {"task": n}, numbers),
        st.builds(lambda n: {"part": n}, numbers),
        st.builds(lambda text: {"tasks": text}, task_lists),
    ),
    st.one_of(
        st.just({}),
        st.builds(lambda n: {"step": str(n)}, numbers),
        st.sampled_from([{"step": "batch"}, {"step": "extern"}, {"step": "0", "step_part": 1}]),
    ),
    st.one_of(st.none(), st.sampled_from(["alpha", "b-2", "c_3.x"])),
)


@given(ids)
def test_every_id_is_read_back(job_id: JobId) -> None:
    assert parse_job_id(str(job_id)) == job_id


@given(st.text(st.sampled_from("0123456789_[]-,%.+;:batchx ")))
def test_no_text_does_worse_than_be_refused(text: str) -> None:
    try:
        found = parse_job_id(text)
    except ValueError:
        return
    assert parse_job_id(str(found)) == found
