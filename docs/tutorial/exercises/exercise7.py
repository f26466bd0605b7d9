"""Exercise 7. Linear partition.

Copy this file, complete `partition`, and grade your copy:

    cp docs/tutorial/exercises/exercise7.py my_partition.py
    python docs/tutorial/grade.py 7 my_partition.py

`times` stand in pipeline order. Each processor takes a run of them: the first processor the first few, the next one the
next few, and so on; a processor may also take none. The period is the largest sum of a processor. Return the smallest
period that is possible. There are up to 60 times and 16 processors, so trying everything takes too long.

A hint: for a given period it is easy to say whether the processors are enough.
"""


def partition(times, processors):
    """The smallest period for whole numbers `times`."""
    size = -(-len(times) // processors)  # equal counts: right only when the times are equal
    return max(sum(times[i : i + size]) for i in range(0, len(times), size))
