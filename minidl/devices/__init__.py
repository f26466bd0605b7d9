"""Devices run tasks: lanes of the CPU in Python and in compiled code, streams and graphs of CUDA. None knows a plan."""


class DeviceError(RuntimeError):
    """A device is not available here, or cannot do something. The message is one line and says what is missing."""
