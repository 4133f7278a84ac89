"""The kernel database: its form, what merges, and what is refused."""

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from database_row import ROW
from raised import raises_code

from onerank.annotate import find_gpu
from onerank.annotate.kernel_db.calls import call_key
from onerank.annotate.kernel_db.database import (
    SCHEMA,
    KernelRow,
    contents,
    merge,
    read_database,
    rows_of,
    table_of,
    write_database,
)

SHIPPED = Path(__file__).parents[3] / "annotate" / "databases"


def changed(**fields: Any) -> KernelRow:
    return msgspec.structs.replace(ROW, **fields)


FUSED = changed(
    operator="aten::_fused_adam_",
    shapes=((10, 4), (3,), ()),
    dtypes=("float32", "float32", "float32"),
    layout='{"2":"host"}',
    kernels=("first", "second"),
    kernel_ns=(3000, 2000),
    power_w=None,
    energy_mj=None,
    sm_clock_mhz=None,
    temperature_c=None,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one.parquet"
    write_database(table_of([ROW, FUSED]), path)
    assert [one.name for one in tmp_path.iterdir()] == ["one.parquet"]
    table = read_database(path)
    assert table.schema == SCHEMA
    assert sorted(rows_of(table), key=lambda row: row.operator) == [FUSED, ROW]


def test_an_empty_database_is_one(tmp_path: Path) -> None:
    write_database(table_of([]), tmp_path / "none.parquet")
    assert len(read_database(tmp_path / "none.parquet")) == 0


def test_merging_keeps_the_later_of_two_measurements_and_both_of_two_versions() -> None:
    later = changed(median_ns=46000, date="2026-11-22T09:00:00Z")
    other = changed(torch="2.12.0", median_ns=43900, p10_ns=43800)
    left_out = changed(l2="warm")
    made = merge([table_of([later, ROW]), table_of([ROW, other]), table_of([left_out])])
    assert made.replaced == 1
    found = [(row.torch, row.l2, row.median_ns) for row in rows_of(made.table)]
    assert found == [
        ("2.11.0", "cold", 46000),
        ("2.12.0", "cold", 43900),
        ("2.11.0", "warm", 45000),
    ]
    again = merge([made.table, made.table])
    assert again.replaced == 3
    assert again.table.equals(made.table)


def test_contents_tell_operators_and_their_range() -> None:
    small = changed(shapes=((8, 8), (8, 8)), median_ns=2000, p10_ns=1900, p90_ns=2100)
    (adam, mm) = contents(table_of([ROW, changed(l2="warm"), small, FUSED])).to_dicts()
    assert adam["operator"] == "aten::_fused_adam_"
    assert mm == {
        "gpu": "NVIDIA H200",
        "operator": "aten::mm",
        "dtype": "bfloat16",
        "calls": 2,
        "rows": 3,
        "shortest_ns": 2000,
        "longest_ns": 45000,
        "torch": "2.11.0",
    }


@pytest.mark.parametrize(
    ("expression", "code", "name"),
    [
        (pl.lit("hot").alias("l2"), "database-bad-value", "l2"),
        (pl.lit(0, pl.Int64).alias("p10_ns"), "database-bad-value", "0 < p10_ns"),
        (pl.lit(50000, pl.Int64).alias("median_ns"), "database-bad-value", "p10_ns <= median_ns"),
        (pl.lit(0, pl.Int32).alias("samples"), "database-bad-value", "samples > 0"),
        (pl.lit(-1.0).alias("power_w"), "database-bad-value", "power_w"),
        (pl.lit(None, pl.String).alias("gpu"), "database-null-value", "row 0"),
        (
            pl.lit([1], pl.List(pl.Int64)).alias("kernel_ns").list.head(0),
            *("database-list-lengths", "kernel_ns"),
        ),
        (pl.lit([None], pl.List(pl.String)).alias("kernels"), "database-null-element", "row 0"),
        (pl.col("dtypes").list.head(1), "database-list-lengths", "shapes and dtypes"),
        (pl.col("median_ns").cast(pl.Float64), "database-column-type", "median_ns holds Float64"),
        (pl.lit(1).alias("speed"), "database-unknown-column", "speed"),
    ],
)
def test_a_database_that_cannot_be_is_refused(
    tmp_path: Path, expression: pl.Expr, code: str, name: str
) -> None:
    path = tmp_path / "bad.parquet"
    table_of([ROW]).with_columns(expression).write_parquet(path)
    with raises_code(code, naming=(str(path), name)):
        read_database(path)


def test_a_lacking_column_and_a_repeated_row_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    table_of([ROW]).drop("kernels", "date").write_parquet(path)
    with raises_code("database-missing-column", naming=("kernels", "date")):
        read_database(path)
    pl.concat([table_of([ROW]), table_of([ROW])]).write_parquet(path)
    with raises_code("database-repeated-rows", naming=("bad.parquet", "1 rows", "gpu, operator")):
        read_database(path)


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"gpu,operator\n", b"PAR1" + bytes(64) + b"PAR1"]
)
def test_what_is_no_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(content)
    with raises_code("database-unreadable"):
        read_database(path)
    with pytest.raises(FileNotFoundError):
        read_database(tmp_path / "absent.parquet")


