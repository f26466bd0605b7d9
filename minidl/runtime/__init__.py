"""Runs programs: devices, lanes, memory, executors, and the transports between ranks. It decides no order."""
