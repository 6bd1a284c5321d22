"""GPUs in options, in lists of generic resources and in TRES, as 22.05 to 25.05 write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stoker.conf.slurm_gpus import Gpus, asked, listed

ASKED = {
    "8": [Gpus(8)],
    "08": [Gpus(8)],
    "0": [Gpus(0)],
    "1K": [Gpus(1024)],
    "h100:8": [Gpus(8, "h100")],
    "gpu:8": [Gpus(8, "gpu")],  # so Slurm reads it: there is no name before the type here
    "h100": [Gpus(1, "h100")],
    "a100:4,h100:4": [Gpus(4, "a100"), Gpus(4, "h100")],
    "nvidia_h100_80gb_hbm3:8": [Gpus(8, "nvidia_h100_80gb_hbm3")],
}
NOT_ASKED = ["", "h100:", ":8", "h100:x", "8,", "h100:8:2", "-1", "h 100:8", "h100:8(S:0)", "h100=8"]
LISTED = {
    "": [],
    "(null)": [],
    "N/A": [],
    "gpu": [Gpus(1)],
    "gpu:8": [Gpus(8)],
    "gpu:h100": [Gpus(1, "h100")],
    "gpu:h100:8": [Gpus(8, "h100")],
    "gpu:h100:8(S:0-1)": [Gpus(8, "h100")],  # scontrol show node, sinfo %G
    "gpu:h100:8(IDX:0-7)": [Gpus(8, "h100")],  # scontrol show job --details, GresUsed
    "gpu:8(IDX:0-3,5,7)": [Gpus(8)],
    "gpu:h100:4(S:0),gpu:a100:2(S:1)": [Gpus(4, "h100"), Gpus(2, "a100")],
    "gpu:(null):8(IDX:N/A)": [Gpus(8)],
    "nvme:1,gpu:8(S:0,2),nic:mlx5:2": [Gpus(8)],
    "gpu:no_consume:4": [Gpus(4)],
    "gres:gpu:8": [Gpus(8)],  # TresPerNode of 22.05
    "gres/gpu:h100:8": [Gpus(8, "h100")],  # and of 25.05
    "cpu=128,mem=2000000M,node=1,billing=128,gres/gpu=8,gres/gpu:h100=8": [Gpus(8), Gpus(8, "h100")],
    "cpu=4,mem=1G": [],
    "gpumem:8,mps:100,shard:8": [],
}
NOT_LISTED = ["gpu:h100:x", "gpu:8(S:0", "gpu::", "gpu:a b:2"]


@pytest.mark.parametrize("text", ASKED)
def test_gpus_that_are_asked_for(text: str) -> None:
    assert list(asked(text)) == ASKED[text]


@pytest.mark.parametrize("text", LISTED)
def test_gpus_that_are_listed(text: str) -> None:
    assert list(listed(text)) == LISTED[text]


@pytest.mark.parametrize("text", NOT_ASKED)
def test_what_asks_for_none(text: str) -> None:
    with pytest.raises(ValueError, match="no GPUs; expected a count, or a type and a count like h100:8"):
        asked(text)


@pytest.mark.parametrize("text", NOT_LISTED)
def test_what_lists_none(text: str) -> None:
    with pytest.raises(ValueError, match="no GPUs; expected a count"):
        listed(text)


types = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True, alphabet="abcdefghijklmnopqrstuvwxyz0123456789_")
gpus = st.builds(Gpus, st.integers(0, 999), st.one_of(st.none(), types.filter(lambda text: text != "gpu")))


def written(item: Gpus) -> str:
    return f"{item.type}:{item.count}" if item.type else str(item.count)


@given(st.lists(gpus, min_size=1, max_size=4), st.sampled_from(["", "(S:0-1)", "(IDX:0,3-5)"]))
def test_what_is_written_is_read_back(items: list[Gpus], detail: str) -> None:
    assert list(asked(",".join(map(written, items)))) == items
    assert list(listed(",".join(f"gpu:{written(item)}{detail}" for item in items))) == items


others = st.sampled_from(["nvme:1", "nic:mlx5:2", "shard:8", "mps:100", "gpumem:8"])
details = st.sampled_from(["", "(S:0-1)", "(IDX:0,3-5)", "(IDX:N/A)"])


@given(
    st.lists(st.tuples(gpus, details, st.sampled_from(["", "gres:", "gres/"])), max_size=3),
    st.lists(others, max_size=2),
)
def test_gpus_are_found_among_other_resources(items: list[tuple[Gpus, str, str]], rest: list[str]) -> None:
    words = [
        f"{prefix}gpu:{written(item) if item.type else f'(null):{item.count}'}{end}" for item, end, prefix in items
    ]
    assert list(listed(",".join([*rest[:1], *words, *rest[1:]]))) == [item for item, _, _ in items]
    tres = [f"gres/gpu{':' if item.type else ''}{item.type or ''}={item.count}" for item, _, _ in items]
    assert list(listed(",".join(["cpu=4", *tres, "billing=7"]))) == [item for item, _, _ in items]


@given(st.text(st.sampled_from("gpu:h100,=/(S)-IDX8 resn")))
def test_no_text_does_worse_than_be_refused(text: str) -> None:
    for read in (asked, listed):
        try:
            found = read(text)
        except ValueError:
            continue
        assert all(item.count >= 0 for item in found)