BF16 = '"Tensor(c10::BFloat16)"'


def test_the_key_of_a_call() -> None:
    product = call_key("aten::mm", "[[8,4],[4,2]]", f"[{BF16},{BF16}]", '[[1,2,0,32,2,"cuda:0"]]')
    assert product == ("aten::mm", ((8, 4), (4, 2)), ("bfloat16", "bfloat16"), "{}", False)
    joined = call_key(
        "aten::cat",
        "[[[1,2,64],[1,2,64]],[]]",
        '["GenericList[Tensor(float),Tensor(float)]","Int"]',
        '[[[1,2,0,128,4,"cuda:0"],[3,4,0,128,4,"cuda:0"]],-1]',
    )
    shapes = ((1, 2, 64), (1, 2, 64))
    assert joined == ("aten::cat", shapes, ("float32", "float32"), '{"1":-1}', False)
    mean = call_key(
        "aten::mean.dim",
        "[[4,8],[[]],[],[]]",
        '["Tensor(float)","GenericList[Int]","Bool","None"]',
        '[[1,2,0,32,4,"cuda:0"],[-1],true,"<None>"]',
    )
    assert mean == ("aten::mean", ((4, 8),), ("float32",), '{"1":[-1],"2":true}', False)


def test_the_key_of_attention_tells_dropout_but_no_scale() -> None:
    shapes = "[[1,8,64,128],[1,2,64,128],[1,2,64,128],[],[],[],[]]"
    types = f'[{BF16},{BF16},{BF16},"Double","Bool","Bool","Double"]'
    tensors = '[1,2,0,1,2,"cuda:0"],[3,4,0,1,2,"cuda:0"],[5,6,0,1,2,"cuda:0"]'
    op = "aten::_scaled_dot_product_flash_attention"
    for dropout, expected in (("0.000000", ""), ("0.100000", '"3":0.1,')):
        key = call_key(op, shapes, types, f"[{tensors},{dropout},true,false,0.088388]")
        assert key is not None
        assert key.attributes == "{" + expected + '"4":true,"5":false}'


def test_a_call_without_tensors_or_of_an_unknown_type_has_no_key() -> None:
    assert call_key("aten::arange", "[[]]", '["Int"]', "[4]") is None
    assert call_key("aten::mm", "[[8,4]]", '["Tensor(c10::Quaternion)"]') is None


def test_the_key_of_adam_tells_a_gradient_that_is_passed_twice() -> None:
    one, kind = "[[4],[2]]", "GenericList[Tensor(float),Tensor(float)]"
    shapes, types = f"[{one},{one},{one},[]]", f'["{kind}","{kind}","{kind}","Double"]'
    state, grad, other = (
        f'[[{n},{n},0,4,4,"cuda:0"],[{n + 1},{n},0,2,4,"cuda:0"]]' for n in (10, 20, 30)
    )
    for third, expected in ((grad, '{"2":"=1"}'), (other, "{}")):
        key = call_key("aten::_foreach_addcmul_", shapes, types, f"[{state},{grad},{third},0.1]")
        assert key is not None
        assert key.attributes == expected
        assert key.shapes == ((4,), (2,)) * 3


def test_the_shipped_database_is_of_a_gpu_with_a_description() -> None:
    (path,) = SHIPPED.glob("*.parquet")
    table = read_database(path)
    assert set(table["gpu"]) == {"NVIDIA H200"}
    gpu = find_gpu("NVIDIA H200")
    assert gpu is not None
    assert gpu.name == path.stem
    assert path.stat().st_size < 4e6
    cold = table.filter(pl.col("operator").eq("aten::mm") & pl.col("l2").eq("cold"))
    bf16 = [row for row in rows_of(cold) if row.dtypes[0] == "bfloat16"]
    assert len(bf16) > 400
    for row in bf16:
        (m, k), (_, n) = row.shapes
        assert 2 * m * n * k / row.median_ns / 1e3 < 989, "above the datasheet's peak"
