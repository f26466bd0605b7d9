"""Matrix products through cuBLASLt, with nvmath's bindings, which only this file uses.

Everything is decided when a product is bound: layouts, the algorithm, and the workspace, which belongs to the stream.
The algorithm is the fastest of the first that the library suggests for these shapes, and is kept by key (`tuner`), so
that every executor uses the same one and bits agree. The prebuilt call can be captured. All algorithms repeat their
bits: partial sums are added up in a fixed order.

cuBLASLt is column-major. A row-major matrix is its transpose in column-major order, so out = a b is computed as
out^T = b^T a^T, and nothing is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...kernels import Thunk, cuda
from ...kernels.linear import apart, inside, layout
from ...kernels.small_product import fits, small_product
from . import clock
from .tuner import CANDIDATES, Candidate, Tuner

#: (bias, act, sums)
EPILOGUES = {(False, "", False): "DEFAULT", (True, "", False): "BIAS", (False, "relu", False): "RELU",
             (True, "relu", False): "RELU_BIAS", (False, "", True): "BGRADB", (False, "gelu_tanh_grad", False): "DGELU"}
WHOLE = "whole:"  #: begins the names of algorithms of a product whose sums, or slope, are its epilogue
OURS = "small_product 1"  #: our kernel's name among the choices; another number for other bits
EPILOGUED = 3  #: algorithms with such an epilogue that are timed
WORKSPACE = 32 << 20  #: bytes for each stream, as NVIDIA recommends for Hopper


def libraries() -> tuple[Any, Any, Any]:
    """CUDA's types, cuBLAS for its names, and cuBLASLt. The tests replace them."""
    from nvmath import CudaDataType
    from nvmath.bindings import cublas, cublasLt

    return CudaDataType, cublas, cublasLt


@dataclass(frozen=True)
class Side:
    """A matrix in cuBLASLt's column-major terms: rows, columns, the step from column to column and from matrix to
    matrix (in elements). `transposed`: whether it is read transposed."""

    rows: int
    columns: int
    leading: int
    batch_step: int
    transposed: bool

    @classmethod
    def of(cls, array: Any) -> Side:
        """The column-major transpose of a (..., r, c) array. Raises LaunchError for strides that no BLAS has."""
        found, (r, c) = layout(array), array.shape[-2:]
        if found is None:
            raise cuda.LaunchError(f"a product needs contiguous rows or columns, not strides "
                                   f"{array.strides} of shape {array.shape}")
        transposed, leading, _, apart = found
        return cls(*((r, c) if transposed else (c, r)), leading, apart, transposed)


@dataclass(frozen=True, eq=False)
class Problem:
    """A product's descriptor and layouts, the alignment of its arrays in bytes, whether inputs may be rounded, and the
    key of its algorithm."""

    operation: int
    layouts: list[int]
    alignments: tuple[int, ...]
    rounds: bool
    key: tuple[Any, ...]


