import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch
from stoker.kernels import IMPLEMENTATIONS, OP_NAMES, Device, Implementation, reference, select, table
from stoker.kernels.dispatch import POINTWISE
from stoker.kernels.measured import Measured

H100 = Device("cuda", 90, "NVIDIA H100")
T4 = Device("cuda", 75, "Tesla T4")


def fast_rmsnorm(x, weight, eps, residual=None, offset=0.0):
    return x * 0


def fast_swiglu(gate, up):
    return gate


def row(load=lambda: fast_rmsnorm, **changes):
    return Implementation(**{"op": "rmsnorm", "name": "native", "load": load, **changes})


def native(**changes):
    """A row like those of our own kernels."""
    return row(devices=("cuda",), capability=80, is_expected=True, **changes)


REFERENCES = [i for i in IMPLEMENTATIONS if i.name in ("reference", "sdpa")]


def choice(ops, op="rmsnorm"):
    return next((c.implementation, c.why) for c in ops.choices if c.op == op)


def refusal(config, device="cpu", implementations=IMPLEMENTATIONS, **options):
    """The lines of the error that selecting raises."""
    with pytest.raises(ValueError, match=r"^kernels") as error:
        select(config, device, implementations, **options)
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
        "weight_gradient",
        "dropout",
        "adamw",
        "l2norm",
        "scale",
        "cast_copy",
        "stochastic_round",
        "moe_topk",
        "moe_sort",
        "moe_permute",
        "moe_unpermute",
        "quantize_fp8",
    )


def test_auto_is_the_reference_on_the_cpu_without_a_word_on_what_gpus_have():
    ops = select()
    for name in OP_NAMES:
        assert getattr(ops, name) is getattr(reference, name)
    assert [(c.op, c.implementation, c.why) for c in ops.choices] == [(name, "reference", "auto") for name in OP_NAMES]


def test_the_table_is_aligned_and_has_a_line_per_op():
    lines = table(select({"rope": "reference"}).choices).splitlines()
    assert lines[:4] == [
        "kernels               chosen     why",
        "rmsnorm               reference  auto",
        "layernorm             reference  auto",
        "rope                  reference  as configured",
    ]
    assert len(lines) == 1 + len(OP_NAMES)


def test_an_explicit_choice_says_where_it_came_from():
    ops = select({"default": "reference", "rope": "reference"})
    assert choice(ops, "layernorm") == ("reference", "by kernels=reference")
    assert choice(ops, "rope") == ("reference", "as configured")


def test_a_default_counts_for_the_ops_that_have_it():
    ops = select({"default": "native"}, H100, [*REFERENCES, native()])
    assert choice(ops) == ("native", "by kernels=native")
    assert choice(ops, "rope") == ("reference", "auto; has no native")
    ops = select({"default": "mine"}, H100, [*REFERENCES, native(), row(name="mine")])
    assert choice(ops) == ("mine", "by kernels.default=mine")  # no group is called so


def test_the_result_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        select().rmsnorm = fast_rmsnorm


def missing(_):
    return "not built"


def test_a_missing_choice_names_what_lacks_and_is_not_replaced():
    assert refusal({"rmsnorm": "native"}, H100, [*REFERENCES, native(lacking=missing)]) == [
        "kernels.rmsnorm=native: not built; choose reference, or set kernels.strict=false"
    ]


def test_auto_on_a_gpu_expects_our_kernels():
    assert refusal({}, H100, [*REFERENCES, native(lacking=missing)]) == [
        "kernels=auto: rmsnorm: native: not built; or kernels.strict=false, and the next best takes over"
    ]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "auto; native: not built"),
        ({"default": "native"}, "instead of native, with kernels.strict=false: not built"),
        ({"rmsnorm": "native"}, "instead of native, with kernels.strict=false: not built"),
    ],
    ids=["auto", "default", "named"],
)
def test_the_reference_takes_over_without_strictness_and_says_why(config, why):
    ops = select(config, H100, [*REFERENCES, native(lacking=missing)], strict=False)
    assert ops.rmsnorm is reference.rmsnorm
    assert choice(ops) == ("reference", why)


def test_a_gpu_that_is_too_old_gets_the_reference_from_auto_and_a_refusal_by_name():
    rows = [*REFERENCES, native()]
    why = "auto; native: needs compute capability 8.0, Tesla T4 (sm_75) has 7.5"
    assert choice(select({}, T4, rows)) == ("reference", why)
    assert "needs compute capability 8.0" in refusal({"rmsnorm": "native"}, T4, rows)[0]
    assert choice(select({}, H100, rows)) == ("native", "auto")


def test_float64_gets_the_reference_from_auto_and_a_refusal_by_name():
    implementations = [*REFERENCES, native(takes_float64=False, lacking=lambda device: "not built")]
    assert choice(select({}, H100, implementations, is_float64=True)) == ("reference", "auto; native: takes no float64")
    (line,) = refusal({"rmsnorm": "native"}, H100, implementations, is_float64=True)
    assert line == ("kernels.rmsnorm=native: takes no float64; choose reference, or set kernels.strict=false")
    assert {i.name for i in IMPLEMENTATIONS if not i.takes_float64} == {"native", "apex"}


def test_the_wrong_device_is_named():
    with pytest.raises(ValueError, match=r"^kernels\.rmsnorm=native: runs on cuda, this run is on cpu"):
        select({"rmsnorm": "native"}, "cpu", [*REFERENCES, native()])


def test_an_op_without_that_implementation_says_what_to_choose():
    assert refusal({"dropout": "native"}, "cpu", [*REFERENCES, native()]) == [
        "kernels.dropout=native: no such implementation; choose auto or reference"
    ]


