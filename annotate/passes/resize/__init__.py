"""Resize a step to another sequence length or micro-batch.

Words of this package:

- power: how a size grows, as its exponents of sequence length and of micro-batch. (1, 0) is a size
  proportional to the sequence, (0, 0) a constant.
- powers: the power of each dimension of a tensor.
- growth: the power of a tensor's number of elements, None while it is unknown.
- reading: powers that explain the captured shape of a tensor. A shape has several, because a size
  may be the sequence or, for example, a hidden size that equals it; each has a cost.

`size_change` finds the captured sizes and the readings of a shape. `propagate` follows growth from
call to call through the storages of tensors, with `input_growth`, `operand_growth` and
`result_growth` for one call. `tensor_growth` does so for a whole step. `resize` and
`resized_memory` write the new shapes and the memory.
"""
