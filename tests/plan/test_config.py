"""The configuration of a plan: each field is checked, and an error names the place."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from onerank.ir.errors import OneRankError
from onerank.plan.captures import TRAIN_MODEL
from onerank.plan.cluster import ClusterLink
from onerank.plan.config import PlanConfig, read_config

CONFIG = """\
[model]
script = "train.py"
arguments = ["--seq", "{seq}", "--json", '{"a": 1}', "--recompute={recompute}"]

[cluster]
gpu = "H100"
nodes = 2
gpus_per_node = 8
price_per_gpu_hour = 2.5
intra_node = { busbw_gb_per_s = 370, latency_us = 10 }
inter_node = { busbw_gb_per_s = 45, latency_us = 25 }

[job]
global_batch = 64
seq = 4096

[vary]
tp = [1, 2]
pp = 2
schedule = ["1f1b", "interleaved:2"]
recompute = ["none", "full"]
"""

Read = Callable[[str], PlanConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that reads the text of a configuration next to a script."""
    (tmp_path / "train.py").write_text("import local\n")
    (tmp_path / "model.json").write_text('{"model_type": "llama"}')

    def read_text(text: str) -> PlanConfig:
        path = tmp_path / "plan.toml"
        path.write_text(text)
        return read_config(path)

    return read_text


def test_a_single_value_is_a_list_of_one(read: Read):
    job = read(CONFIG).job
    assert job.choices.tp == (1, 2)
    assert job.choices.pp == (2,)
    assert job.choices.seq == (4096,)
    assert job.choices.dp == "rest"
    assert (job.cluster.gpus, job.global_batch) == (16, 64)
    assert job.cluster.inter_node == ClusterLink(45, 25)
    assert job.model.arguments[3] == '{"a": 1}'


def test_one_node_needs_no_network_between_nodes(read: Read):
    config = read(CONFIG.replace("nodes = 2", "nodes = 1").replace("inter_node", "#"))
    assert config.job.cluster.inter_node == ClusterLink(370, 10)


def test_a_model_is_trained_by_the_loop_of_onerank(read: Read):
    script = CONFIG[: CONFIG.index("[cluster]")]
    config = read(CONFIG.replace(script, '[model]\nconfig = "model.json"\n'))
    assert config.job.model.script == TRAIN_MODEL
    assert config.job.model.arguments[:3] == ("model.json", "--seq", "{seq}")


@pytest.mark.parametrize(
    ("before", "after", "code", "place"),
    [
        ("nodes = 2", "", "plan-missing-field", "[cluster] lacks nodes"),
        ("[job]\nglobal_batch = 64\nseq = 4096", "", "plan-missing-field", "[job]"),
        ("busbw_gb_per_s = 45, ", "", "plan-missing-field", "inter_node lacks busbw_gb_per_s"),
        ("inter_node", "#", "plan-missing-field", "[cluster]"),
        ("latency_us = 25", "latency_ns = 2", "plan-unknown-field", "[cluster] inter_node"),
        ("nodes = 2", "nodes = 2\nnode = 2", "plan-unknown-field", '"node"; did you mean nodes?'),
        ("tp = [1, 2]", "tq = [1, 2]", "plan-unknown-field", '[vary] has an unknown field "tq"'),
        ("[vary]", "[cary]", "plan-unknown-field", '"cary"; did you mean vary?'),
        ("nodes = 2", 'nodes = "two"', "plan-wrong-type", "[cluster] nodes"),
        ("tp = [1, 2]", 'tp = [1, "2"]', "plan-wrong-type", "[vary] tp[1]"),
        ("pp = 2", 'dp = "all"', "plan-wrong-type", '"rest"'),
        ("nodes = 2", "nodes = 0", "plan-out-of-range", "[cluster] nodes is 0"),
        ("= 45", "= nan", "plan-out-of-range", "[cluster] inter_node busbw_gb_per_s is nan"),
        ("= 45", "= -45", "plan-out-of-range", "[cluster] inter_node busbw_gb_per_s is -45"),
        ("= 2.5", "= -1", "plan-out-of-range", "[cluster] price_per_gpu_hour is -1"),
        ("seq = 4096", "seq = 0", "plan-out-of-range", "[job] seq is 0"),
        ("tp = [1, 2]", "tp = [1, 0]", "plan-out-of-range", "[vary] tp is 0"),
        ("tp = [1, 2]", "tp = []", "plan-out-of-range", "[vary] tp lists no value"),
        ("pp = 2", 'sharding = "zero9"', "plan-unknown-sharding", "[vary] sharding"),
        ('"1f1b"', '"2f2b"', "schedule-unknown", "[vary] schedule"),
        ('"H100"', '"H101"', "gpu-unknown", "[cluster] gpu: "),
        ('"train.py"', '"trian.py"', "plan-no-file", "[model] trian.py"),
        ('script = "train.py"', "", "plan-model-source", "neither"),
        ("arguments", 'config = "train.py"\narguments', "plan-model-source", "both"),
        ("--recompute={recompute}", "--x", "plan-no-placeholder", "recompute varies (none, full)"),
        ("{seq}", "{sequence}", "plan-unknown-placeholder", "{sequence}"),
        ("[vary]", "[vary", "toml-malformed", "line"),
        ("nodes = 2", 'nodes = 2\nhost = "quick"', "host-unknown", "[cluster] host: "),
        ("pp = 2", 'variant = ["", "--compile"]', "plan-no-placeholder", "variant varies"),
        ("{seq}", "{tp}", "plan-unknown-placeholder", "{tp}"),
    ],
)
def test_a_bad_field_is_named(read: Read, before: str, after: str, code: str, place: str):
    assert before in CONFIG
    with pytest.raises(OneRankError, match=re.escape(place)) as caught:
        read(CONFIG.replace(before, after))
    assert caught.value.code == code


