"""Growth of the results of single operators."""

from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.passes.resize.input_growth import input_growth
from onerank.annotate.passes.resize.operand_growth import infer_powers
from onerank.annotate.passes.resize.result_growth import NEED_VALUES, RULES, Result
from onerank.annotate.passes.resize.size_change import (
    BATCH,
    CONSTANT,
    NO_SEQUENCE,
    SEQ,
    TOKENS,
    Change,
    Sizing,
    readings,
)
from onerank.annotate.passes.resize.storage_growth import (
    CallInstance,
    CallSignature,
    StorageGrowth,
    Storages,
)
from onerank.annotate.passes.tensor_locations import TensorLocation


def test_what_index_select_takes_goes_by_its_axis():
    """From [512, 3000] along axis 1 by 70 indices: rows grow as those of the operand."""
    shapes = "[[512,3000],[],[70]]"
    types = '["Tensor(float)","Int","Tensor(long int)"]'
    call = Call.parse("index_select", (shapes, types), ("", ""), "[null,1,null]")
    growths, fixed = (1, 0), (0, 0)
    powers = RULES["index_select"](
        Result(call, [((growths, fixed),), (), ((fixed,),)], 0, (512, 70))
    )
    assert powers == (growths, fixed)
    assert "index_select" in NEED_VALUES  # else its axis is not read


def test_a_padded_convolution_goes_over_the_sequence_and_keeps_its_channels():
    """Mamba's: as many channels as tokens, and 67 results of 64 tokens padded by 3."""
    sizing = Sizing(Change(64, 128), Change(4, 4))
    shapes, types = "[[4,64,64],[64,1,4],[64]]", '["Tensor(float)","Tensor(float)","Tensor(float)"]'
    for op in ("mkldnn_convolution", "thnn_conv2d", "cudnn_convolution"):
        call = Call.parse(op, (shapes, types), ("[[4,64,67]]", types[:16] + "]"))
        powers = infer_powers(call, [TOKENS, CONSTANT, CONSTANT], sizing)
        assert powers.inputs[0] == (BATCH, CONSTANT, SEQ)
        assert powers.outputs == ((BATCH, CONSTANT, SEQ),)
        assert sizing.shape((4, 64, 67), powers.outputs[0]) == (4, 64, 131)
        assert powers.ruled


def test_what_a_recurrent_layer_keeps_for_backward_grows_with_the_tokens():
    call = Call("mkldnn_rnn_layer", (), ())
    tokens = [((SEQ, BATCH, CONSTANT),)]
    assert RULES["mkldnn_rnn_layer"](Result(call, tokens, 0, (40, 3, 64))) == (SEQ, BATCH, CONSTANT)
    assert RULES["mkldnn_rnn_layer"](Result(call, tokens, 3, (491_520,))) == (TOKENS,)


def test_relative_positions_are_looked_up_for_each_pair():
    """T5's: 40 x 40 numbers of buckets, flat."""
    sizing = Sizing(Change(40, 56), Change(3, 2))
    assert readings((1600,), sizing, (2, 0))[0][1] == ((2, 0),)
    assert sizing.shape((1600,), ((2, 0),)) == (56 * 56,)


def test_what_is_expanded_grows_as_all_of_it_does():
    """120 tokens that each of 4 experts works on."""
    sizing = Sizing(Change(40, 56), Change(3, 2))
    storages: Storages = {7: StorageGrowth(TOKENS, 120 * 64, 9, written=True)}
    expanded, weights = (Tensor(shape, "float32", 4) for shape in ((4, 120, 64), (4, 64, 128)))
    call = Call("bmm", ((expanded,), (weights,)), ())
    form = CallSignature(0, call, (expanded, weights), (), False, False, False)
    met = CallInstance(0, form, (TensorLocation(8, 7, 0), None), (), ())
    assert input_growth(met, storages, sizing).growths[0] == TOKENS


def test_slopes_of_positions_are_a_part_of_a_table_and_grow_with_what_they_are_added_to():
    """MPT's [heads, 1, 40] of 128 positions, added to scores of 40 x 40."""
    sizing = Sizing(Change(40, 56), Change(3, 2))
    scores, slopes = Tensor((3, 4, 40, 40), "float32", 4), Tensor((4, 1, 40), "float32", 4)
    storages: Storages = {
        7: StorageGrowth((2, 1), scores.numel, 17, written=True),
        8: StorageGrowth(CONSTANT, 4 * 128, 18, written=True),
    }
    call = Call("add", ((scores,), (slopes,)), ())
    form = CallSignature(0, call, (scores, slopes), (), False, False, False)
    met = CallInstance(0, form, (TensorLocation(17, 7, 0), TensorLocation(19, 8, 88)), (), ())
    growths = input_growth(met, storages, sizing).growths
    assert growths == ((2, 1), None)
    assert infer_powers(call, growths, sizing).inputs[1] == (CONSTANT, CONSTANT, SEQ)


def test_integers_may_index_later_dimensions():
    """A DLRM's z[:, i, j]: six pairs of each sample's 4 x 4."""
    types = '["Tensor(float)","GenericList[None,Tensor(long int),Tensor(long int)]"]'
    call = Call.parse("index", ("[[64,4,4],[[],[6],[6]]]", types), ("", ""))
    by_place = [((BATCH, CONSTANT, CONSTANT),), ((CONSTANT,), (CONSTANT,))]
    assert RULES["index"](Result(call, by_place, 0, (64, 6))) == (BATCH, CONSTANT)


def test_bags_hold_as_many_indices_each():
    sizing = Sizing(NO_SEQUENCE, Change(64, 128))
    table = Tensor((900, 32), "float32", 4)
    indices, offsets = (Tensor(shape, "int64", 8) for shape in ((320,), (64,)))
    outputs = tuple((Tensor(shape, "float32", 4),) for shape in ((64, 32), (320,), (64,)))
    call = Call("_embedding_bag", ((table,), (indices,), (offsets,)), outputs)
    form = CallSignature(0, call, (table, indices, offsets), (), False, False, False)
    met = CallInstance(0, form, (None, None, None), (), ())
    growths = input_growth(met, Storages(), sizing).growths
    assert growths[1:] == (BATCH, BATCH)
    powers = infer_powers(call, (CONSTANT, *growths[1:]), sizing)
    assert powers.inputs == ((CONSTANT, CONSTANT), (BATCH,), (BATCH,))
    assert powers.outputs == ((BATCH, CONSTANT), (BATCH,), (BATCH,))
