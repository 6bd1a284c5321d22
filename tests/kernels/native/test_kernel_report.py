"""Reading what nvcc says of kernels, and judging it by the claims of the sources."""

from __future__ import annotations

from pathlib import Path

import pytest
from stoker.kernels.native.report import (
    Claim,
    Usage,
    Wide,
    claims,
    short_name,
    table,
    usages,
    violations,
    wide_accesses,
)

COPY = "_ZN6stoker36_GLOBAL__N__c6136819_4_v_cu_9a18226b4copyI13__nv_bfloat16Li128EEEvPKT_PS3_l"
LOG = f"""== move.cu
nvcc -c move.cu
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{COPY}' for 'sm_80'
ptxas info    : Function properties for {COPY}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 128 bytes smem, 376 bytes cmem[0]
ptxas info    : Compile time = 4.056 ms
ptxas info    : Compiling entry function '{COPY}' for 'sm_90a'
ptxas info    : Function properties for {COPY}
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers

== libstoker.so
nvcc -shared
"""
SASS = f"""
Fatbin elf code:
================
arch = sm_90
\tcode for sm_90
\t\tFunction : {COPY}
        /*01d0*/                   LDG.E.128.CONSTANT R8, desc[UR6][R2.64] ;     /* 0x0000000602087981 */
        /*01e0*/                   LDG.E.LTC128B.64 R8, desc[UR6][R2.64] ;       /* 0x0000000602087981 */
        /*0200*/                   STG.E.128 desc[UR6][R4.64], R8 ;              /* 0x0000000804007986 */
        /*0260*/                   ST.E.128 desc[UR6][R2.64], R0 ;               /* 0x0000000002007986 */
        /*0270*/                   LDS.128 R0, [R2] ;                            /* 0x0000000002007986 */
\t\tFunction : other
        /*0260*/                   STG.E.U16 desc[UR6][R2.64], R0 ;              /* 0x0000000002007986 */
"""


def test_the_log_becomes_one_line_per_kernel_and_architecture() -> None:
    assert usages(LOG) == [
        Usage("move.cu", "copy<bf16, 128>", 80, 14, 0, 0, 0, 128),
        Usage("move.cu", "copy<bf16, 128>", 90, 255, 16, 12, 8, 0),
    ]


@pytest.mark.parametrize(
    ("symbol", "short"),
    [
        (COPY, "copy<bf16, 128>"),
        ("_ZN6stoker8sum_rowsIf6__halfLi256EEEvPKT_PT0_ll", "sum_rows<float, half, 256>"),
        ("_ZN6stoker3addIiLb1EEEvv", "add<int, true>"),
        ("not_mangled", "not_mangled"),
    ],
)
def test_names_are_short(symbol: str, short: str) -> None:
    assert short_name(symbol) == short


def test_accesses_of_16_bytes_to_global_memory_are_counted() -> None:
    assert wide_accesses(SASS.splitlines(keepends=True)) == {
        ("copy<bf16, 128>", 90): Wide(loads=1, stores=2),
        ("other", 90): Wide(),
    }


def test_claims_are_read_and_a_misspelt_one_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.cu"
    source.write_text(
        "// claim: copy<\\w+, 8>: 16-byte loads and stores\n"
        "// claim: norm: 16-byte loads\n"
        "    // claim: sort<.*>: may spill: 64 candidates\n"
    )
    assert claims(tmp_path) == [
        Claim("a.cu", "copy<\\w+, 8>", "loads and stores"),
        Claim("a.cu", "norm", "loads"),
        Claim("a.cu", "sort<.*>", "may spill"),
    ]
    source.write_text("\n// claim: sort<.*>: may spill\n")
    with pytest.raises(ValueError, match=r"a\.cu:2: .*expected '// claim: NAMES: ' and '16-byte loads'"):
        claims(tmp_path)


def test_spills_missing_wide_accesses_and_idle_claims_are_named() -> None:
    fine = Usage("a.cu", "copy<bf16, 8>", 90, 40, 0, 0, 0, 0)
    spills = Usage("a.cu", "sort<8>", 90, 255, 64, 12, 8, 0)
    wide = {fine.key: Wide(2, 0), spills.key: Wide(1, 1)}
    copies = Claim("a.cu", r"copy<\w+, 8>", "loads and stores")
    assert violations([fine], wide, []) == []
    assert violations([fine], wide, [Claim("a.cu", "copy<.*>", "loads")]) == []
    assert violations([fine, spills], wide, [copies]) == [
        "a.cu: copy<bf16, 8> for sm_90: 2 loads and 0 stores of 16 bytes; claimed: loads and stores",
        "a.cu: sort<8> for sm_90: spills 12 + 8 bytes, stack 64 bytes",
    ]
    assert violations([spills], wide, [Claim("a.cu", "sort<.*>", "may spill")]) == []
    assert violations([spills], {}, [Claim("a.cu", "sort<.*>", "may spill"), copies]) == [
        r"a.cu: no kernel is called copy<\w+, 8>, of which it claims: loads and stores"
    ]


def test_the_table_has_a_row_per_kernel_with_what_differs_side_by_side() -> None:
    rows = table(usages(LOG), {("copy<bf16, 128>", 90): Wide(1, 2)}).splitlines()
    assert rows[0].startswith("| file | kernel | registers, sm_80/sm_90 | spills, B |")
    assert rows[2:] == ["| move.cu | `copy<bf16, 128>` | 14/255 | 0/20 | 0/16 | 128/0 | 1, 2 |"]
