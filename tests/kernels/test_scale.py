import pytest
import torch
from stoker.kernels.reference import scale


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_factor_is_not_rounded_to_the_tensors_dtype(as_tensor):
    # 1.001 in bfloat16 would be 1.
    wide, narrow = torch.tensor([1000.0]), torch.full((3,), 996.0, dtype=torch.bfloat16)
    scale([wide, narrow], torch.tensor(1.005) if as_tensor else 1.005)
    assert wide.item() == 1005.0
    assert narrow.tolist() == [1000.0] * 3  # 1000.98, whose neighbours are 1000 and 1004


def test_strided_tensors_keep_their_neighbours_and_an_empty_list_is_fine():
    storage = torch.ones(4, 4)
    scale([storage[:, ::2]], 2.0)
    assert storage[0].tolist() == [2.0, 1.0, 2.0, 1.0]
    scale([], 2.0)
    scale([torch.empty(0, 3)], 2.0)


@pytest.mark.parametrize(
    ("tensors", "factor", "message"),
    [
        ([torch.ones(2)], torch.ones(2), r"factor has shape \(2,\), expected one element"),
        ([torch.ones(2, dtype=torch.int64)], 2.0, r"tensors\[0\] is torch.int64"),
    ],
)
def test_mistakes_are_named(tensors, factor, message):
    with pytest.raises(ValueError, match=message):
        scale(tensors, factor)
