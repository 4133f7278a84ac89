"""Real peers begin their windows together."""

import os
import time

from real_ranks import run_ranks

from onerank.capture.fake_world import recorder
from onerank.capture.fake_world.recorder import RealPeers

LATE_S = 0.5  # a rank that does not wait goes on before the late one arrives
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # else each rank takes one of its own


def _meet(rank, results):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} | NO_GPU
    own = RealPeers(rank, 2)
    for meeting in range(2):
        time.sleep(LATE_S if rank == meeting else 0)
        results[rank, "arrived", meeting] = True
        results[rank, "came", meeting] = own.rendezvous()
        results[rank, "met", meeting] = (1 - rank, "arrived", meeting) in results


def _wait_in_vain(rank, results):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} | NO_GPU
    recorder.RENDEZVOUS_S = 0.2
    if rank == 0:
        begun = time.monotonic()
        results["came"] = RealPeers(rank, 2).rendezvous()
        results["waited"] = time.monotonic() - begun


def test_real_ranks_wait_for_the_last():
    met = run_ranks(_meet, 2)
    for meeting in range(2):
        for rank in range(2):
            assert met[rank, "came", meeting]
            assert met[rank, "met", meeting]


def test_a_rank_without_a_counterpart_goes_on():
    found = run_ranks(_wait_in_vain, 2)
    assert 0.2 <= found["waited"] < 2
    assert not found["came"]
