"""Progress within a long step of a capture without a device."""

import re
from unittest.mock import Mock

import pytest

from onerank.capture.no_device import recorded_step


def test_a_long_step_reports_operators_and_a_short_one_does_not(monkeypatch: pytest.MonkeyPatch):
    now_s, messages = [0.0], list[str]()
    monkeypatch.setattr(recorded_step.time, "monotonic", lambda: now_s[0])
    operators = Mock(count=500)
    progress = recorded_step._StepProgress(messages.append, operators, 3)

    def run(seconds: float) -> list[list[int]]:
        """Run 3,000 operators in six parts; return the numbers in the messages."""
        messages.clear()
        for _ in range(6):
            operators.count += 500
            now_s[0] += seconds / 6
            if operators.listener is not None:
                operators.listener()
        numbers = (re.findall(r"\d+", message.replace(",", "")) for message in messages)
        return [[int(number) for number in of_message] for of_message in numbers]

    progress.begin(1)
    assert run(60) == []
    progress.begin(2)
    assert run(6) == []
    progress.begin(2)
    assert run(24) == [[2, 3, 1500], [2, 3, 3000]]
    progress.begin(3)
    assert run(30) == [[3, 3, 1000, 3000], [3, 3, 2000, 3000], [3, 3, 3000, 3000]]
    progress.end()
    assert operators.listener is None
