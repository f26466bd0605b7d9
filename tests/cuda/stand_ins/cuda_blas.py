"""cuBLASLt's calls, as `minidl.devices.cuda.products` makes them, answered by NumPy: descriptors, layouts, algorithms
to choose from and the product itself, from addresses alone. Every algorithm adds up in an order of its own, so that the
last bits tell which was taken.

What cuBLASLt refuses is refused: layouts that do not fit each other, addresses that are less aligned than the algorithm
was promised, descriptors that are gone, a workspace that is too small, an algorithm's bytes of another product.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import zlib
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  bfloat16
import numpy as np
from cuda_machine import Machine
from cuda_signatures import checked, installed

from minidl.kernels import KERNELS

CudaDataType = enum.IntEnum("CudaDataType", {"CUDA_R_32F": 0, "CUDA_R_64F": 1, "CUDA_R_16F": 2, "CUDA_R_16BF": 14})
ComputeType = enum.IntEnum("ComputeType", {"COMPUTE_32F": 68, "COMPUTE_64F": 70, "COMPUTE_32F_FAST_TF32": 77})
MatmulDescAttribute = enum.IntEnum("MatmulDescAttribute", {
    "TRANSA": 3, "TRANSB": 4, "EPILOGUE": 7, "BIAS_POINTER": 8, "EPILOGUE_AUX_POINTER": 11, "EPILOGUE_AUX_LD": 12,
    "SM_COUNT_TARGET": 15})
Epilogue = enum.IntEnum("Epilogue", {"DEFAULT": 1, "RELU": 2, "BIAS": 4, "RELU_BIAS": 6, "BGRADB": 512, "DGELU": 192})
MatrixLayoutAttribute = enum.IntEnum("MatrixLayoutAttribute", {"BATCH_COUNT": 5, "STRIDED_BATCH_OFFSET": 6})
MatmulPreferenceAttribute = enum.IntEnum("MatmulPreferenceAttribute", {
    "MAX_WORKSPACE_BYTES": 1, "MIN_ALIGNMENT_A_BYTES": 5, "MIN_ALIGNMENT_B_BYTES": 6, "MIN_ALIGNMENT_C_BYTES": 7,
    "MIN_ALIGNMENT_D_BYTES": 8})
ENUMS = {e.__name__: e for e in (MatmulDescAttribute, Epilogue, MatrixLayoutAttribute, MatmulPreferenceAttribute)}
#: of each attribute, the type of its value
DTYPES = {"matmul_desc": {3: np.int32, 4: np.int32, 7: np.uint32, 8: np.int64, 11: np.int64, 12: np.int64,
                          15: np.int32},
          "matrix_layout": {5: np.int32, 6: np.int64},
          "matmul_preference": {1: np.uint64, 5: np.uint32, 6: np.uint32, 7: np.uint32, 8: np.uint32}}
HEURISTIC = np.dtype([("algo", [("data_", "<u8", (8,))]), ("workspace_size", "<u8"), ("state", "<i4"),
                      ("waves_count", "<f4"), ("reserved", "<i4", (4,))])
TYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}
NAMED = 5  #: algorithms that there are for a product
#: what arithmetic and scale go with a type
ALLOWED = {(0, 68, 0), (0, 77, 0), (1, 70, 1), (2, 68, 0), (14, 68, 0)}


class cuBLASLtError(Exception):
    """As nvmath's."""


def refuse(unless: Any, why: str) -> None:
    if not unless:
        raise cuBLASLtError(why)


