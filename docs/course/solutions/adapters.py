"""Where the grader finds the solutions."""

from first_k import first_k
from memory import plan
from pipelines import one_f_one_b, zb_h1
from simulator import simulate
from tape import backward
from validator import valid

__all__ = ["backward", "first_k", "one_f_one_b", "plan", "simulate", "valid", "zb_h1"]
