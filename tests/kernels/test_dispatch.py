import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch
from stoker.kernels import IMPLEMENTATIONS, OP_NAMES, Implementation, reference, select


def fast_rmsnorm(x, weight, eps, residual=None, offset=0.0):
    return x * 0


def row(load=lambda: fast_rmsnorm, **changes):
    return Implementation(**{"op": "rmsnorm", "name": "native", "load": load, **changes})


def without_native():
    return [i for i in IMPLEMENTATIONS if i.name != "native"]


def refusal(config, device="cpu"):
    """The lines of the error that selecting raises."""
    with pytest.raises(ValueError, match=r"^kernels") as error:
        select(config, device)
    return str(error.value).splitlines()


def test_the_ops_of_this_package():
    assert OP_NAMES == (
        "rmsnorm",
        "layernorm",
        "rope",
        "swiglu",
        "geglu",
        "gelu",
        "attention",
        "cross_entropy",
        "cross_entropy_stats",
        "cross_entropy_grad",
        "linear_cross_entropy",
        "dropout",
        "adamw",
        "l2norm",
    )


def test_auto_is_the_reference_on_the_cpu_and_says_so_in_one_line_per_op():
    ops = select()
    for name in OP_NAMES:
        assert getattr(ops, name) is getattr(reference, name)
    assert [str(c) for c in ops.choices] == [f"kernels.{name} = reference (auto)" for name in OP_NAMES]


def test_auto_on_a_gpu_says_what_it_passed_over():
    line = str(select(device="cuda").choices[0])
    assert line == (
        "kernels.rmsnorm = reference (auto; native: this version of stoker does not have it yet; apex: needs "
        "fused_layer_norm_cuda from NVIDIA apex, built from source with APEX_CUDA_EXT=1 (PyPI's apex is another "
        "project), this version of stoker does not have it yet)"
    )


def test_an_explicit_choice_says_where_it_came_from():
    lines = [str(c) for c in select({"default": "reference", "rope": "reference"}).choices]
    assert lines[:3] == [
        "kernels.rmsnorm = reference (by kernels.default)",
        "kernels.layernorm = reference (by kernels.default)",
        "kernels.rope = reference (as configured)",
    ]


def test_the_result_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        select().rmsnorm = fast_rmsnorm


def test_a_missing_choice_names_what_lacks_and_is_not_replaced():
    assert refusal({"rmsnorm": "apex"}, "cuda") == [
        "kernels.rmsnorm=apex: rmsnorm: needs fused_layer_norm_cuda from NVIDIA apex, built from source with "
        "APEX_CUDA_EXT=1 (PyPI's apex is another project); this version of stoker does not have it yet; "
        "choose auto or reference for kernels.rmsnorm"
    ]


def test_the_wrong_device_is_named():
    with pytest.raises(ValueError, match=r"adamw: needs amp_C .*; runs on cuda, this run is on cpu"):
        select({"adamw": "apex"}, device="cpu")


def test_an_op_without_that_implementation_says_what_to_choose():
    assert refusal({"swiglu": "apex"}) == [
        "kernels.swiglu=apex: swiglu has no such implementation; choose auto or reference for kernels.swiglu"
    ]


def test_unknown_names_come_with_the_nearest_and_the_known_all_at_once():
    first, second, third = refusal({"rmsnrom": "auto", "rope": "refrence", "default": "zzz"})
    assert first.startswith("kernels.rmsnrom: unknown op, did you mean rmsnorm? known: default, rmsnorm, layernorm, ")
    assert second == (
        "kernels.rope=refrence: unknown implementation, did you mean reference? known: apex, auto, flash, native, "
        "reference, sdpa, varlen"
    )
    assert (
        third
        == "kernels.default=zzz: unknown implementation; known: apex, auto, flash, native, reference, sdpa, varlen"
    )


def test_an_unavailable_default_names_every_op_it_fails_for():
    lines = refusal({"default": "native", "rope": "reference"}, "cuda")
    assert len(lines) == len(OP_NAMES) - 1
    assert lines[0].startswith("kernels.default=native: rmsnorm: this version of stoker does not have it yet; choose ")


def test_auto_takes_the_fastest_that_is_there_and_only_for_its_op():
    ops = select(implementations=[*without_native(), row()])
    assert ops.rmsnorm is fast_rmsnorm
    assert ops.rope is reference.rope
    assert str(ops.choices[0]) == "kernels.rmsnorm = native (auto)"
    assert select({"rmsnorm": "reference"}, implementations=[*without_native(), row()]).rmsnorm is reference.rmsnorm


def test_a_plug_in_of_another_name_is_chosen_by_name_and_after_ours_by_auto():
    table = [*IMPLEMENTATIONS, row(name="mine")]
    assert select({"rmsnorm": "mine"}, implementations=table).rmsnorm is fast_rmsnorm
    assert select(implementations=table).rmsnorm is reference.rmsnorm


def test_an_implementation_whose_module_is_absent_is_passed_over_by_auto():
    absent = row(module="no_such_module_anywhere", source="somewhere")
    ops = select(implementations=[*without_native(), absent])
    assert str(ops.choices[0]) == (
        "kernels.rmsnorm = reference (auto; native: needs no_such_module_anywhere from somewhere)"
    )


def test_loading_happens_only_for_what_was_chosen():
    def fails():
        raise RuntimeError("imported without need")

    table = [*without_native(), row(load=fails)]
    assert select({"rmsnorm": "reference"}, implementations=table).rmsnorm is reference.rmsnorm
    with pytest.raises(RuntimeError, match="imported without need"):
        select(implementations=table)


def test_an_implementation_with_another_signature_is_refused():
    def drifted(x, weight, epsilon, residual=None, offset=0.0):
        return x

    with pytest.raises(TypeError, match=r"kernels.rmsnorm=native: signature \(x, weight, epsilon, residual=None"):
        select(implementations=[*without_native(), row(load=lambda: drifted)])


def test_every_op_documents_itself():
    for name in OP_NAMES:
        text = inspect.getdoc(getattr(reference, name))
        assert "Returns" in text or name == "adamw", name
        assert inspect.signature(getattr(reference, name)).return_annotation is not inspect.Signature.empty


def test_selecting_starts_no_accelerator():
    code = (
        "import torch; from stoker.kernels import select; select(device='cuda'); assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.full
def test_ops_compile_without_graph_breaks():
    ops = select()
    weight, bias, inv_freq, positions = torch.randn(16), torch.randn(16), torch.rand(4), torch.arange(6).expand(2, 6)

    def block(x, head):
        y, total = ops.rmsnorm(x, weight, 1e-5, x * 2)
        q, k = ops.rope(y.unflatten(-1, (2, 8)), y.unflatten(-1, (2, 8)), positions, inv_freq)
        z = ops.attention(q, k, y.unflatten(-1, (2, 8)), window=3).flatten(2)
        z = ops.geglu(ops.swiglu(z, total), ops.gelu(total))
        z = ops.layernorm(z, weight, bias, 1e-5)
        return ops.cross_entropy(z @ head.T, positions).sum()

    x, head = torch.randn(2, 6, 16, requires_grad=True), torch.randn(11, 16, requires_grad=True)
    want = torch.autograd.grad(block(x, head), (x, head))
    found = torch.autograd.grad(torch.compile(block, backend="aot_eager", fullgraph=True)(x, head), (x, head))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)
