"""FLOPs and time of matrix decompositions and of Fourier transforms.

FLOPs of decompositions are those of LAPACK's algorithms for real matrices (Golub and Van Loan,
Matrix Computations; LAPACK Working Note 41). A GPU is far from its rate there: cuSOLVER eliminates
or reflects one column after another, and each waits for the one before. The chain of these columns
decides the time, not the FLOPs.

A Fourier transform of n complex numbers counts 5 n log2 n FLOPs, of real ones half of that (the
convention of FFTW). cuFFT streams the data once or more for each dimension.

Times were measured on an H200 with torch 2.11 (benchmarks/results/2026-11-28-decompositions-h200).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log2, prod

from onerank.annotate.op_costs.cost_record import Formula, Work, matmul_work, vector_work
from onerank.annotate.op_costs.operands import Call, Tensor, numbers_of

# Microseconds of a load of a chain (`roofline`), in which `Work.chain` is counted.
_LOAD_US = 0.41

# Largest matrix that cuSOLVER's batched SVD and eigenvalue kernels take.
_SMALL = 32

# Largest matrix whose eigenvalues come from Jacobi's method, which torch chooses up to this size.
_JACOBI = 512

_Microseconds = Callable[[int, int, int], float]
"""(batch, rows, columns) -> time of a decomposition on an H200; rows >= columns."""


def _by_column(fixed: float, growing: float, *, by_rows: bool = False) -> _Microseconds:
    """Return the time of columns that take `fixed` microseconds, and `growing` for each column.

    Args:
        fixed: microseconds of a column.
        growing: more microseconds of a column, for each column or row of the matrix.
        by_rows: whether it grows with the rows.
    """

    def time(batch: int, rows: int, columns: int) -> float:
        return batch * columns * (fixed + growing * (rows if by_rows else columns))

    return time


_SVD = _by_column(10.4, 0.0433)
_EIGH_JACOBI, _EIGH = _by_column(6.4, 0.0365), _by_column(5.56, 0.004)
_QR, _QR_BATCHED = _by_column(3.2, 0.00086, by_rows=True), _by_column(1.0, 0.0)
_LU, _SUBSTITUTION = _by_column(1.4, 0.00039), _by_column(0.25, 0.00024)
_CHOLESKY, _CHOLESKY_INVERSE = _by_column(0.30, 0.00004), _by_column(0.45, 0.00018)

# Time of the nine kernels of a small Cholesky factor; a matrix of three columns in a large batch.
_SHORTEST_US, _MATRIX_US = 20, 0.0016


def _svd(batch: int, rows: int, columns: int) -> float:
    if columns <= _SMALL:
        return max(6.3 * columns, batch * (0.076 + 0.0355 * columns))
    return _SVD(batch, rows, columns)


def _eigh(batch: int, rows: int, columns: int) -> float:
    if columns <= _SMALL:
        return 80 + 5 * columns
    return (_EIGH_JACOBI if columns <= _JACOBI else _EIGH)(batch, rows, columns)


def _qr(batch: int, rows: int, columns: int) -> float:
    batched = batch > 1 and 16 <= columns <= 128
    return (_QR_BATCHED if batched else _QR)(batch, rows, columns)


def _lu(batch: int, rows: int, columns: int) -> float:
    if batch > 1:
        # One kernel for all matrices.
        return 10 + 0.4 * columns if columns <= _SMALL else 5.0 * columns
    return _LU(1, rows, columns)


def _lu_and_solve(batch: int, rows: int, columns: int) -> float:
    if batch > 1:
        small = 15 + 2.4 * columns + _MATRIX_US * batch
        return small if columns <= _SMALL else 6.5 * columns
    return _LU(1, rows, columns) + _SUBSTITUTION(1, rows, columns)


def _cholesky(batch: int, rows: int, columns: int) -> float:
    if batch > 1:
        return 10 + 0.9 * columns + _MATRIX_US * batch
    return max(_SHORTEST_US, _CHOLESKY(1, rows, columns))


def _least_squares(batch: int, rows: int, columns: int) -> float:
    return _qr(batch, rows, columns) + 1.5 * batch * columns


def _two_substitutions(_batch: int, rows: int, columns: int) -> float:
    # One kernel for all matrices of a batch.
    return 2 * _SUBSTITUTION(1, rows, columns)


@dataclass(frozen=True, slots=True)
class _Decomposition:
    """A decomposition of matrices [..., m, n], where m >= n after a transposition.

    Attributes:
        flops: FLOPs by (m, n), for a matrix.
        microseconds: its time.
        right: position of right sides, each column of which is solved for.
        flops_of_column: FLOPs by (m, n) of such a column.
        operand: position of the matrix.
    """

    flops: Callable[[int, int], float]
    microseconds: _Microseconds
    right: int | None = None
    flops_of_column: Callable[[int, int], float] = lambda m, n: 0.0
    operand: int = 0

    def __call__(self, call: Call) -> Work | None:
        """Return the work of a call; None without a matrix."""
        matrix = call.tensor(self.operand)
        if matrix is None or len(matrix.shape) < 2 or not matrix.numel:
            return None
        rows, columns = sorted(matrix.shape[-2:], reverse=True)
        batch = matrix.numel // (rows * columns)
        flops = batch * self.flops(rows, columns)
        right = None if self.right is None else call.tensor(self.right)
        if right is not None:
            # A right side is a column of as many numbers as the matrix has rows.
            sides = right.numel // matrix.shape[-2]
            flops += sides * self.flops_of_column(rows, columns)
        work = matmul_work(call, matrix, round(flops))
        return replace(work, chain=self.microseconds(batch, rows, columns) / _LOAD_US)


def _singular_vectors(m: int, n: int) -> float:
    return min(14 * m * n**2 + 8 * n**3, 6 * m * n**2 + 20 * n**3)


def _reflections(m: int, n: int) -> float:
    return 2 * m * n**2 - 2 * n**3 / 3


_INVERSE = _Decomposition(lambda m, n: 2 * n**3, _lu_and_solve)
_FACTORS = _Decomposition(lambda m, n: m * n**2 - n**3 / 3, _lu)
_BY_FACTORS: Callable[[int, int], float] = lambda m, n: 2 * n**2  # noqa: E731  of a table's column

_DECOMPOSITIONS: dict[str, Formula] = {
    # With vectors; those of values alone take as long.
    "_linalg_svd": _Decomposition(_singular_vectors, _svd),
    "_linalg_eigh": _Decomposition(lambda m, n: 9 * n**3, _eigh),
    # Both the reflections and the product of them, Q.
    "linalg_qr": _Decomposition(lambda m, n: 2 * _reflections(m, n), _qr),
    "geqrf": _Decomposition(_reflections, lambda *sizes: _qr(*sizes) / 2),
    "linalg_householder_product": _Decomposition(_reflections, lambda *sizes: _qr(*sizes) / 2),
    "linalg_cholesky_ex": _Decomposition(lambda m, n: n**3 / 3, _cholesky),
    "cholesky_inverse": _Decomposition(lambda m, n: 2 * n**3 / 3, _CHOLESKY_INVERSE),
    "_cholesky_solve_helper": _Decomposition(
        lambda m, n: 0.0, _two_substitutions, 0, _BY_FACTORS, operand=1
    ),
    "linalg_lu_factor_ex": _FACTORS,
    "linalg_lu": _FACTORS,
    "_linalg_det": _FACTORS,
    "_linalg_slogdet": _FACTORS,
    "linalg_lu_solve": _Decomposition(lambda m, n: 0.0, _two_substitutions, 2, _BY_FACTORS),
    "linalg_inv_ex": _INVERSE,
    "_linalg_solve_ex": _Decomposition(lambda m, n: 2 * n**3 / 3, _lu_and_solve, 1, _BY_FACTORS),
    "linalg_lstsq": _Decomposition(_reflections, _least_squares, 1, lambda m, n: 4 * m * n - n**2),
}


# Time of its 70 kernels for matrices of 32 and 128; larger ones are bound by their products.
_EXPONENTIAL_US = 110


def _matrix_exponential(call: Call) -> Work | None:
    """Return five products, the approximation of degree 18; squarings depend on the norm."""
    matrix = call.tensor(0)
    if matrix is None or len(matrix.shape) < 2:
        return None
    work = matmul_work(call, matrix, 5 * 2 * matrix.numel * matrix.shape[-1])
    return replace(work, chain=_EXPONENTIAL_US / _LOAD_US)


# Fourier transforms -------------------------------------------------------------------------------

# Longest transform of one kernel, and passes over the data of a longer one, complex and real.
_ONE_KERNEL, _LONG_PASSES, _LONG_REAL_PASSES = 16384, 3.2, 3.8

# Passes for a length that is no power of two. Prime factors up to `_SMALL_PRIME` add none. Larger
# ones add a pass for every 25 numbers. If one exceeds `_SHARED_PRIME`, cuFFT runs a kernel for each
# of these larger factors, and one for the others. If one exceeds `_LARGEST_PRIME`, the transform is
# a convolution by Bluestein's method.
_UNEVEN_PASSES = 1.3
_SMALL_PRIME, _SHARED_PRIME, _LARGEST_PRIME = 13, 37, 127
_NUMBERS_OF_PASS, _BLUESTEIN_PASSES = 25, 4.7

# Passes of a kernel over its numbers: of complex transforms 1.02 to 1.2; of the rows of real ones
# 1.06 to 1.5, and of their inverses, which take another pass to rearrange them, 1.0; of the other
# dimensions of a real one, whose rows have n / 2 + 1 numbers and are not aligned, 1.2 to 1.4; of
# the rows of a real one that also returns the other half 1.54 to 1.7.
_COMPLEX, _REAL_COLUMNS, _REAL_WHOLE = 1.1, 1.4, 1.6
_ROWS = {"_fft_c2c": _COMPLEX, "_fft_r2c": 1.25, "_fft_c2r": 1.0}

# That half has the conjugates of the first, which another kernel (`_fft_conjugate_copy_kernel`)
# copies: SM cycles of a number, 4.1 to 4.3 for 3 to 34 million. Bytes that memory gives an SM in a
# cycle while the transform runs.
_CONJUGATE_CYCLES, _BYTES_PER_CYCLE = 4.2, 16.6


def _prime_factors(length: int) -> list[int]:
    """Return the distinct prime factors of a number, ascending."""
    factors: list[int] = []
    factor = 2
    while length > 1:
        if factor * factor > length:
            factor = length
        if length % factor:
            factor += 1
            continue
        factors.append(factor)
        while length % factor == 0:
            length //= factor
    return factors


def _passes(length: int, *, real: bool = False) -> float:
    """Return how often cuFFT streams the data for a dimension of this length."""
    primes = _prime_factors(length)
    largest = max(primes, default=1)
    if largest > _LARGEST_PRIME:
        return _BLUESTEIN_PASSES
    passes = 1.0 if _is_power_of_two(length) else _UNEVEN_PASSES
    if length > _ONE_KERNEL:
        passes = _LONG_REAL_PASSES if real else _LONG_PASSES
    if largest <= _SMALL_PRIME:
        return passes
    if largest <= _SHARED_PRIME:
        return passes + largest / _NUMBERS_OF_PASS
    own = [prime for prime in primes if prime > _SMALL_PRIME]
    others = 1.0 if len(own) < len(primes) else 0.0
    return sum(_UNEVEN_PASSES + prime / _NUMBERS_OF_PASS for prime in own) + others


def _is_power_of_two(length: int) -> bool:
    return length & (length - 1) == 0


def _transform(call: Call) -> Work | None:
    """Return the work of `_fft_c2c`, `_fft_r2c` and `_fft_c2r`, whose dimensions are argument 1."""
    given, result = call.tensor(0), call.output()
    if given is None or result is None or not given.shape or not result.numel:
        return None
    # The longer one of two shapes has all numbers of a real transform.
    shape = max(given.shape, result.shape, key=prod)
    axes = numbers_of(call.value(1)) or [-1]
    lengths = [shape[int(axis)] for axis in axes if -len(shape) <= axis < len(shape)]
    if not lengths:
        return None
    real = call.op != "_fft_c2c"
    each = 2.5 if real else 5.0
    flops = each * prod(shape) * sum(log2(length) for length in lengths)
    # The last dimension of a real transform is the one with half of its numbers.
    factors = [_REAL_COLUMNS if real else _COMPLEX] * (len(lengths) - 1)
    factors.append(_ROWS[call.op])
    each_passes = [_passes(length, real=real) for length in lengths]
    passes = sum(p * factor for p, factor in zip(each_passes, factors, strict=True))
    if call.value(2) not in (None, 0):
        passes += 1  # another kernel normalises
    if call.op == "_fft_c2r":
        # cuFFT overwrites its operand, a copy, and rearranges it for most lengths.
        passes += 1 if _is_power_of_two(lengths[-1]) else 2
    work = replace(vector_work(call, round(flops)), passes=passes)
    # The argument `onesided`.
    if call.op == "_fft_r2c" and call.value(3) is False:
        cycles = _cycles_of_both_halves(given.nbytes, result, each_passes)
        return replace(work, cycles=cycles, arithmetic=True)
    return work


def _cycles_of_both_halves(real_bytes: int, result: Tensor, passes: list[float]) -> float:
    """Return the SM cycles of a real transform that returns both halves of its numbers."""
    streamed = (real_bytes + result.nbytes // 2) * _REAL_WHOLE * sum(passes)
    return result.numel // 2 * _CONJUGATE_CYCLES + streamed / _BYTES_PER_CYCLE


FORMULAS: dict[str, Formula] = {
    **{f"aten::{name}": formula for name, formula in _DECOMPOSITIONS.items()},
    "aten::linalg_matrix_exp": _matrix_exponential,
    **{f"aten::_fft_{name}": _transform for name in ("c2c", "r2c", "c2r")},
}
"""Full name without overload -> formula."""

NEED_VALUES = frozenset({"_fft_c2c", "_fft_r2c", "_fft_c2r"})
"""Operators whose cost depends on argument values in addition to shapes."""
