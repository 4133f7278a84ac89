"""The job in a Chakra file: its metadata, and another tool's."""

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
from chakra_files import attr, metadata_of, write_messages
from raised import raises_code

from onerank.ir import (
    Annotation,
    Device,
    GraphBuilder,
    Job,
    Measurement,
    Module,
    Pipeline,
    ProcessGroup,
    RankClass,
    World,
    chakra,
)
from onerank.ir.chakra.et_def_pb2 import (
    AttributeProto,
    GlobalMetadata,
)
from onerank.ir.chakra.metadata import SECTIONS
from onerank.ir.notes import Note

JOB = Job(
    world=World({"tp": 4, "dp": 2}),
    rank=3,
    groups=(ProcessGroup("tp", (0, 1, 2, 3), "tp"),),
    device=Device("cuda", "NVIDIA H200", 150, 132),
    measurement=Measurement((5, 6), 7, 8, 9, {"torch": "2.11"}, (Note("a note", code="noted"),)),
    annotations=(Annotation("h100", "ratio", "NVIDIA H200", {"scaled": [1, 2.5, None]}),),
    modules=(Module("layers.0.fc", "Linear", "mlp", "layers.0"),),
    pipeline=Pipeline(0, (2, 1)),
    classes=(RankClass(3, {"pp": (0,)}),),
)


def test_every_field_of_the_job_is_written_and_read_back(tmp_path: Path):
    """Whatever a job may hold: a field without an attribute would be lost in silence."""
    assert set(Job.__struct_fields__) == {field for field, _ in SECTIONS.values()}
    job = msgspec.structs.replace(JOB, host_factor=0.5)
    GraphBuilder().build(job).write(tmp_path / "out.et")
    assert chakra.read(tmp_path / "out.et").job == job


def test_job_is_the_metadata(tmp_path: Path):
    GraphBuilder().build(JOB).write(tmp_path / "out.et")
    metadata = GlobalMetadata.FromString(metadata_of(tmp_path / "out.et"))
    assert metadata == GlobalMetadata(
        version="1.0.0",
        attr=[
            attr("schema", string_val="onerank 1"),
            attr("world", string_val='{"sizes":{"tp":4,"dp":2}}'),
            attr("rank", string_val="3"),
            attr("process_groups", string_val='[{"name":"tp","ranks":[0,1,2,3],"axis":"tp"}]'),
            attr(
                "device",
                string_val='{"type":"cuda","name":"NVIDIA H200","memory_bytes":150,"sm_count":132}',
            ),
            attr(
                "measurement",
                string_val='{"step_ns":[5,6],"profiled_step_ns":7,"peak_memory_bytes":8,'
                '"start_memory_bytes":9,"versions":{"torch":"2.11"},'
                '"notes":[{"text":"a note","code":"noted"}]}',
            ),
            attr(
                "annotations",
                string_val='[{"target":"h100","model":"ratio","source":"NVIDIA H200",'
                '"details":{"scaled":[1,2.5,null]}}]',
            ),
            attr(
                "modules",
                string_val='[{"path":"layers.0.fc","type":"Linear","role":"mlp",'
                '"layer":"layers.0"}]',
            ),
            attr("pipeline", string_val='{"stage":0,"layers":[2,1]}'),
            attr("rank_classes", string_val='[{"representative":3,"where":{"pp":[0]}}]'),
        ],
    )
    back = chakra.read(tmp_path / "out.et")
    assert (back.job, back.foreign, len(back)) == (JOB, None, 0)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (attr("world", string_val='{"sizes":{"tp":"four"}}'), "`int`"),
        (attr("world", string_val="{"), "truncated"),
        (attr("world", int64_val=8), "int64_val"),
        (attr("world"), "not set"),
    ],
)
def test_job_attribute_of_ours_that_does_not_decode(
    given: AttributeProto, name: str, tmp_path: Path
):
    metadata = GlobalMetadata(attr=[attr("schema", string_val="onerank 1"), given])
    path = write_messages(tmp_path / "in.et", metadata)
    for read in (chakra.read, chakra.read_records):
        names = (f"{path}: message 0 (byte 0)", "'world'", name)
        with raises_code("chakra-edited-metadata", naming=names):
            read(path)


BLOCKS = {"bytes": [8], "memory_class": [3], "allocated_at": [0], "freed_at": [1]}
BLOCKS |= {"node": [0], "phase": [1]}


@pytest.mark.parametrize(
    ("changed", "events", "name"),
    [
        ({"node": [0, 1]}, 2, "node"),  # a column of another length
        ({"freed_at": []}, 2, "freed_at"),
        ({"pool": [0, 0]}, 2, "pool"),
        ({"bytes": [-8]}, 2, "bytes"),
        ({"memory_class": [99]}, 2, "memory_class"),
        ({"freed_at": [38]}, 2, "event 38"),  # the step ends before
        ({}, -1, "-1 events"),
        ({}, 1 << 60, "1 blocks"),
    ],
)
def test_a_memory_log_that_contradicts_itself_is_refused(
    changed: dict[str, list[int]], events: int, name: str, tmp_path: Path
):
    memory = {"blocks": BLOCKS | changed, "events": events}
    text = json.dumps({"memory": memory})
    metadata = GlobalMetadata(
        attr=[attr("schema", string_val="onerank 1"), attr("measurement", string_val=text)]
    )
    path = write_messages(tmp_path / "in.et", metadata)
    with raises_code("chakra-edited-metadata", naming=("message 0", "'measurement'", name)):
        chakra.read(path)


def test_same_attribute_in_another_tools_file_is_left_alone(tmp_path: Path):
    metadata = GlobalMetadata(attr=[attr("world", int64_val=8), attr("device", string_val="x")])
    path = write_messages(tmp_path / "in.et", metadata)
    graph = chakra.read(path)
    assert graph.job == Job()
    graph.write(tmp_path / "out.et")
    assert metadata_of(tmp_path / "out.et") == metadata.SerializeToString()


def test_changed_job_is_written_into_another_tools_metadata(tmp_path: Path):
    metadata = GlobalMetadata(
        version="9", attr=[attr("world", int64_val=8), attr("rank", string_val="1")]
    )
    path = write_messages(tmp_path / "in.et", metadata)
    graph = chakra.read(path)
    assert graph.job.rank == 1
    changed = dataclasses.replace(graph, job=Job(world=World({"tp": 2}), rank=5))
    changed.write(tmp_path / "out.et")
    assert GlobalMetadata.FromString(metadata_of(tmp_path / "out.et")) == GlobalMetadata(
        version="9",
        attr=[
            attr("world", int64_val=8),
            attr("rank", string_val="5"),
            attr("world", string_val='{"sizes":{"tp":2}}'),
        ],
    )
    assert chakra.read(tmp_path / "out.et").job == changed.job


def test_file_of_a_later_schema(tmp_path: Path):
    metadata = GlobalMetadata(attr=[attr("schema", string_val="onerank 2")])
    path = write_messages(tmp_path / "in.et", metadata)
    with raises_code("chakra-newer-schema", naming=("in.et", "'onerank 2'", "'onerank 1'")):
        chakra.read(path)


def test_job_without_json_form(tmp_path: Path):
    job = Job(annotations=(Annotation("t", "m", "s", {"bad": object()}),))
    with raises_code("chakra-job-not-json"):
        GraphBuilder().build(job).write(tmp_path / "out.et")
