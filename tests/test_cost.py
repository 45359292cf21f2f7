"""The arithmetic of `cuflash.memory`, against counts by hand and published figures."""

import dataclasses

import pytest

import cuflash
from cuflash import cost

GIB, MIB = 1 << 30, 1 << 20


def test_the_score_matrix_of_8192() -> None:
    """One head's scores are 256 MiB in float32; S and P of 32 heads 8 GiB in float16."""
    one = cuflash.memory(seqlen=8192, dtype="float32")
    assert one.standard_forward == 2 * 256 * MIB and one.standard_backward == 3 * 256 * MIB
    report = cuflash.memory(seqlen=8192, heads=32)
    assert report.standard_forward == 8 * GIB and report.standard_backward == 12 * GIB
    assert report.tiled_forward == 32 * 8192 * 4  # lse
    assert report.tiled_backward == 2 * 32 * 8192 * 4  # lse and delta
    assert report.ratio == 12 * GIB / (2 * 32 * 8192 * 4)


def test_memory_is_linear_and_quadratic() -> None:
    short, long = (cuflash.memory(seqlen=n) for n in (1024, 16384))
    assert long.tiled_forward == 16 * short.tiled_forward
    assert long.tiled_backward == 16 * short.tiled_backward
    assert long.standard_backward == 256 * short.standard_backward


@pytest.mark.parametrize(("way", "share"), [("fused", 14 / 12 - 1), ("split", 18 / 12 - 1)])
def test_recomputing_costs(way: str, share: float) -> None:
    """+16.7 % in one pass, +50 % in two; the matrix products counted one by one."""
    report = cuflash.memory(seqlen=512, head_dim=64, way=way)
    assert report.recompute == pytest.approx(share)
    pairs, d = 512 * 512, 64
    assert report.standard_flops_forward == 2 * (2 * pairs * d)
    assert report.standard_flops_backward == 4 * (2 * pairs * d)
    assert report.flops_backward == {"fused": 5, "split": 7}[way] * (2 * pairs * d)


def test_products_of_unequal_head_dims() -> None:
    """S, dQ, dK are of head_dim; O, dP, dV of head_dim_v; the split way has S and dP twice."""
    assert cost.forward_flops(10, 3, 5) == 2 * 10 * (3 + 5)
    assert cost.backward_flops(10, 3, 5, "standard") == 2 * 10 * (2 * 3 + 2 * 5)
    assert cost.backward_flops(10, 3, 5, "fused") == 2 * 10 * (3 * 3 + 2 * 5)
    assert cost.backward_flops(10, 3, 5, "split") == 2 * 10 * (4 * 3 + 3 * 5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_tiled_backward_holds(dtype: str) -> None:
    """The fused way sums dq in the accumulation type, which 16 bit inputs need memory for."""
    wide = 8 if dtype == "float64" else 4
    assert cost.tiled_bytes(100, 64, dtype, False) == 100 * wide
    assert cost.tiled_bytes(100, 64, dtype, True, "split") == 2 * 100 * wide
    dq = 100 * 64 * 4 if dtype in ("float16", "bfloat16") else 0
    assert cost.tiled_bytes(100, 64, dtype, True, "fused") == 2 * 100 * wide + dq


def test_bytes_moved() -> None:
    """The three levels, counted by hand for N = 256, M = 512, d = 64 in float32."""
    shape = (1, 1, 1, 256, 512, 64, 64, "float32")
    q, k, pairs, row = 256 * 64, 512 * 64, 256 * 512, 256
    forward = cost.traffic(*shape, False)
    assert forward.standard == 4 * (2 * q + 2 * k + 4 * pairs)
    assert forward.tiled == 4 * (2 * q + row + 2 * 2 * k)
    assert forward.compulsory == 4 * (2 * q + 2 * k + row)
    backward = cost.traffic(*shape, True)
    assert backward.standard == 4 * (4 * q + 4 * k + 7 * pairs)
    assert backward.tiled == 4 * (4 * k + 4 * (4 * q + 2 * row))
    assert backward.compulsory == 4 * (5 * q + 4 * k + 2 * row)


def test_bytes_moved_against_the_paper() -> None:
    """arXiv:2205.14135, figure 2: 40.3 GB against 4.4 GB, with mask and dropout; the order."""
    report = cuflash.memory(seqlen=1024, batch=64, heads=16, head_dim=64)
    standard = report.traffic_forward.standard + report.traffic_backward.standard
    assert 25e9 < standard < 40.3e9  # the paper also counts passes for mask and dropout
    tiled = report.traffic_forward.compulsory + report.traffic_backward.compulsory
    assert tiled < 4.4e9 < report.traffic_forward.tiled + report.traffic_backward.tiled


def test_masks_save_work_and_traffic_but_standard_attention_none() -> None:
    """A window of 2048 and 200 global tokens at 100k leave 4.46 % of the pairs: 22.4 times less."""
    dense, sparse = (cuflash.memory(seqlen=100_000, density=x) for x in (1.0, 0.0446))
    assert sparse.flops_forward == pytest.approx(dense.flops_forward / 22.4, rel=2e-3)
    assert sparse.flops_backward == pytest.approx(dense.flops_backward / 22.4, rel=2e-3)
    assert sparse.traffic_forward.tiled < dense.traffic_forward.tiled / 20
    assert sparse.standard_flops_forward == dense.standard_flops_forward
    assert sparse.standard_forward == dense.standard_forward
    assert sparse.recompute == dense.recompute


def test_groups_and_lengths() -> None:
    report = cuflash.memory(
        seqlen=100, seqlen_k=300, batch=2, heads=8, heads_k=2, head_dim=64, head_dim_v=32,
    )  # fmt: skip
    assert report.tensors_forward == 2 * (2 * 8 * 100 * 96 + 2 * 2 * 300 * 96)
    assert report.tensors_backward == 2 * report.tensors_forward
    assert report.standard_forward == 2 * 2 * (2 * 8 * 100 * 300)
    whole = cuflash.memory(seqlen=100, seqlen_k=300, batch=2, heads=8, head_dim=64, head_dim_v=32)
    assert report.traffic_forward.compulsory < whole.traffic_forward.compulsory


def test_forward_alone() -> None:
    report = cuflash.memory(seqlen=64, backward=False)
    assert report.tensors_backward == report.standard_backward == report.tiled_backward == 0
    assert report.flops_backward == report.recompute == report.traffic_backward.tiled == 0
    assert report.ratio == report.standard_forward / report.tiled_forward
    assert "backward" not in str(report)


def test_the_table_reads() -> None:
    text = str(cuflash.memory(seqlen=8192, heads=32, head_dim=128))
    for words in ("8192", "8.0 GiB", "12.0 GiB", "1.0 MiB", "6,144 times", "+50.0%", "DRAM"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("zero", ["seqlen", "seqlen_k", "batch", "heads", "heads_k"])
def test_zero(zero: str) -> None:
    sizes = {"seqlen": 8, "seqlen_k": 8, "batch": 1, "heads": 1, "heads_k": 1}
    report = cuflash.memory(**{**sizes, zero: 0})
    assert str(report) and report.ratio >= 0
    if zero != "heads_k":
        assert report.standard_forward == 0


def test_the_record_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        cuflash.memory(seqlen=1).tiled_forward = 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dtype": "int8"}, TypeError, "dtype must be one of float16"),
        ({"batch": -1}, ValueError, "batch must not be negative"),
        ({"density": 1.5}, ValueError, "density must be in 0..1"),
        ({"way": "other"}, ValueError, "way must be one of fused, split"),
    ],
)
def test_errors(options: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        cuflash.memory(**{"seqlen": 8, **options})
