"""Resuming, data-parallel sizes, padding, and the reading thread's life."""

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from stoker.train.data.build import DataSpec, TrainingData, build_data
from stoker.train.data.loader import Loader, Share

SETTINGS = {"sequence_length": 4, "seed": 3}


def open_data(prefix: Path, **settings) -> TrainingData:
    return build_data([DataSpec(str(prefix))], **{**SETTINGS, **settings})


def steps(data: TrainingData, count: int) -> list[tuple[list[int], torch.Tensor]]:
    """Per step: sample numbers (-1 left out), and their rows of tokens."""
    out = []
    for _ in range(count):
        batches = [next(data.train) for _ in range(data.train.micro_steps)]
        samples, tokens = torch.cat([b.samples for b in batches]), torch.cat([b.tokens for b in batches])
        out.append((samples[samples >= 0].tolist(), tokens[samples >= 0]))
    return out


def data_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "stoker-data"]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_global_batches_are_the_same_for_every_data_parallel_size(make_data, dp_size, micro_batch):
    prefix = make_data()
    with open_data(prefix, global_batch=6, micro_batch=6) as data:
        expected = steps(data, 40)  # 240 samples: over two epochs of 99
    seen: list[list] = [[] for _ in range(40)]
    tokens: list[list] = [[] for _ in range(40)]
    micro_steps = set()
    for rank in range(dp_size):
        with open_data(prefix, global_batch=6, micro_batch=micro_batch, dp_rank=rank, dp_size=dp_size) as data:
            micro_steps.add(data.train.micro_steps)
            for k, (samples, rows) in enumerate(steps(data, 40)):
                seen[k] += samples
                tokens[k].append(rows)
    assert len(micro_steps) == 1
    assert seen == [samples for samples, _ in expected] == [list(range(6 * k, 6 * k + 6)) for k in range(40)]
    assert all(torch.equal(torch.cat(rows), want) for rows, (_, want) in zip(tokens, expected, strict=True))


@pytest.mark.parametrize("stop", [1, 7, 16, 17, 25])
def test_a_resumed_run_continues_with_the_next_sample(make_data, stop):
    """Also inside an epoch, behind the first epoch, and on another number of ranks."""
    prefix = make_data()
    with open_data(prefix, global_batch=6, micro_batch=2) as data:
        expected = steps(data, 40)
    with open_data(prefix, global_batch=6, micro_batch=2) as data:
        steps(data, stop)
        next(data.train)  # a step begun but not finished does not count
        state = data.train.consumed_samples
        stored = data.fingerprints
    assert state == 6 * stop
    got: list[list[int]] = [[] for _ in range(40 - stop)]
    for rank in range(2):
        with open_data(
            prefix,
            global_batch=6,
            micro_batch=3,
            dp_rank=rank,
            dp_size=2,
            consumed_samples=state,
            stored_fingerprints=stored,
        ) as data:
            for k, (samples, _) in enumerate(steps(data, 40 - stop)):
                got[k] += samples
    assert got == [samples for samples, _ in expected[stop:]]


def test_a_resumed_mixture_continues_exactly(make_data):
    specs = [DataSpec(str(make_data("a")), 2.0), DataSpec(str(make_data("b", offset=1000)), 1.0)]
    plain = {**SETTINGS, "global_batch": 100, "micro_batch": 100}
    with build_data(specs, **plain) as data:
        expected = steps(data, 30)  # 3,000 samples: blocks of 1,024, many epochs
    with build_data(specs, **plain, consumed_samples=1700) as data:
        got = steps(data, 13)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(expected[17:], got, strict=True))


def test_rows_without_a_sample_have_no_target(make_data):
    with open_data(make_data(), global_batch=5, micro_batch=2, dp_rank=0, dp_size=2, mask_documents=True) as data:
        assert data.train.micro_steps == 2  # ranks have 2 and 3 samples; both run two micro-steps
        first, second = next(data.train), next(data.train)
    assert first.samples.tolist() == [0, 1]
    assert second.samples.tolist() == [-1, -1]
    assert (second.targets == -100).all()
    assert (second.tokens == 0).all()
    assert second.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert second.doc_ids is not None
    assert (second.doc_ids == 0).all()


