"""Figures of a host for calls of Python, from the result of the benchmark."""

import sys

import msgspec
import pytest

from onerank.annotate.hosts.host import load_host
from tools.fit import fit_python_calls
from tools.fit.fit_python_calls import Measured, python_call_times_us

TIMES_US = {
    "dtensor": 70.0,
    "dtensor_untracked": 20.0,
    "dtensor_listed": 5.0,
    "subclass": 30.0,
    "function": 10.0,
    "redistribute": 100.0,
    "fsdp_group": 400.0,
    "fsdp_parameter": 60.0,
}


@pytest.fixture
def measured() -> Measured:
    """A benchmark in which every kind takes its time in `TIMES_US`, whatever it is counted with."""
    host = load_host("typical")
    assert host is not None
    plain = {
        "mm": 8.0,
        "SGD": 90.0,
        "AdamW": 300.0,
        "32 tensor-parallel layers": 3000.0,
        "x": 5.0,
        "x, forward and backward": 25.0,
        "4 of 2": 90.0,
        "4 of 10": 200.0,
        "8 of 2": 190.0,
        "all_reduce": 20.0,
        "all_gather": 30.0,
    }
    counts: dict[str, dict[str, int]] = {
        "dtensor/mm": {"dtensor": 1},
        "dtensor/SGD": {"dtensor_untracked": 6, "dtensor_listed": 0},
        "dtensor/AdamW": {"dtensor_untracked": 2, "dtensor_listed": 40},
        "dtensor/32 tensor-parallel layers": {"dtensor": 380, "function": 190, "redistribute": 47},
        "subclass/mm": {"subclass": 1},
        "function/x": {"function": 1},
        "function/x, forward and backward": {"function": 2},
        "fsdp/4 of 2": {"fsdp_group": 12, "fsdp_parameter": 24},
        "fsdp/4 of 10": {"fsdp_group": 12, "fsdp_parameter": 120},
        "fsdp/8 of 2": {"fsdp_group": 24, "fsdp_parameter": 48},
    }
    figures = host.figures
    launching_us = (figures["collective"].p50_ns + 2 * figures["backward"].p50_ns) / 1e3
    times = {f"plain/{case}": us for case, us in plain.items()}
    for name, of_call in counts.items():
        extra = sum(TIMES_US[kind] * count for kind, count in of_call.items())
        extra += of_call.get("fsdp_group", 0) * launching_us
        times[name] = plain[name.split("/")[1]] + extra
    times |= {"from_local": 10.0, "to_local": 10.0}
    gathers = {"replicated to shard": 0.0, "partial to replicated": 20.0,
               "shard to replicated": 30.0, "partial to shard": 30.0}  # fmt: skip
    times |= {f"redistribute, {case}": us + 110.0 for case, us in gathers.items()}
    return Measured({name: [us - 1, us, us + 5] for name, us in times.items()}, counts)


def test_each_kind_has_the_time_that_it_adds(measured: Measured):
    host = load_host("typical")
    assert host is not None
    assert python_call_times_us(measured, host) == pytest.approx(TIMES_US)


def test_the_description_keeps_other_figures(measured: Measured, tmp_path, monkeypatch):
    source, output = tmp_path / "measured.json", tmp_path / "host.toml"
    source.write_bytes(msgspec.json.encode(measured))
    arguments = ["fit", str(source), "--source", "a test", "-o", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    fit_python_calls.main()
    before, after = load_host("typical"), load_host(output)
    assert before is not None
    assert after is not None
    assert before.further is not None
    assert after.further == before.further
    for kind, time in after.figures.items():
        if kind not in TIMES_US:
            assert time == before.figures[kind]
            continue
        assert time.p50_ns == pytest.approx(TIMES_US[kind] * 1e3)
        assert time.p90_ns == pytest.approx(before.further.p90 * time.p50_ns, abs=1)
    assert after.sources["python"] == "a test"


def test_a_negative_time_is_refused(measured: Measured, tmp_path, monkeypatch, capsys):
    """As of noisy samples, in which groups of many parameters take less time than those of few."""
    source, output = tmp_path / "measured.json", tmp_path / "host.toml"
    measured.times_us["fsdp/4 of 10"] = [100.0, 100.0, 100.0]
    source.write_bytes(msgspec.json.encode(measured))
    arguments = ["fit", str(source), "--source", "a test", "-o", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as raised:
        fit_python_calls.main()
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert str(source) in message
    assert "fsdp_parameter" in message
    assert not output.exists()


def test_a_host_without_figures_is_refused(tmp_path, monkeypatch, capsys):
    output = tmp_path / "host.toml"
    arguments = ["fit", "measured.json", "--host", "none", "--source", "a test", "-o", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as raised:
        fit_python_calls.main()
    assert raised.value.code == 2
    assert "--host" in capsys.readouterr().err
    assert not output.exists()