class Blas:
    """The library on one machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self._numbers = machine, itertools.count(1)
        self.objects: dict[int, dict[Any, Any]] = {}  #: descriptors, layouts and preferences that are not destroyed
        self.asked = 0  #: times that algorithms were asked for

    def make(self, **values: Any) -> int:
        self.objects[number := next(self._numbers)] = values
        return number

    def destroy(self, number: int) -> None:
        del self.objects[number]

    def set(self, kind: str, number: int, attribute: int, buf: int, size: int) -> None:
        dtype = np.dtype(DTYPES[kind][attribute])
        assert size == dtype.itemsize, f"attribute {attribute} of {kind} has {dtype.itemsize} bytes, not {size}"
        self.objects[number][attribute] = int(np.frombuffer(ctypes.string_at(buf, size), dtype)[0])

    def layout(self, type: int, rows: int, cols: int, ld: int) -> int:
        return self.make(type=type, rows=rows, cols=cols, ld=ld)

    def problem(self, operation: int, layouts: tuple[int, ...]) -> Any:
        """What a descriptor and layouts ask for. Raises cuBLASLtError where that is nothing."""
        d, (a, b, c, out) = self.objects[operation], (self.objects[x] for x in layouts)
        refuse((a["type"], d["compute"], d["scale"]) in ALLOWED and len({x["type"] for x in (a, b, c, out)}) == 1,
               "no arithmetic for these types")
        for x in (a, b, c, out):
            refuse(x["rows"] > 0 and x["cols"] > 0 and x["ld"] >= x["rows"], f"{x} is no layout")
        refuse(c == out, "C and D differ")
        m, k = (a["cols"], a["rows"]) if d.get(3) else (a["rows"], a["cols"])
        l, n = (b["cols"], b["rows"]) if d.get(4) else (b["rows"], b["cols"])
        refuse((m, k, n) == (out["rows"], l, out["cols"]),
               f"{m} x {k} times {l} x {n} is not {out['rows']} x {out['cols']}")
        refuse(len({x.get(5, 1) for x in (a, b, out)}) == 1, "batches differ")
        epilogue = Epilogue(d.get(7, Epilogue.DEFAULT))
        refuse(epilogue not in (Epilogue.BGRADB, Epilogue.DGELU) or (a["type"] != 1 and out.get(5, 1) == 1),
               "no such epilogue for this type, or for several matrices")
        refuse(epilogue != Epilogue.DGELU or (d[12] >= out["rows"] and d[12] % 8 == 0 and d[11] % 16 == 0),
               "the input of GELU is not as aligned as it must be")
        return SimpleNamespace(operation=dict(d), layouts=tuple(dict(x) for x in (a, b, out)),
                               epilogue=epilogue.name, bias=d.get(8), m=m)

    def words(self, algorithm: int, problem: Any, aligned: tuple[int, ...]) -> Any:
        """An algorithm's bytes: they mean the same in every process."""
        found = np.zeros(1, HEURISTIC["algo"])
        found["data_"][0, :5] = 1 + algorithm, zlib.crc32(repr((problem.layouts, problem.epilogue,
                                                                problem.operation["compute"])).encode()), *aligned
        return found

    def choose(self, handle: int, operation: int, a: int, b: int, c: int, d: int, preference: int, requested: int,
               results: int, count: int) -> None:
        self.machine.not_in_capture("algorithms are asked for")
        self.asked += 1
        problem, preference = self.problem(operation, (a, b, c, d)), self.objects[preference]
        found = np.zeros(min(requested, NAMED), HEURISTIC)
        for i in range(len(found)):
            found["algo"][i] = self.words(i, problem, tuple(preference.get(n, 1) for n in (5, 6, 8)))[0]
        found["workspace_size"] = preference.get(1, 0)
        ctypes.memmove(results, found.ctypes.data, found.nbytes)
        ctypes.memmove(count, np.int32(len(found)).tobytes(), 4)

    def check(self, handle: int, operation: int, a: int, b: int, c: int, d: int, algorithm: int, result: int) -> None:
        problem, words = self.problem(operation, (a, b, c, d)), self.read(algorithm)
        refuse(words["data_"][0, 1] == self.words(0, problem, (1, 1, 1))["data_"][0, 1],
               "the algorithm is of another product")
        ctypes.memmove(result, np.zeros(1, HEURISTIC).ctypes.data, HEURISTIC.itemsize)

    def read(self, algorithm: int) -> Any:
        return np.frombuffer(ctypes.string_at(algorithm, HEURISTIC["algo"].itemsize), HEURISTIC["algo"])

    def matmul(self, handle: int, operation: int, alpha: int, a: int, adesc: int, b: int, bdesc: int, beta: int, c: int,
               cdesc: int, d: int, ddesc: int, algo: int, workspace: int, size: int, stream: int) -> None:
        asked, words = self.problem(operation, (adesc, bdesc, cdesc, ddesc)), self.read(algo)
        number, of, *aligned = (int(v) for v in words["data_"][0, :5])
        refuse(number and of == int(self.words(0, asked, (1, 1, 1))["data_"][0, 1]),
               "the algorithm was chosen for another product")
        refuse(c == d, "C is not D")
        refuse(all(x % n == 0 for x, n in zip((a, b, d), aligned, strict=True)),
               "addresses are less aligned than was promised")
        self.machine.check_held(workspace, size, "a workspace")
        of_scale = np.dtype(TYPES[asked.operation["scale"]])
        one, kept = (np.frombuffer(ctypes.string_at(x, of_scale.itemsize), of_scale)[0] for x in (alpha, beta))
        assert (one, kept in (0, 1)) == (1, True)
        first, second, out = (self.matrices(x, layout) for x, layout in zip((a, b, d), asked.layouts, strict=True))
        extents = [(x.ctypes.data, x.itemsize + sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)))
                   for x in (first, second, out)]
        bias = self.vector(asked.bias, asked.m, out.dtype) if "BIAS" in asked.epilogue else None
        extents += [] if bias is None else [(asked.bias, bias.nbytes)]
        sums = self.vector(asked.bias, out.shape[2], out.dtype) if asked.epilogue == "BGRADB" else None
        extents += [] if sums is None else [(asked.bias, sums.nbytes)]
        seen = None
        if asked.epilogue == "DGELU":
            at, leading = asked.operation[11], asked.operation[12]
            seen = self.matrices(at, {"type": asked.layouts[2]["type"], "rows": asked.m, "cols": out.shape[2],
                                      "ld": leading})[0]
            extents.append((at, leading * out.shape[2] * out.itemsize))

        def body() -> None:
            wide = of_scale
            for x, y, z in zip(first, second, out, strict=True):
                x, y = (v.T if asked.operation.get(n) else v for v, n in ((x, 3), (y, 4)))
                found = sum(x[:, i::number].astype(wide) @ y[i::number].astype(wide)
                            for i in range(min(number, x.shape[1])))
                found = found if bias is None else found + bias.astype(wide)[:, None]
                found = found + z if kept else found
                if sums is not None:
                    sums[...] = sum(y[i::number].astype(wide).sum(0) for i in range(min(number, len(y))))
                if seen is not None:
                    found = KERNELS["gelu_tanh_grad"].reference(np, seen.astype(wide), found)
                z[...] = np.maximum(found, 0) if "RELU" in asked.epilogue else found

        self.machine.issue(stream, body, extents, f"algorithm {number} of {of}")

    def matrices(self, at: int, layout: dict[Any, Any]) -> Any:
        """(count, rows, columns) of a layout at an address."""
        dtype = np.dtype(TYPES[layout["type"]])
        count, apart = layout.get(5, 1), layout.get(6, 0)
        shape, strides = ((count, layout["rows"], layout["cols"]),
                          tuple(s * dtype.itemsize for s in (apart, 1, layout["ld"])))
        extent = dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        return np.ndarray(shape, dtype, (ctypes.c_ubyte * extent).from_address(at), 0, strides)

    def vector(self, at: int, length: int, dtype: Any) -> Any:
        return np.frombuffer((ctypes.c_ubyte * (length * dtype.itemsize)).from_address(at), dtype)