def test_a_latency_that_nothing_gives_is_named(read: Read):
    """NCCL's latency follows from a compute capability, which an MI300X lacks."""
    text = CONFIG.replace('"H100"', '"MI300X"')
    assert read(text).job.cluster.gpu == "MI300X"
    with pytest.raises(OneRankError, match="MI300X") as caught:
        read(text.replace(", latency_us = 25", ""))
    assert caught.value.code == "cluster-latency-unknown"


OWN = CONFIG.replace("arguments = [", 'torchrun = true\narguments = ["--tp={tp}", ').replace(
    'pp = 2\nschedule = ["1f1b", "interleaved:2"]\n', ""
)


def test_a_script_that_distributes_itself_takes_its_axes(read: Read):
    job = read(OWN).job
    assert job.model.torchrun
    assert job.choices.tp == (1, 2)
    assert (job.choices.sharding, job.choices.sp) == (("script",), (False,))


@pytest.mark.parametrize(
    ("before", "after", "code", "place"),
    [
        ("tp = [1, 2]", "tp = [1, 2]\nsp = false", "plan-of-script", "[vary] sp"),
        ("tp = [1, 2]", "tp = [1, 2]\npp = 2", "plan-of-script", "[vary] pp"),
        ("tp = [1, 2]", 'tp = [1, 2]\nsharding = "ddp"', "plan-of-script", "[vary] sharding"),
        ("tp = [1, 2]", 'tp = [1, 2]\nschedule = "zbv"', "plan-of-script", "[vary] schedule"),
        ('"--tp={tp}", ', "", "plan-no-placeholder", "tp varies (1, 2)"),
        ("tp = [1, 2]", "cp = [1, 2]", "plan-no-placeholder", "cp varies (1, 2)"),
        ("{seq}", "{pp}", "plan-unknown-placeholder", "{pp}"),
        ('script = "train.py"', 'config = "train.py"', "plan-model-source", "arguments"),
    ],
)
def test_a_choice_that_is_the_script_s_is_named(
    read: Read, before: str, after: str, code: str, place: str
):
    assert before in OWN
    with pytest.raises(OneRankError, match=re.escape(place)) as caught:
        read(OWN.replace(before, after))
    assert caught.value.code == code


def test_the_digest_follows_what_the_script_may_import(read: Read, tmp_path: Path):
    digests = [read(CONFIG).job.model.digest]
    for name in ("local.py", "package/module.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("VALUE = 1\n")
        digests.append(read(CONFIG).job.model.digest)
    assert len(set(digests)) == 3
    (tmp_path / "notes.txt").write_text("not imported\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "library.py").write_text("VALUE = 2\n")
    assert read(CONFIG.replace("2.5", "3.5")).job.model.digest == digests[-1]


@pytest.mark.parametrize("text", ['{"model_type": ', "[]", '{"hidden_size": 8}'])
def test_a_file_that_configures_no_model_is_refused(read: Read, tmp_path: Path, text: str):
    (tmp_path / "model.json").write_text(text)
    script = CONFIG[: CONFIG.index("[cluster]")]
    with pytest.raises(OneRankError, match=r"\[model\] model.json: ") as caught:
        read(CONFIG.replace(script, '[model]\nconfig = "model.json"\n'))
    assert caught.value.code == "plan-no-model-type"


def test_a_recomputation_is_one_of_the_loop_or_of_the_script(read: Read, tmp_path: Path):
    text = CONFIG.replace('"full"', '"ful"')
    assert "ful" in read(text).job.choices.recompute  # a script may offer it
    script, arguments = CONFIG.splitlines()[1:3]
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(OneRankError, match=r'"ful".*did you mean full') as caught:
        read(text.replace(script, 'config = "model.json"').replace(arguments, ""))
    assert caught.value.code == "plan-unknown-recomputation"
