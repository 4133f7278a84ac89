"""Costs that a user registers for an operator of another library."""

import pytest
from raised import raises_code

import onerank
from onerank.annotate.op_costs.custom_operator_costs import is_registered
from onerank.ir.errors import AnnotateError


@pytest.mark.parametrize("name", ["gemm", "::gemm", "mylib::", "refused::gemm.out", ""])
def test_a_name_without_namespace_or_with_an_overload_is_refused(name: str):
    with raises_code("operator-cost-name", AnnotateError, naming=(repr(name), '"mylib::gemm"')):
        onerank.register_operator_cost(name, lambda inputs, outputs: 1)
    assert not is_registered(name)
