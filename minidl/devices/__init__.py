"""Devices run tasks: lanes of the CPU in Python and in compiled code, streams and graphs of CUDA. None knows a plan."""
