"""Tasks on a Ray cluster of two nodes give the results of a local pool, also when a worker dies."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onerank.ir.errors import OneRankError
from onerank.plan.tasks import LocalPool, RayCluster, Store, Task, content_key, run_tasks

ray: Any = pytest.importorskip("ray", reason="needs the extra onerank[ray]")


def task(function: str, *arguments: Any, needs: tuple[str, ...] | None = None) -> Task:
    key = content_key(function, arguments, needs)
    return Task(key, function, f"plan_tasks:{function}", arguments, needs)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Start two nodes of one core each; yield the cluster's address."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    # Workers import onerank and `plan_tasks` as this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture
def executor(address: str, tmp_path: Path) -> Iterator[RayCluster]:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "local.txt").write_text("of the plan's directory")
    yield RayCluster(tmp_path / "plan", address, (tmp_path / "plan" / "store",))
    ray.shutdown()


def test_a_killed_worker_changes_no_result(executor: RayCluster, tmp_path: Path):
    squares = [task("square", number) for number in range(6)]
    marker = tmp_path / "marker"
    tasks = [*squares, task("die_once", str(marker)), task("read_local", "local.txt")]
    store = Store(tmp_path / "of-ray")
    results = run_tasks(tasks, store, executor)
    assert marker.exists()  # a worker was killed
    local = LocalPool(2, executor.directory)
    assert results == run_tasks(tasks, Store(tmp_path / "local"), local)
    total = task("total", needs=tuple(square.key for square in squares))
    assert run_tasks([total], store, executor) == {total.key: 55.0}


def test_errors_of_a_task_reach_the_caller(executor: RayCluster, tmp_path: Path):
    with pytest.raises(OneRankError) as caught:
        run_tasks([task("refuse")], Store(tmp_path / "store"), executor)
    assert caught.value.code == "plan-no-layout"
    with pytest.raises(OneRankError) as died:
        run_tasks([task("die")], Store(tmp_path / "store"), executor)
    assert died.value.code == "plan-worker-died"


def test_a_cluster_that_does_not_answer_is_an_error(tmp_path: Path):
    executor = RayCluster(tmp_path, "127.0.0.1:1")
    with pytest.raises(OneRankError) as caught:
        run_tasks([task("square", 1)], Store(tmp_path / "store"), executor)
    assert caught.value.code == "plan-ray-unreachable"