def test_shares_are_balanced_and_cover_the_batch():
    for dp_size in range(1, 12):
        shares = [Share(10, 2, rank, dp_size) for rank in range(dp_size)]
        slices = [[s for m in range(share.micro_steps) for s in share.of(100, 10, m)] for share in shares]
        assert [s for part in slices for s in part] == list(range(100, 110))
        assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_the_thread_starts_late_and_ends_with_close(make_data):
    data = open_data(make_data(), global_batch=2, micro_batch=1)
    assert not data_threads()
    next(data.train)
    assert data_threads() == ["stoker-data"]
    data.close()
    assert not data_threads()
    data.close()


def test_closing_while_the_queue_is_full_does_not_hang(make_data):
    with open_data(make_data(), global_batch=2, micro_batch=1, prefetch=1) as data:
        next(data.train)
        data.train.close()
        assert not data_threads()
        batch = next(data.train)  # it can go on after that, with what was next
        assert batch.samples.tolist() == [1]


def test_a_dropped_loader_ends_its_thread(make_data):
    data = open_data(make_data(), global_batch=2, micro_batch=1)
    loader = Loader(data.train.dataset, data.train.share)
    next(loader)
    del loader
    gc.collect()
    assert not data_threads()
    data.close()


def test_reading_ahead_is_bounded(make_data):
    with open_data(make_data(), global_batch=2, micro_batch=64, prefetch=3) as data:
        produced = []
        dataset = data.train.dataset
        read = dataset.sources[0].tokens.read
        object.__setattr__(
            dataset.sources[0].tokens, "read", lambda windows: produced.append(len(windows)) or read(windows)
        )
        next(data.train)
        deadline = time.monotonic() + 5
        while len(produced) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(10):  # time in which a thread that does not stop would go on
            time.sleep(0.005)
        assert 3 <= len(produced) <= 4 + 2  # asked for one; 3 ahead, 2 at once, one batch in the thread's hand


def test_an_error_in_the_thread_is_raised_by_next_where_it_belongs(make_data):
    prefix = make_data(lengths=[1001])
    with open_data(prefix, global_batch=1, micro_batch=1) as data:
        os.truncate(f"{prefix}.bin", 2 * 900)  # the last tenth of the windows is gone
        good: list[int] = []
        with pytest.raises(ValueError, match=r"set\.bin: 1800 bytes, expected at least"):
            good.extend(batch.samples.item() for batch in data.train)
        order = data.train.dataset.sources[0].order
        assert order is not None
        windows = order.take(np.arange(len(good) + 1))
        assert good == list(range(len(good)))
        assert (windows[:-1] <= 223).all()  # window 223 ends with token 896
        assert windows[-1] > 223
        with pytest.raises(ValueError, match="1800 bytes"):
            next(data.train)
    assert not data_threads()


def test_waiting_for_data_is_measured(make_data):
    with open_data(make_data(), global_batch=2, micro_batch=128) as data:
        assert data.train.take_wait() == 0.0
        tokens = data.train.dataset.sources[0].tokens
        read = tokens.read
        object.__setattr__(tokens, "read", lambda windows: time.sleep(0.05) or read(windows))
        next(data.train)
        assert data.train.take_wait() >= 0.05
        assert data.train.take_wait() == 0.0


@pytest.mark.gpu
def test_batches_are_pinned_for_asynchronous_copies(make_data):
    with open_data(make_data(), global_batch=4, micro_batch=2) as data:
        batch = next(data.train)
        assert all(t.is_pinned() for t in (batch.tokens, batch.targets, batch.positions, batch.samples))
        assert torch.equal(batch.to("cuda").tokens.cpu(), batch.tokens)


def test_a_fork_reads_on_with_a_thread_of_its_own(make_data):
    with open_data(make_data(), global_batch=1, micro_batch=1) as data:
        next(data.train)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                samples = [next(data.train).samples.item() for _ in range(300)]  # more than was read ahead
                os.write(writing, str(samples == list(range(1, 301))).encode())
                data.close()
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        deadline = time.monotonic() + 20
        done = (0, 0)
        while done[0] == 0 and time.monotonic() < deadline:
            done = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        if done[0] == 0:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        assert done == (pid, 0)
        assert os.read(reading, 10) == b"True"
        os.close(reading)
        assert next(data.train).samples.tolist() == [1]
