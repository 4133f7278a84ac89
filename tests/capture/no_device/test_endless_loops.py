"""Loops that read placeholders: those that never end are refused, and others are not."""

import itertools

from onerank.capture.no_device.endless_loops import endless_loop


def test_a_loop_that_only_a_placeholder_ends():
    while (found := endless_loop()) is None:
        pass
    assert found.file == __file__
    assert found.line == test_a_loop_that_only_a_placeholder_ends.__code__.co_firstlineno + 1
    assert found.reads == 1024


def test_an_endless_iterator():
    for _ in itertools.count():
        if (found := endless_loop()) is not None:
            break
    assert found.reads == 1024


def test_a_loop_that_counts_its_iterations():
    count = 0
    while True:
        if count == 1500:
            break
        count += 1
        assert endless_loop() is None


def test_a_loop_within_the_loop_ends():
    while True:
        for _ in range(2000):
            assert endless_loop() is None
        if _read_once() is None:
            break


def test_many_calls_of_a_short_loop():
    for _ in range(2000):
        assert _read_once() is None


def _read_once():
    while True:
        return endless_loop()
