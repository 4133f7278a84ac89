from onerank.analysis.summary import summarise as summary_of
from onerank.annotate import ClassRow, OpClass, UnknownKernel, recost, summarise


def test_figures_of_a_recosting(trace, mm, add):
    strange = {"op": "mylib::x", "kernels": [("k", 3350), ("k", 3350), ("j", 335)]}
    graph = trace(mm(8192, 8192, 8192, ns=1_500_000), add(10**8, ns=335_000), strange)
    found = summarise(graph, recost(graph, "H100-SXM", model="ratio"))
    assert (found.target, found.model, found.source) == ("H100-SXM", "ratio", "H200")
    size = 2 * 8192 * 8192
    assert found.classes == (
        ClassRow(OpClass.GEMM, 1, 1_500_000, 1_500_000, 2 * 8192**3, 2 * size, size,
                 {"calibrated": 1_500_000}),
        ClassRow(OpClass.ELEMENTWISE, 1, 335_000, 480_000, 10**8, 4 * 10**8, 2 * 10**8,
                 {"calibrated": 480_000}),
        ClassRow(OpClass.UNKNOWN, 3, 7035, 10_080, 0, 0, 0, {"calibrated": 10_080}),
    )  # fmt: skip
    assert found.unknown == (
        UnknownKernel("mylib::x", "k", 2, 6700, 9600),
        UnknownKernel("mylib::x", "j", 1, 335, 480),
    )
    assert found.evidence == {"calibrated": 5}
    assert found.evidence_ns == {"calibrated": found.after_ns}
    assert sum(found.rules.values()) == 5
    assert found.before_ns == 1_842_035
    assert found.after_ns == sum(row.after_ns for row in found.classes)


def test_the_share_without_flops_is_of_the_time(trace, mm):
    summary = summary_of(trace(mm(8, 8, 8, ns=3000), {"op": "mylib::x", "kernels": [("k", 1000)]}))
    assert (summary.without_flops, summary.without_flops_share) == (1, 0.25)
    assert summary.flops == 2 * 8**3
