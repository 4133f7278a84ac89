"""State dicts of FSDP1's models and optimizers, in a world whose other ranks are not there."""

import gc
import textwrap
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from notes import has_note, note_of
from raised import raises_code
from user_script import run

from onerank.ir import World

_SCRIPT = """
import math, torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel, StateDictType
)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,)) if {mesh} else None
inside = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 2))
model = FullyShardedDataParallel(
    inside, device_id=torch.device("cpu"), device_mesh=mesh, use_orig_params=True
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

def step():
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

step()
shard = math.ceil(38 / size)
first, after = rank * shard, min((rank + 1) * shard, 38)
place = first  # in the flat parameter, which has no gaps
for one in model.parameters():
    if one in optimizer.state:
        optimizer.state[one]["exp_avg"].copy_(torch.arange(place, place + one.numel()))
    place += one.numel()
{then}
while True:
    step()
"""
_NAMES = {"0.weight": (6, 4), "1.bias": (2,), "1.weight": (2, 6)}


@pytest.fixture(autouse=True)
def _profiles_that_scripts_left() -> Iterator[None]:
    """End the profile that FSDP1 keeps for all instances, which a refused script leaves open.

    A collection ends it. During the profile of a later test, it would end that profile too, and
    torch raises a KeyError.
    """
    yield
    gc.collect()


@pytest.mark.parametrize(("rank", "mesh"), [(0, False), (2, True), (3, False)])
def test_states_of_original_parameters_are_gathered_as_if_all_ranks_had_some(rank, mesh, tmp_path):
    """Of 38 elements each of four ranks has ten, the last eight: each a state of its own alone.

    The last has no rows of a weight, but keeps the tensor: no memory on any device.
    """
    then = f"""
        def flat(states):
            assert sorted(states) == {sorted(_NAMES)}, states
            assert all(one["step"].item() == 1 for one in states.values()), states
            whole = [states[name]["exp_avg"] for name in ("0.weight", "1.weight", "1.bias")]
            assert [tuple(one.shape) for one in whole] == [(6, 4), (2, 6), (2,)], whole
            return whole

        FullyShardedDataParallel.set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            FullOptimStateDictConfig(offload_to_cpu=False),  # from a CPU, torch mixes states up
        )
        full = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        parts = flat(full["state"])
        held = torch.cat([one.flatten() for one in parts]).tolist()[first:after]
        assert held == list(range(first, after)), parts
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        sharded = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        for states in sharded["state"], get_optimizer_state_dict(model, optimizer)["state"]:
            weight = flat(states)[0]  # in two rows each: the last has none
            rows = weight.to_local().flatten() if {mesh} else torch.cat(
                [one.tensor.flatten() for one in weight.local_shards()] or [torch.empty(0)]
            )
            assert len(rows) == (0 if rank == 3 else 8)
            for place, value in enumerate(rows.tolist(), start=8 * rank):
                assert value == first + place % shard, rows  # others hold what this rank holds
    """
    text = _SCRIPT.format(mesh=mesh, then=textwrap.dedent(then))
    graph = run(tmp_path, text, World.of(dp=4), rank=rank)
    assert {n.name for n in graph if n.kind.is_communication} == {"all_gather", "reduce_scatter"}


def test_states_that_only_other_ranks_have_are_refused(tmp_path):
    """Of 38 elements 19 ranks have two each, the last none: nor does it know AdamW's states."""
    text = _SCRIPT.format(
        mesh=False, then="FullyShardedDataParallel.optim_state_dict(model, optimizer)"
    )
    with raises_code("fsdp-states-unknown", naming=("rank 19", "3 parameters", "--rank")):
        run(tmp_path, text, World.of(dp=20), rank=19)


_PLANNED = """
import torch.distributed.checkpoint as dcp
class Renaming(dcp.DefaultLoadPlanner):
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        super().set_up_planner({{"net": state_dict["model"]}}, metadata, is_coordinator)

FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
states = {{"model": model.state_dict()}}
dcp.load(states, checkpoint_id="{directory}", planner=Renaming())
model.load_state_dict(states["model"])
held = torch.cat([one.detach().flatten() for one in model.parameters()])
assert held.tolist() == list(range(first, after)), held
"""


@pytest.mark.parametrize("mesh", [False, True])
def test_a_checkpoint_is_read_as_the_scripts_own_planner_reads_it(mesh, tmp_path):
    """Rank 2 holds elements 20 to 29, and reads the rows of 16 to 23 alone."""
    dcp.save({"net": _weights()}, checkpoint_id=tmp_path / "given")
    then = _PLANNED.format(directory=tmp_path / "given")
    graph = run(tmp_path, _SCRIPT.format(mesh=mesh, then=then), World.of(dp=4), rank=2)
    assert not has_note(graph.job.measurement.notes, "fsdp1-shards-unknown")


def test_a_planner_that_reads_no_tensor_by_itself_is_refused(tmp_path):
    dcp.save({"net": _weights()}, checkpoint_id=tmp_path / "given")
    then = _PLANNED.format(directory=tmp_path / "given").replace(
        "        super()", "        assert len(state_dict['model']) == 3, 'all'\n        super()"
    )
    with raises_code("fsdp-load-unknown", naming=("'model.0.weight'", "Renaming")):
        run(tmp_path, _SCRIPT.format(mesh=False, then=then), World.of(dp=4), rank=2)


@pytest.mark.parametrize("load", ["", "dcp.load(states, checkpoint_id='{0}')"])
def test_a_note_counts_shards_that_no_checkpoint_was_read_into(load, tmp_path):
    """Of three weights and three states of one kind rank 2 holds parts of the first two."""
    then = f"""
        import torch.distributed.checkpoint as dcp
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        states = {{"model": model.state_dict(), "optimizer": moments}}
        dcp.save(states, checkpoint_id="{tmp_path}/saved")
        {load.format(tmp_path / "saved")}
        model.load_state_dict(states["model"])
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, moments)
        optimizer.load_state_dict(loaded)
    """
    text = _SCRIPT.format(mesh=False, then=textwrap.dedent(then))
    notes = run(tmp_path, text, World.of(dp=4), rank=2).job.measurement.notes
    note_of(notes, "fsdp1-shards-unknown", 6)  # a weight has two moments
    saves = note_of(notes, "checkpoints-skipped", "1 saves")
    assert ("1 loads" in saves.text) == bool(load)


@pytest.mark.parametrize("rank", [0, 3])
def test_flat_parameters_are_sharded_tensors_of_all_ranks(rank, tmp_path):
    """Of 38 elements three ranks have ten, the last eight."""
    then = """
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
        (flat,) = model.state_dict().values()
        parts = [(one.shard_offsets, one.shard_sizes) for one in flat.metadata().shards_metadata]
        assert parts == [([0], [10]), ([10], [10]), ([20], [10]), ([30], [8])], parts
        assert flat.local_shards()[0].tensor.numel() == after - first
    """
    text = _SCRIPT.format(mesh=False, then=textwrap.dedent(then))
    run(
        tmp_path,
        text.replace("use_orig_params=True", "use_orig_params=False"),
        World.of(dp=4),
        rank=rank,
    )


def _weights() -> dict[str, torch.Tensor]:
    """Return weights that are each element's place in the flat parameter."""
    parts = torch.arange(38.0).split([24, 12, 2])
    return {
        name: part.view(_NAMES[name])
        for name, part in zip(("0.weight", "1.weight", "1.bias"), parts, strict=True)
    }