def libraries(machine: Machine) -> tuple[Any, Any, Any]:
    """What `products.libraries` gives, on a machine."""
    blas, real = Blas(machine), installed("nvmath.bindings.cublasLt")

    def dtype(kind: str) -> Any:
        return lambda attr: DTYPES[kind][attr]

    lt = SimpleNamespace(
        blas=blas, cuBLASLtError=cuBLASLtError, matmul_heuristic_result_dtype=HEURISTIC, **ENUMS, **checked(
            real, create=lambda: blas.machine.not_in_capture("a handle is made") or 1, matmul=blas.matmul,
            matmul_algo_get_heuristic=blas.choose, matmul_algo_check=blas.check, get_version=lambda: 130000,
            matmul_desc_create=lambda compute_type, scale_type: blas.make(compute=compute_type, scale=scale_type),
            matrix_layout_create=blas.layout,
            matmul_preference_create=blas.make, matmul_desc_destroy=blas.destroy, matrix_layout_destroy=blas.destroy,
            matmul_preference_destroy=blas.destroy, matmul_desc_set_attribute=lambda *a: blas.set("matmul_desc", *a),
            matrix_layout_set_attribute=lambda *a: blas.set("matrix_layout", *a),
            matmul_preference_set_attribute=lambda *a: blas.set("matmul_preference", *a),
            get_matmul_desc_attribute_dtype=dtype("matmul_desc"),
            get_matrix_layout_attribute_dtype=dtype("matrix_layout"),
            get_matmul_preference_attribute_dtype=dtype("matmul_preference")))
    return CudaDataType, SimpleNamespace(ComputeType=ComputeType), lt
