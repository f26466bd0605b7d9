"""Data as NumPy batches: embedded, generated, or from local files. Nothing is ever downloaded.

It knows nothing of tensors, devices, models or schedules. Every number is fixed by the data's name, the seed and the
place in the order, never by how many ranks share a batch.
"""

from .catalogue import NAMES, digits, load
from .dataset import DataError, Dataset, adapt
from .loader import Loader

__all__ = ["NAMES", "DataError", "Dataset", "Loader", "adapt", "digits", "load"]
