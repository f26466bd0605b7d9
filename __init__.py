"""Python started in the folder that a clone lies in takes the clone for the package `minidl`: here it is led to the
real one, the folder of that name within. Nothing else uses this file, and it is not installed."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_package = Path(__file__).with_name("minidl")
_spec = spec_from_file_location(__name__, _package / "__init__.py", submodule_search_locations=[str(_package)])
assert _spec is not None
assert _spec.loader is not None
sys.modules[__name__] = _module = module_from_spec(_spec)  # which `import` then returns
_spec.loader.exec_module(_module)
