"""Objects that the process holds."""

from onerank.capture.patches import live


class Kind:
    pass


class Further(Kind):
    pass


class Pretending:
    __class__ = Kind  # as mocks and proxies do


def test_those_of_a_class_are_found_by_what_they_are():
    held = [Kind(), Further(), Pretending()]
    assert {*map(id, live(Kind))} == {*map(id, held[:2])}
    assert [*map(id, live(Further))] == [id(held[1])]