class Products:
    """cuBLASLt on one device."""

    def __init__(self, driver: Any) -> None:
        types, cublas, self.lt = libraries()
        self.driver, self.handle = driver, self.lt.create()
        self.tuner = Tuner(driver, f"cuBLASLt {self.lt.get_version()}", self.lt.cuBLASLtError)
        compute = cublas.ComputeType
        #: for each type in memory: cuBLAS's name for it, the type of the sums, the arithmetic
        self.types = {"float32": (types.CUDA_R_32F, types.CUDA_R_32F, compute.COMPUTE_32F),
                      "float64": (types.CUDA_R_64F, types.CUDA_R_64F, compute.COMPUTE_64F),
                      "float16": (types.CUDA_R_16F, types.CUDA_R_32F, compute.COMPUTE_32F),
                      "bfloat16": (types.CUDA_R_16BF, types.CUDA_R_32F, compute.COMPUTE_32F)}
        self.rounded = int(compute.COMPUTE_32F_FAST_TF32)
        self._workspaces: dict[int, Any] = {}
        self._chosen: dict[Any, str] = {}  #: names of ways by key
        self._factors = {kind: np.array([0, 1], kind) for kind in ("float32", "float64")}  #: for alpha and beta

    def workspace(self, stream: Any) -> Any:
        if stream.number not in self._workspaces:
            self._workspaces[stream.number] = self.driver.allocate(WORKSPACE, stream)
        return self._workspaces[stream.number]

    def bind(self, product: cuda.Product, stream: Any, tf32: bool, small: bool = True) -> Thunk:
        """One prebuilt call. `tf32`: float32 inputs may be rounded to 10 bits for the tensor cores; `small`: whether a
        small product may run as our kernel. Raises RuntimeError if cuBLASLt has no algorithm."""
        problem = self._problem(apart(product)[0], tf32)
        small, within = small and fits(product), self._within(product, tf32)
        own = ("beside", product.bias is not None, product.act, product.sums is not None, small, within)
        key = (*problem.key, *(own if small or within else ()))
        if key not in self._chosen:
            self._chosen[key] = self._choose(product, problem, key, tf32, small)
        return self._call(product, problem, self._chosen[key], stream, tf32)

    def _within(self, product: cuda.Product, tf32: bool) -> bool:
        """Whether an epilogue of cuBLASLt may do what belongs to a product. Its GELU is only good to some bits."""
        return inside(product) and (not product.act or tf32 or product.out.dtype.itemsize == 2)

    def _call(self, product: cuda.Product, problem: Problem, choice: str, stream: Any, tf32: bool) -> Thunk:
        """A product with everything that belongs to it, as it was chosen: our kernel; an algorithm with an epilogue; an
        algorithm for `problem`, and launches after it."""
        if choice == OURS:
            return self.driver.launch(small_product(product), stream)
        whole = choice.startswith(WHOLE)
        first, *rest = [product] if whole else apart(product)
        problem = self._problem(first, tf32) if whole else problem
        algorithm = self._algorithm(choice.removeprefix(WHOLE))
        if stream.sms:  # the same algorithm, which gets their number, so that bits do not depend on them
            told = self._problem(first, problem.rounds, stream.sms)
            problem = told if self._fits(told, algorithm) else problem
        thunks = [self._bound(first, problem, algorithm, stream), *(self.driver.launch(g, stream) for g in rest)]
        return partial(clock.run, thunks) if rest else thunks[0]

    def _problem(self, product: cuda.Product, tf32: bool, sms: int = 0) -> Problem:
        """A product in cuBLASLt's terms. `sms`: how many multiprocessors it has, if not all. Raises LaunchError for one
        that it does not support."""
        lt, name = self.lt, str(product.out.dtype)
        given = {str(x.dtype) for x in (product.a, product.b, product.bias) if x is not None}
        if given != {name} or name not in self.types:
            raise cuda.LaunchError(f"a product must have one type, {' or '.join(self.types)}, not "
                                   f"{', '.join(sorted(given))} to {name}")
        memory, scale, arithmetic = self.types[name]
        first, second, out = Side.of(product.b), Side.of(product.a), Side.of(product.out)
        if out.transposed:
            raise cuda.LaunchError(f"the result of a product must be row-major, not with strides {product.out.strides}")
        count = int(np.prod(product.out.shape[:-2], dtype=np.int64))
        rounds = tf32 and name == "float32"
        operation = lt.matmul_desc_create(self.rounded if rounds else int(arithmetic), int(scale))
        attributes = lt.MatmulDescAttribute
        epilogue = EPILOGUES[product.bias is not None, product.act, product.sums is not None]
        beside = product.sums if product.bias is None else product.bias
        self._set("matmul_desc", operation, {
            attributes.TRANSA: int(first.transposed), attributes.TRANSB: int(second.transposed),
            attributes.EPILOGUE: int(lt.Epilogue[epilogue]),
            **({attributes.SM_COUNT_TARGET: sms} if sms else {}),
            **({} if beside is None else {attributes.BIAS_POINTER: cuda.pointer(beside)}),
            **({} if product.seen is None else {attributes.EPILOGUE_AUX_POINTER: cuda.pointer(product.seen),
                                                attributes.EPILOGUE_AUX_LD: product.out.shape[-1]})})
        layouts = [self._layout(int(memory), side, count) for side in (first, second, out)]
        arrays = [product.b, product.a, product.out, *(x for x in (beside, product.seen) if x is not None)]
        alignments = tuple(cuda.alignment(a, 256) for a in arrays)
        problem = Problem(operation, layouts, alignments, rounds,
                          (name, rounds, first, second, out, count, epilogue, alignments))
        weakref.finalize(problem, self._release, operation, layouts).atexit = False  # eager tasks bind at every step
        return problem

    def _bound(self, product: cuda.Product, problem: Problem, algorithm: Any, stream: Any) -> Thunk:
        """The call with one algorithm."""
        workspace, layouts = self.workspace(stream), problem.layouts
        factors = self._factors["float64" if str(product.out.dtype) == "float64" else "float32"]
        one, kept = factors[1:].ctypes.data, factors[int(product.accumulate) :].ctypes.data
        thunk: Any = partial(self.lt.matmul, self.handle, problem.operation, one, cuda.pointer(product.b), layouts[0],
                             cuda.pointer(product.a), layouts[1], kept, cuda.pointer(product.out), layouts[2],
                             cuda.pointer(product.out), layouts[2], algorithm.ctypes.data, workspace.data.ptr,
                             WORKSPACE, stream.ptr)
        thunk.owners = (product, problem, algorithm, workspace)
        return thunk

    def _release(self, operation: int, layouts: list[int]) -> None:
        for one in layouts:
            self.lt.matrix_layout_destroy(one)
        self.lt.matmul_desc_destroy(operation)

    def _set(self, kind: str, thing: int, values: Mapping[Any, int]) -> None:
        """Sets attributes of a descriptor, a layout or a preference."""
        for attribute, value in values.items():
            cell = np.array([value], getattr(self.lt, f"get_{kind}_attribute_dtype")(attribute))
            getattr(self.lt, f"{kind}_set_attribute")(thing, int(attribute), cell.ctypes.data, cell.nbytes)

    def _layout(self, memory: int, side: Side, count: int) -> int:
        layout = self.lt.matrix_layout_create(memory, side.rows, side.columns, side.leading)
        if count > 1:
            attributes = self.lt.MatrixLayoutAttribute
            self._set("matrix_layout", layout, {attributes.BATCH_COUNT: count,
                                                attributes.STRIDED_BATCH_OFFSET: side.batch_step})
        return int(layout)

    def _choose(self, product: cuda.Product, problem: Problem, key: Any, tf32: bool, small: bool) -> str:
        """The name of the fastest way, timed on arrays with the layout of the product's. An algorithm is named by its
        bytes, which the same version of cuBLASLt accepts."""
        within = self._within(product, tf32)

        def candidates() -> Iterator[Candidate]:
            copy = self.tuner.copied(product if small or within else apart(product)[0])
            like = self._problem(apart(copy)[0], tf32)
            first, *rest = (algorithm.tobytes().hex() for algorithm in self._named(like))
            for name in (first, *([OURS] if small else []), *(self._wholes(copy, tf32) if within else []), *rest):
                yield name, partial(self._call, copy, like, name, self.tuner.stream, tf32)

        def fitting(name: str) -> bool:
            if name == OURS:
                return small
            whole = name.startswith(WHOLE)
            return (" " not in name and within >= whole
                    and self._fits(self._problem(product, tf32) if whole else problem,
                                   self._algorithm(name.removeprefix(WHOLE))))

        return self.tuner.choose(key, candidates, fitting)

    def _wholes(self, product: cuda.Product, tf32: bool) -> Sequence[str]:
        """The names of some algorithms with an epilogue; none if the library has none for this product."""
        try:
            found = self._named(self._problem(product, tf32))
        except RuntimeError:
            return []
        return [WHOLE + algorithm.tobytes().hex() for algorithm in found[:EPILOGUED]]

    def _algorithm(self, words: str) -> Any:
        return np.frombuffer(bytearray.fromhex(words), self.lt.matmul_heuristic_result_dtype["algo"])

    def _fits(self, problem: Problem, algorithm: Any) -> bool:
        """Whether an algorithm that another process has chosen can run here."""
        said, (first, second, out) = np.zeros(1, self.lt.matmul_heuristic_result_dtype), problem.layouts
        try:
            self.lt.matmul_algo_check(self.handle, problem.operation, first, second, out, out,
                                      algorithm.ctypes.data, said.ctypes.data)
        except self.lt.cuBLASLtError:
            return False
        return bool(not said["state"][0] and said["workspace_size"][0] <= WORKSPACE)

    def _named(self, problem: Problem) -> Sequence[Any]:
        """The first algorithms that the library suggests within the workspace, in its order of preference. Raises
        RuntimeError if there is none."""
        lt, (first, second, out) = self.lt, problem.layouts
        preference = lt.matmul_preference_create()
        attributes = lt.MatmulPreferenceAttribute
        self._set("matmul_preference", preference, {
            attributes.MAX_WORKSPACE_BYTES: WORKSPACE,
            attributes.MIN_ALIGNMENT_A_BYTES: problem.alignments[0],
            attributes.MIN_ALIGNMENT_B_BYTES: problem.alignments[1],
            attributes.MIN_ALIGNMENT_C_BYTES: problem.alignments[2],
            attributes.MIN_ALIGNMENT_D_BYTES: problem.alignments[2]})
        found, count = np.zeros(CANDIDATES, lt.matmul_heuristic_result_dtype), np.zeros(1, np.int32)
        try:
            lt.matmul_algo_get_heuristic(self.handle, problem.operation, first, second, out, out, preference,
                                         CANDIDATES, found.ctypes.data, count.ctypes.data)
        except lt.cuBLASLtError as error:
            raise RuntimeError(f"cuBLASLt refuses {problem.key}: {error}") from error
        finally:
            lt.matmul_preference_destroy(preference)
        named = [np.ascontiguousarray(one["algo"]).reshape(1) for one in found[: int(count[0])] if not one["state"]]
        if not named:
            raise RuntimeError(f"cuBLASLt has no algorithm for {problem.key}")
        return named
