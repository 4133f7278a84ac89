"""Children that run the script as an absent rank."""

import multiprocessing
import pickle
import sys

import pytest
from raised import raises_code

from onerank.capture.fake_world import sender_processes
from onerank.capture.fake_world.call_log import Messages
from onerank.capture.fake_world.message_payloads import MessageRequest


def script(_: int, messages: Messages) -> None:
    messages.send(0, ["first"])
    messages.receive(0)
    messages.send(2, ["to rank 2"])
    messages.send(0, ["second"])


def test_a_second_run_after_a_failure_counts_no_message_twice():
    def request(to: int, index: int) -> object:
        return pickle.loads(senders.resolve(MessageRequest(1, to, index, 0), []))

    senders = sender_processes._Senders(script)
    try:
        assert request(0, 0) == ["first"]
        # Rank 0, which waits, has sent nothing yet.
        with raises_code("sender-cycle", naming="rank 0"):
            request(0, 1)
        senders.log(0, {1: [pickle.dumps([])]})
        assert request(2, 0) == ["to rank 2"]
        assert request(0, 1) == ["second"]
    finally:
        senders.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_senders_end_with_the_process_that_started_them():
    messages = sender_processes.SenderProcesses(0, script, lambda _: None)
    with messages.ready():
        assert messages.receive(1) == ["first"]
        (server,) = multiprocessing.active_children()
        server.kill()
        server.join()
        # A sender that lived on would hold the connection open.
        with raises_code("sender-failed", naming="rank 1"):
            messages.receive(1)
