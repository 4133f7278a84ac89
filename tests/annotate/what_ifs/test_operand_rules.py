"""How the results of single operators grow."""

from onerank.annotate.what_ifs.sizes.operand_rules import NEED_VALUES, RULES
from onerank.annotate.work.shapes import Call


def test_what_index_select_takes_goes_by_its_axis():
    """From [512, 3000] along axis 1 by 70 indices: rows grow as those of the operand."""
    shapes = "[[512,3000],[],[70]]"
    types = '["Tensor(float)","Int","Tensor(long int)"]'
    call = Call.parse("index_select", (shapes, types), ("", ""), "[null,1,null]")
    grows, fixed = (1, 0), (0, 0)
    made = RULES["index_select"](call, [((grows, fixed),), (), ((fixed,),)], 0, (512, 70))
    assert made == (grows, fixed)
    assert "index_select" in NEED_VALUES  # else its axis is not read
