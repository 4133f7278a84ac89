"""How the results of single operators grow."""

from onerank.annotate.what_ifs.sizes.operand_rules import NEED_VALUES, RULES
from onerank.annotate.what_ifs.sizes.operands import read
from onerank.annotate.what_ifs.sizes.sizing import BATCH, CONSTANT, SEQ, TOKENS, Change, Sizing
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


def test_a_padded_convolution_goes_over_the_sequence_and_keeps_its_channels():
    """Mamba's: as many channels as tokens, and 67 results of 64 tokens padded by 3."""
    sizing = Sizing(Change(64, 128), Change(4, 4))
    shapes, types = "[[4,64,64],[64,1,4],[64]]", '["Tensor(float)","Tensor(float)","Tensor(float)"]'
    for op in ("mkldnn_convolution", "thnn_conv2d", "cudnn_convolution"):
        call = Call.parse(op, (shapes, types), ("[[4,64,67]]", types[:16] + "]"))
        made = read(call, [TOKENS, CONSTANT, CONSTANT], sizing)
        assert made.inputs[0] == (BATCH, CONSTANT, SEQ)
        assert made.outputs == ((BATCH, CONSTANT, SEQ),)
        assert sizing.shape((4, 64, 67), made.outputs[0]) == (4, 64, 131)
        assert made.ruled