def test_unknown_names_come_with_the_nearest_and_the_known_all_at_once():
    first, second, third = refusal({"rmsnrom": "auto", "rope": "refrence", "default": "zzz"}, "cpu", REFERENCES)
    assert first.startswith("kernels.rmsnrom: unknown op, did you mean rmsnorm? known: default, rmsnorm, layernorm, ")
    assert second == (
        "kernels.rope=refrence: unknown implementation, did you mean reference? known: auto, reference, sdpa"
    )
    assert third == "kernels.default=zzz: unknown implementation; known: auto, reference, sdpa"


def test_ops_that_lack_the_same_share_a_line():
    rows = [native(lacking=missing), native(op="swiglu", load=lambda: fast_swiglu, lacking=missing)]
    rows.append(row(op="adamw", name="native", lacking=lambda _: "another reason"))
    assert refusal({"default": "native", "swiglu": "auto"}, H100, [*REFERENCES, *rows]) == [
        "kernels=native: rmsnorm: not built; choose reference, or set kernels.strict=false",
        "kernels.swiglu=auto: native: not built; or kernels.strict=false, and the next best takes over",
        "kernels=native: adamw: another reason; choose reference, or set kernels.strict=false",
    ]
    (line,) = refusal({}, H100, [*REFERENCES, *rows[:2]])
    assert line.startswith("kernels=auto: rmsnorm, swiglu: native: not built; ")


def test_auto_takes_the_best_that_is_there_and_only_for_its_op():
    ops = select(implementations=[*REFERENCES, row()])
    assert ops.rmsnorm is fast_rmsnorm
    assert ops.rope is reference.rope
    assert choice(ops) == ("native", "auto")
    assert select({"rmsnorm": "reference"}, implementations=[*REFERENCES, row()]).rmsnorm is reference.rmsnorm


def test_a_plug_in_of_another_name_is_chosen_by_name_and_after_ours_by_auto():
    rows = [*IMPLEMENTATIONS, row(name="mine")]
    assert select({"rmsnorm": "mine"}, implementations=rows).rmsnorm is fast_rmsnorm
    assert select(implementations=rows).rmsnorm is reference.rmsnorm


def measured(**results):
    return Measured("NVIDIA H100", torch.__version__, "x", results)


def test_measured_times_decide_between_those_that_are_there():
    rows = [*REFERENCES, native(), row(name="apex", devices=("cuda",)), row(name="mine", lacking=missing)]
    times = measured(rmsnorm={"reference": 40.0, "native": 12.25, "apex": 9.5, "mine": 1.0})
    why = "auto, measured here: apex 9.5 us, native 12.2 us, reference 40.0 us"
    assert choice(select({}, H100, rows, measured=times)) == ("apex", why)
    assert choice(select({"rmsnorm": "native"}, H100, rows, measured=times)) == ("native", "as configured")


def test_one_time_alone_decides_nothing():
    ops = select({}, H100, [*REFERENCES, native()], measured=measured(rmsnorm={"reference": 1.0}))
    assert choice(ops) == ("native", "auto")


def test_pointwise_ops_are_left_to_the_compiler_unless_measured_otherwise():
    swiglu = native(op="swiglu", load=lambda: fast_swiglu)
    rows = [*REFERENCES, native(), swiglu]
    ops = select({}, H100, rows, is_compiled=True)
    assert choice(ops, "swiglu") == ("reference", "auto: left to the compiler")
    assert choice(ops, "rmsnorm") == ("native", "auto")
    slow = measured(swiglu={"reference": 30.0, "native": 10.0, "inductor": 11.0})
    why = "auto, measured here: native 10.0 us, reference 11.0 us"
    assert choice(select({}, H100, rows, is_compiled=True, measured=slow), "swiglu") == ("native", why)
    # What runs eagerly says nothing of what the compiler makes of it.
    eager = measured(swiglu={"reference": 30.0, "native": 10.0})
    assert choice(select({}, H100, rows, is_compiled=True, measured=eager), "swiglu")[0] == "reference"
    # Nothing is missed, then, where it is not there.
    absent = [*REFERENCES, native(op="swiglu", lacking=missing)]
    assert choice(select({}, H100, absent, is_compiled=True), "swiglu")[0] == "reference"


def test_pointwise_ops_are_ops():
    assert set(POINTWISE) <= set(OP_NAMES)


def test_loading_happens_only_for_what_was_chosen():
    def fails():
        raise RuntimeError("imported without need")

    table = [*REFERENCES, row(load=fails)]
    assert select({"rmsnorm": "reference"}, implementations=table).rmsnorm is reference.rmsnorm
    with pytest.raises(RuntimeError, match="imported without need"):
        select(implementations=table)


def test_an_implementation_with_another_signature_is_refused():
    def drifted(x, weight, epsilon, residual=None, offset=0.0):
        return x

    with pytest.raises(TypeError, match=r"kernels.rmsnorm=native: signature \(x, weight, epsilon, residual=None"):
        select(implementations=[*REFERENCES, row(load=lambda: drifted)])


def test_every_op_documents_itself():
    for name in OP_NAMES:
        text = inspect.getdoc(getattr(reference, name))
        assert "Returns" in text or name in ("adamw", "scale", "cast_copy", "stochastic_round"), name
        assert inspect.signature(getattr(reference, name)).return_annotation is not inspect.Signature.empty


def test_selecting_starts_no_accelerator():
    code = (
        "import torch; from stoker.kernels import select; select(device='cuda', strict=False); "
        "assert not torch.cuda.is_initialized()"
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
