import pytest
import torch
from stoker.kernels.reference import cast_copy


def test_values_are_rounded_to_the_nearest():
    targets = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1)]
    cast_copy(targets, [torch.tensor([1.0 + 2.0**-9, 1.0 + 3 * 2.0**-9]), torch.tensor([0.5], dtype=torch.float16)])
    assert targets[0].tolist() == [1.0, 1.0 + 2.0**-7]
    assert targets[1].item() == 0.5
    cast_copy([], [])


@pytest.mark.parametrize(
    ("sources", "message"),
    [([], "0 sources for 1 targets"), ([torch.ones(4)], r"at 0 \(4,\) into \(3,\)")],
)
def test_mistakes_are_named(sources, message):
    with pytest.raises(ValueError, match=message):
        cast_copy([torch.ones(3)], sources)
